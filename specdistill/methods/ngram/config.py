"""The recipe of n-gram lookup, which is not trained."""

from typing import Literal

from pydantic import model_validator

from specdistill.common.errors import make_unused_key_error
from specdistill.methods.lookups.config import UntrainedRecipe, check_engine_values
from specdistill.recipe.fields import Condition, Section, format_value, option, section
from specdistill.recipe.sections import (
    ENGINE_IS_NOT_RUNNING,
    ENGINE_IS_STARTED,
    EvalConfig,
    LookupFirstConfig,
    check_lengths,
)

OWN_RULE = Condition("with rule=specdistill", lambda lookup: lookup.rule == "specdistill")
SEVERAL_LENGTHS = Condition(
    "without rule=llama.cpp, which always compares `max` tokens",
    lambda lookup: lookup.rule != "llama.cpp",
)


class NgramConfig(Section):
    """The section `eval.ngram`: how n-grams are looked up."""

    rule: Literal["specdistill", "vllm", "llama.cpp"] = option(
        "specdistill",
        "which earlier occurrence of the last tokens is continued; specdistill: the latest"
        " (its tokens are repeated if fewer than K follow); vllm: the first; llama.cpp: the latest,"
        " and none if fewer than `max` tokens follow it, as in llama.cpp's ngram-simple",
    )
    min: int = option(1, "tokens of the shortest n-gram to match", ge=1, condition=SEVERAL_LENGTHS)
    max: int = option(
        3, "tokens of the longest n-gram to match; with rule=llama.cpp, of every n-gram", ge=1
    )
    lookup: Literal["sequence", "prompt"] = option(
        "sequence",
        "the text that is searched; sequence: prompt and output; prompt: only the prompt",
        condition=OWN_RULE,
    )

    _has_lengths = model_validator(mode="after")(check_lengths)


class NgramEvalConfig(EvalConfig):
    """The section `eval:` of a recipe of n-gram lookup."""

    ngram: NgramConfig = option(
        NgramConfig(), "settings of n-gram lookup", condition=ENGINE_IS_NOT_RUNNING
    )

    @model_validator(mode="after")
    def _check_engine_supports_values(self) -> "NgramEvalConfig":
        """Check that an engine that this command starts supports the values of `eval.ngram`."""
        if not ENGINE_IS_STARTED.holds(self):
            return self

        # An engine always searches both prompt and output, so `lookup` must be `sequence`. It
        # always uses the rule that is named after it. So a recipe for llama.cpp must set
        # rule=llama.cpp. A recipe for vLLM may set rule=vllm, or keep the default rule=specdistill.
        # These two rules look up the same n-grams. They differ only in which occurrence of an
        # n-gram is continued, and how far.
        is_llama_cpp = self.engine == "llama.cpp"
        accepted_rules = ("llama.cpp",) if is_llama_cpp else ("specdistill", self.engine)
        check_engine_values(self, "ngram", rule=accepted_rules, lookup=("sequence",))
        if not is_llama_cpp:
            return self

        # llama.cpp always compares exactly `max` tokens, and drafts nothing if `max` exceeds K. The
        # same limits hold if llama.cpp looks tokens up in front of a draft. `LookupFirstConfig`
        # describes such a lookup, and can check the limits. It has a shortest and a longest n-gram,
        # so both get the one length that llama.cpp compares.
        num_compared = self.ngram.max
        lookup = LookupFirstConfig(min=num_compared, max=num_compared)
        lookup.check_engine("eval.ngram", self.engine, self.smallest_k)

        # Keys with `draft` in their names, such as `spec_draft_threads`, are about a draft model,
        # which a lookup does not have.
        for name, value in vars(self.llama_cpp).items():
            if "draft" in name and value is not None:
                raise make_unused_key_error(
                    f"eval.llama_cpp.{name}", format_value(value), "a lookup has no draft"
                )
        return self


class NgramRecipe(UntrainedRecipe):
    """The recipe of n-gram lookup."""

    eval: NgramEvalConfig = section(NgramEvalConfig)


RECIPE = NgramRecipe
