"""The recipe of n-gram lookup, which is not trained."""

from typing import Literal

from pydantic import model_validator

from specdistill.errors import UserError
from specdistill.methods.recipe import Recipe
from specdistill.recipe.fields import ReadWhen, Section, option, section
from specdistill.recipe.sections import IN_PROCESS, EvalConfig, TreeConfig

CHAINS = ReadWhen("without lookup_first.draft_tree", lambda it: it.draft_tree is None)


class NgramConfig(Section):
    min: int = option(1, "fewest tokens that must agree", ge=1)
    max: int = option(3, "most tokens compared; the longest agreement counts", ge=1)
    lookup: Literal["sequence", "prompt"] = option("sequence", "where they are looked up: prompt and output, or the prompt")

    @model_validator(mode="after")
    def _has_lengths(self) -> "NgramConfig":
        _check_lengths("eval.ngram", self.min, self.max)
        return self


class LookupFirstConfig(Section):
    """An n-gram lookup in front of a draft (see specdistill.methods.ngram.first)."""

    min: int = option(2, "fewest tokens that must agree for what followed them to be drafted", ge=1)
    max: int = option(5, "most tokens compared; the longest agreement counts", ge=1)
    draft_tokens: int = option(
        2, "draft tokens of the draft, where nothing is found; a lookup gives num_speculative_tokens", ge=1, read_when=CHAINS
    )
    draft_tree: TreeConfig | None = option(None, "a tree of the draft in place of draft_tokens; null: a chain of these")

    @model_validator(mode="after")
    def _has_lengths(self) -> "LookupFirstConfig":
        _check_lengths("lookup_first", self.min, self.max)
        return self

    @property
    def levels(self) -> int:
        """Draft steps per round in which the draft drafts."""
        return self.draft_tree.levels if self.draft_tree else self.draft_tokens


def _check_lengths(section: str, shortest: int, longest: int) -> None:
    if shortest > longest:
        raise UserError(f"{section}.min", got=shortest, expected=f"at most {section}.max, which is {longest}")


class NgramEvalConfig(EvalConfig):
    ngram: NgramConfig = option(NgramConfig(), "how n-grams are looked up", read_when=IN_PROCESS)

    @model_validator(mode="after")
    def _can_be_proposed(self) -> "NgramEvalConfig":
        if self.tree or self.sweep.tree:
            raise UserError("eval.tree", got="a tree with method ngram", expected="no such key: it drafts chains only")
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
