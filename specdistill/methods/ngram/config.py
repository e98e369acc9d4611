"""The recipe of n-gram lookup, which is not trained."""

from typing import Literal

from pydantic import model_validator

from specdistill.errors import UserError
from specdistill.methods.recipe import Recipe
from specdistill.recipe.fields import ReadWhen, Section, option, section
from specdistill.recipe.sections import LLAMA_CPP, STARTED, EvalConfig, check_lengths, check_llama_cpp

NO_SERVER = ReadWhen("without eval.server: a server looks up as it was started", lambda it: getattr(it, "server", None) is None)
OWN_RULE = ReadWhen("with rule=specdistill", lambda it: it.rule == "specdistill")
SEVERAL_LENGTHS = ReadWhen("without rule=llama.cpp, which compares max tokens", lambda it: it.rule != "llama.cpp")


class NgramConfig(Section):
    rule: Literal["specdistill", "vllm", "llama.cpp"] = option(
        "specdistill",
        "the latest occurrence, repeated past the end; vllm: the first, up to the end; llama.cpp: its ngram-simple",
    )
    min: int = option(1, "fewest tokens that must agree", ge=1, read_when=SEVERAL_LENGTHS)
    max: int = option(3, "most tokens compared, the longest agreement counts; of llama.cpp's rule as many as it compares", ge=1)
    lookup: Literal["sequence", "prompt"] = option(
        "sequence", "where they are looked up: prompt and output, or the prompt", read_when=OWN_RULE
    )

    @model_validator(mode="after")
    def _has_lengths(self) -> "NgramConfig":
        check_lengths("eval.ngram", self.min, self.max)
        return self


class NgramEvalConfig(EvalConfig):
    ngram: NgramConfig = option(NgramConfig(), "how n-grams are looked up", read_when=NO_SERVER)

    @model_validator(mode="after")
    def _can_be_proposed(self) -> "NgramEvalConfig":
        if STARTED.holds(self):  # an engine has a rule of its own
            # llama.cpp has no fewest tokens that must agree.
            rules = ("llama.cpp",) if self.engine == "llama.cpp" else ("specdistill", self.engine)
            for name, own in (("rule", rules), ("lookup", ("sequence",))):
                if (value := getattr(self.ngram, name)) not in own:
                    raise UserError(f"eval.ngram.{name}", got=f"{value} with eval.engine={self.engine}", expected=own[-1])
            if LLAMA_CPP.holds(self):
                check_llama_cpp("eval.ngram", self.ngram.max, self.smallest_k)
        if self.tree or self.sweep.tree:
            raise UserError("eval.tree", got="a tree with method ngram", expected="no such key: it drafts chains only")
        if self.lookup_first:
            raise UserError("eval.lookup_first", got="a lookup in front of method ngram", expected="null: it is one itself")
        return self


class NgramRecipe(Recipe):
    eval: NgramEvalConfig = section(NgramEvalConfig)

    @model_validator(mode="after")
    def _nothing_to_train(self) -> "NgramRecipe":
        other = next((name for name in self.train if name != "output_dir"), None)
        if other:
            raise UserError(
                f"train.{other}", got=f"{self.train[other]} with method ngram", expected="no such key: it is not trained"
            )
        if self.eval.draft is not None:
            raise UserError("eval.draft", got=f"{self.eval.draft} with method ngram", expected="no such key: it has no draft")
        return self


RECIPE = NgramRecipe
