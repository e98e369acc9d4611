"""Acceptance and training data as others published them: what a plan expects of each method, and where that was read.

A chain's acceptance length AL at K is turned into alpha, the rate that gives it when it is the same at every position (arXiv 2211.17192).
Greedy decoding, targets of 2 to 70 billion parameters; this project measured none of it.
"""

from dataclasses import dataclass

from specdistill.statistics.theory import alpha_from_acceptance_length

TOKENS_PER_SAMPLE = 950  # DeepSpec's cache: about 38 TB of 30 KB a token for 1.3M conversations


@dataclass(frozen=True)
class Published:
    """alphas: the lower and the higher acceptance rate. training_tokens: distinct tokens that such drafts are trained on."""

    alphas: tuple[float, float] | None
    acceptance_source: str
    training_tokens: int | None
    training_source: str


PUBLISHED = {
    "eagle3": Published(
        (alpha_from_acceptance_length(2.26, 3), alpha_from_acceptance_length(3.08, 4)),
        "AL 2.26 at K = 3 (Qwen3-8B, vLLM's acceptance test) to 3.08 at K = 4 (Llama-3.1-8B, vLLM issue 20780), MT-bench; "
        "up to 5.3 on mathematics and code, K = 7 (arXiv 2607.05147)",
        532_000 * TOKENS_PER_SAMPLE,
        "532k ShareGPT and UltraChat conversations (arXiv 2503.01840)",
    ),
    "eagle": Published(
        (alpha_from_acceptance_length(2.47, 7), alpha_from_acceptance_length(2.10, 2)),
        "AL 2.10 at K = 2 to 2.47 at K = 7 (Llama-3.1-8B, MT-bench, vLLM issue 20780)",
        68_000 * TOKENS_PER_SAMPLE,
        "68k ShareGPT conversations (arXiv 2401.15077)",
    ),
    "mtp": Published(
        (alpha_from_acceptance_length(2.95, 3), alpha_from_acceptance_length(3.23, 3)),
        "AL 2.95 (Qwen3.5-4B, the floor that vllm-project/speculators tests) to 3.23 (Qwen3.5-9B tuned on GSM8K, same source) at "
        "K = 3; DeepSeek-V3's first guess is accepted at 0.85 to 0.90 (arXiv 2412.19437)",
        5_000 * TOKENS_PER_SAMPLE,
        "5k conversations tune it to a domain (vllm-project/speculators); it comes trained with the target",
    ),
    "draft_model": Published(
        (1 - 1 / 2.01, 0.76),
        "AL 2.01 (68M for Vicuna-33B, not distilled, Spec-Bench; K not stated, so alpha is at least 1 - 1/AL) to alpha 0.76 (160M for "
        "Vicuna-7B, distilled on the domain it serves, OSD, ICML 2024)",
        532_000 * TOKENS_PER_SAMPLE,
        "assumed, as for eagle3: no figure is published for this shape",
    ),
    "ngram": Published(
        (alpha_from_acceptance_length(1.54, 10), alpha_from_acceptance_length(1.75, 10)),
        "AL 1.54 (Vicuna-33B) to 1.75 (Vicuna-7B), prompt look-up on Spec-Bench, K taken as 10",
        0,
        "nothing to train",
    ),
}
FRESH_MTP = Published(None, "none is published for a fresh layer on a frozen target", None, "none is published")
