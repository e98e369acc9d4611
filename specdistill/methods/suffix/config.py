"""The recipe of suffix decoding, which is not trained."""

from pydantic import model_validator

from specdistill.common.errors import UserError
from specdistill.methods.lookups.config import UntrainedRecipe, check_engine_values
from specdistill.recipe.fields import Section, option, section
from specdistill.recipe.sections import (
    ENGINE_IS_NOT_RUNNING,
    ENGINE_IS_STARTED,
    EvalConfig,
    check_lengths,
)


class SuffixConfig(Section):
    """The section `eval.suffix`: how suffixes are looked up."""

    min: int = option(
        1, "tokens of the shortest suffix (the last tokens of the text) that is looked up", ge=1
    )
    max: int = option(24, "tokens of the longest suffix that is looked up", ge=1)
    max_cached_requests: int = option(
        10000,
        "number of earlier requests, the latest ones, whose outputs are searched too; 0: none",
        ge=0,
    )
    max_spec_factor: float = option(
        1.0, "longest draft, as a multiple of the length of the suffix that was found", gt=0
    )
    min_token_prob: float = option(
        0.1,
        "the draft ends before its estimated probability falls below this value; the estimate is"
        " the product of its tokens' relative frequencies after the suffix",
        ge=0,
        le=1,
    )

    @model_validator(mode="after")
    def _has_lengths(self) -> "SuffixConfig":
        """Check that `min` is at most `max`, and that the longest suffix allows a draft token."""
        check_lengths(self)
        # A suffix of n tokens allows up to `max_spec_factor` * n draft tokens, rounded down.
        if self.max_spec_factor * self.max < 1:
            raise UserError(
                "eval.suffix.max_spec_factor",
                got=self.max_spec_factor,
                expected=f"at least 1 / {self.max}, because smaller values never draft a token",
            )
        return self


class SuffixEvalConfig(EvalConfig):
    """The section `eval:` of a recipe of suffix decoding."""

    suffix: SuffixConfig = option(
        SuffixConfig(), "settings of suffix decoding", condition=ENGINE_IS_NOT_RUNNING
    )

    @model_validator(mode="after")
    def _check_engine_supports_values(self) -> "SuffixEvalConfig":
        """Check that an engine that this command starts supports the values of `eval.suffix`."""
        # vLLM always matches from one token on. It must not cache requests: the measurement runs
        # the same prompts several times, and later runs would find the outputs of earlier ones.
        if ENGINE_IS_STARTED.holds(self) and self.engine == "vllm":
            check_engine_values(self, "suffix", min=(1,), max_cached_requests=(0,))
        return self


class SuffixRecipe(UntrainedRecipe):
    """The recipe of suffix decoding."""

    eval: SuffixEvalConfig = section(SuffixEvalConfig)


RECIPE = SuffixRecipe
