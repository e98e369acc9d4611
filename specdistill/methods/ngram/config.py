"""The recipe of n-gram lookup, which is not trained."""

from typing import Literal

from pydantic import model_validator

from specdistill.errors import UserError
from specdistill.methods.recipe import Recipe
from specdistill.recipe.fields import Section, option, section
from specdistill.recipe.sections import IN_PROCESS, EvalConfig, check_lengths


class NgramConfig(Section):
    min: int = option(1, "fewest tokens that must agree", ge=1)
    max: int = option(3, "most tokens compared; the longest agreement counts", ge=1)
    lookup: Literal["sequence", "prompt"] = option("sequence", "where they are looked up: prompt and output, or the prompt")

    @model_validator(mode="after")
    def _has_lengths(self) -> "NgramConfig":
        check_lengths("eval.ngram", self.min, self.max)
        return self


class NgramEvalConfig(EvalConfig):
    ngram: NgramConfig = option(NgramConfig(), "how n-grams are looked up", read_when=IN_PROCESS)

    @model_validator(mode="after")
    def _can_be_proposed(self) -> "NgramEvalConfig":
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
