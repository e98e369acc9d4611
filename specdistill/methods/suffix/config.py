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

    min: int = option(1, "shortest match", ge=1)
    max: int = option(24, "longest match", ge=1)
    max_cached_requests: int = option(
        10000, "latest earlier requests whose outputs are searched too; 0: none", ge=0
    )
    max_spec_factor: float = option(1.0, "maximum draft tokens per matched token", gt=0)
    min_token_prob: float = option(
        0.1,
        "minimum estimated probability of the draft: the product of its tokens' frequencies after"
        " the match",
        ge=0,
        le=1,
    )

    @model_validator(mode="after")
    def _has_lengths(self) -> "SuffixConfig":
        """Check the lengths of matches, and that something can be drafted."""
        check_lengths(self)
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
        SuffixConfig(), "how suffixes are looked up", condition=ENGINE_IS_NOT_RUNNING
    )

    @model_validator(mode="after")
    def _check_engine_supports_values(self) -> "SuffixEvalConfig":
        """Check that an engine that this command starts supports the values of `eval.suffix`."""
        # vLLM has no shortest match. And if it cached requests, a repetition would find the outputs
        # of the repetition before it.
        if ENGINE_IS_STARTED.holds(self) and self.engine == "vllm":
            check_engine_values(self, "suffix", min=(1,), max_cached_requests=(0,))
        return self


class SuffixRecipe(UntrainedRecipe):
    """The recipe of suffix decoding."""

    eval: SuffixEvalConfig = section(SuffixEvalConfig)


RECIPE = SuffixRecipe
