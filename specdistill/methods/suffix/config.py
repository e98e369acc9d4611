"""The recipe of suffix decoding, which is not trained."""

from pydantic import model_validator

from specdistill.errors import UserError
from specdistill.methods.untrained import UntrainedRecipe, check_of_engine
from specdistill.recipe.fields import Section, option, section
from specdistill.recipe.sections import NOT_RUNNING, STARTED, EvalConfig, check_lengths


class SuffixConfig(Section):
    min: int = option(1, "shortest match", ge=1)
    max: int = option(24, "longest match", ge=1)
    max_cached_requests: int = option(
        10000, "latest earlier requests whose outputs are searched too; 0: none", ge=0
    )
    max_spec_factor: float = option(1.0, "maximum draft tokens per matched token", gt=0)
    min_token_prob: float = option(
        0.1,
        "minimum estimated probability of the draft: the product of its tokens' frequencies after the match",
        ge=0,
        le=1,
    )

    @model_validator(mode="after")
    def _has_lengths(self) -> "SuffixConfig":
        check_lengths(self)
        if self.max_spec_factor * self.max < 1:
            expected = f"at least 1 / {self.max}, or nothing is ever drafted"
            raise UserError(
                "eval.suffix.max_spec_factor", got=self.max_spec_factor, expected=expected
            )
        return self


class SuffixEvalConfig(EvalConfig):
    suffix: SuffixConfig = option(
        SuffixConfig(), "how suffixes are looked up", read_when=NOT_RUNNING
    )

    @model_validator(mode="after")
    def _is_of_the_engine(self) -> "SuffixEvalConfig":
        # It asks for no least agreement, and a repetition would look up what the one before it gave.
        if STARTED.holds(self) and self.engine == "vllm":
            check_of_engine(self, "suffix", min=(1,), max_cached_requests=(0,))
        return self


class SuffixRecipe(UntrainedRecipe):
    eval: SuffixEvalConfig = section(SuffixEvalConfig)


RECIPE = SuffixRecipe
