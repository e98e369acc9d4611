"""Answers to `specdistill plan` and `specdistill doctor` about PARD's models."""

from specdistill.evaluation.statistics.theory import alpha_from_acceptance_length
from specdistill.methods import sizes
from specdistill.methods.models.advice import ModelAdvice

PUBLISHED_FIGURES = sizes.MethodFigures(
    (alpha_from_acceptance_length(2.52, 3), alpha_from_acceptance_length(2.52, 3)),
    "AL 2.52 at K = 3 (0.6B for Qwen3, greedy, vLLM's tests); 3.83x faster at the best K (1B for"
    " Llama-3.1-8B, mean of three suites, arXiv 2504.18583)",
    532_000 * sizes.TOKENS_PER_SAMPLE,
    "assumed, as for draft_model: no figure is published for this shape",
)
NOTE = "a smaller language model with a head of its own, which fills masks in one pass"


class PardAdvice(ModelAdvice):
    """The advice on PARD's models."""

    def __init__(self) -> None:
        super().__init__(PUBLISHED_FIGURES, NOTE)

    def is_described(self, draft: sizes.ModelConfigInfo, target: sizes.ModelConfigInfo) -> bool:
        """Return whether a config.json belongs to a language model that fills masks."""
        return has_mask(draft.raw) and draft.is_causal_lm


def has_mask(config: sizes.RawConfig) -> bool:
    """Return whether a config.json says that the model drafts by masks."""
    return config.get("spd_type", "pard") == "pard" and "pard_token" in config
