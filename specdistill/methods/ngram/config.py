"""The recipe of n-gram lookup, which is not trained."""

from typing import Literal

from pydantic import model_validator

from specdistill.errors import UserError
from specdistill.methods.untrained import UntrainedRecipe, check_of_engine
from specdistill.recipe.fields import ReadWhen, Section, option, section, shown
from specdistill.recipe.sections import (
    LLAMA_CPP,
    NOT_RUNNING,
    STARTED,
    EvalConfig,
    LookupFirstConfig,
    check_lengths,
)

OWN_RULE = ReadWhen("with rule=specdistill", lambda it: it.rule == "specdistill")
SEVERAL_LENGTHS = ReadWhen(
    "without rule=llama.cpp, which compares max tokens", lambda it: it.rule != "llama.cpp"
)


class NgramConfig(Section):
    rule: Literal["specdistill", "vllm", "llama.cpp"] = option(
        "specdistill",
        "specdistill: continue the latest match, repeated past the end; vllm: the first match; llama.cpp: its ngram-simple",
    )
    min: int = option(1, "shortest n-gram to match", ge=1, read_when=SEVERAL_LENGTHS)
    max: int = option(3, "longest n-gram to match; with rule=llama.cpp the only length", ge=1)
    lookup: Literal["sequence", "prompt"] = option(
        "sequence", "where to look: prompt and output, or the prompt", read_when=OWN_RULE
    )

    _has_lengths = model_validator(mode="after")(check_lengths)


class NgramEvalConfig(EvalConfig):
    ngram: NgramConfig = option(NgramConfig(), "how n-grams are looked up", read_when=NOT_RUNNING)

    @model_validator(mode="after")
    def _is_of_the_engine(self) -> "NgramEvalConfig":
        if STARTED.holds(self):  # an engine has a rule of its own
            # llama.cpp has no fewest tokens that must agree.
            rules = ("llama.cpp",) if self.engine == "llama.cpp" else ("specdistill", self.engine)
            check_of_engine(self, "ngram", rule=rules, lookup=("sequence",))
            if LLAMA_CPP.holds(self):
                alike = LookupFirstConfig(min=self.ngram.max, max=self.ngram.max)
                alike.check_engine("eval.ngram", self.engine, self.smallest_k)
                for name, value in vars(self.llama_cpp).items():
                    if "draft" in name and value is not None:
                        raise UserError(
                            f"eval.llama_cpp.{name}",
                            got=shown(value),
                            expected="null: a lookup has no draft",
                        )
        return self


class NgramRecipe(UntrainedRecipe):
    eval: NgramEvalConfig = section(NgramEvalConfig)


RECIPE = NgramRecipe
