"""The metrics of a report, each one formula over sums of per-prompt sums (see specdistill.statistics.prompt_sums).

Definitions are vLLM's, so that numbers compare: the acceptance length counts the bonus token, rates per position are unconditional, and
every ratio is a micro-average, a ratio of sums over all drafts of a row. The same formula gives the value and, on resampled prompts, its
interval.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specdistill.statistics.prompt_sums import PromptSums
from specdistill.statistics.theory import conditional_rates, predicted_speedup


@dataclass(frozen=True)
class Metric:
    """formula: the totals of `sums`, in that order -> value; elementwise, so that totals of many resamples pass through at once."""

    sums: tuple[str, ...]
    formula: Callable[..., Any]
    better: Literal["higher", "lower"] = "higher"

    @property
    def is_timed(self) -> bool:
        """Whether it depends on the machine, not only on draft and completions."""
        return any("seconds" in name for name in self.sums)


def _speedup(tokens: Any, seconds: Any, baseline_tokens: Any, baseline_seconds: Any) -> Any:
    """Tokens a second with the draft over tokens a second without; over the same tokens, the ratio of times."""
    return (tokens / seconds) / (baseline_tokens / baseline_seconds)


def _decode_speedup(tokens: Any, prompts: Any, seconds: Any, prefill: Any, *baseline: Any) -> Any:
    """`_speedup` without the prefill, which yields the first token of each prompt."""
    base_tokens, base_prompts, base_seconds, base_prefill = baseline
    return _speedup(tokens - prompts, seconds - prefill, base_tokens - base_prompts, base_seconds - base_prefill)


def _predicted(
    accepted: Any, drafted: Any, rounds: Any, draft_s: Any, verify_s: Any, base_rounds: Any, base_verify_s: Any
) -> Any:
    """`theory.predicted_speedup`, with AL, v and d as means over all rounds, also those in which nothing was drafted."""
    step = base_verify_s / base_rounds
    a_token = draft_s / drafted / step  # undefined where nothing was drafted, and with it the prediction
    return predicted_speedup(1 + accepted / rounds, verify_s / rounds / step, a_token * (drafted / rounds))


_SPEEDUP = ("num_tokens", "seconds", "baseline_num_tokens", "baseline_seconds")
_PREDICTED = (
    "num_accepted_tokens",
    "num_draft_tokens",
    "num_rounds",
    "draft_seconds",
    "verify_seconds",
    "baseline_num_rounds",
    "baseline_verify_seconds",
)
_ACCEPTANCE_LENGTH = ("num_accepted_tokens", "num_drafts")

METRICS: dict[str, Metric] = {
    "mean_acceptance_length": Metric(_ACCEPTANCE_LENGTH, lambda accepted, drafts: 1 + accepted / drafts),
    # Rounds in which nothing was drafted count here, and not in the acceptance length.
    "tokens_per_round": Metric(("num_accepted_tokens", "num_rounds"), lambda accepted, rounds: 1 + accepted / rounds),
    "acceptance_rate": Metric(("num_accepted_tokens", "num_draft_tokens"), lambda accepted, drafted: accepted / drafted),
    "tokens_per_second": Metric(("num_tokens", "seconds"), lambda tokens, seconds: tokens / seconds),
    "baseline_tokens_per_second": Metric(("baseline_num_tokens", "baseline_seconds"), lambda tokens, seconds: tokens / seconds),
    "speedup": Metric(_SPEEDUP, _speedup),
    "decode_speedup": Metric(
        (
            "num_tokens",
            "num_prompts",
            "seconds",
            "prefill_seconds",
            "baseline_num_tokens",
            "num_prompts",
            "baseline_seconds",
            "baseline_prefill_seconds",
        ),
        _decode_speedup,
    ),
    "draft_ms": Metric(("draft_seconds", "num_draft_tokens"), lambda seconds, drafted: 1000 * seconds / drafted, "lower"),
    "verify_ms": Metric(("verify_seconds", "num_rounds"), lambda seconds, rounds: 1000 * seconds / rounds, "lower"),
    "baseline_step_ms": Metric(
        ("baseline_verify_seconds", "baseline_num_rounds"), lambda seconds, rounds: 1000 * seconds / rounds, "lower"
    ),
    "overhead_factor": Metric(
        (*_ACCEPTANCE_LENGTH, *_SPEEDUP), lambda accepted, drafts, *times: (1 + accepted / drafts) / _speedup(*times), "lower"
    ),
    "predicted_speedup": Metric(_PREDICTED, _predicted),
    "prediction_gap": Metric(
        (*_SPEEDUP, *_PREDICTED),
        lambda *sums: np.abs(_speedup(*sums[:4]) / _predicted(*sums[4:]) - 1),
        "lower",
    ),
    "hf_generate_tokens_per_second": Metric(("hf_num_tokens", "hf_seconds"), lambda tokens, seconds: tokens / seconds),
    "baseline_over_hf_generate": Metric(("baseline_num_tokens", "baseline_seconds", "hf_num_tokens", "hf_seconds"), _speedup),
    "speedup_over_hf_generate": Metric(("num_tokens", "seconds", "hf_num_tokens", "hf_seconds"), _speedup),
    "context_ratio": Metric(
        ("num_accepted_long", "num_drafts_long", "num_accepted_short", "num_drafts_short"),
        lambda long, long_drafts, short, short_drafts: (1 + long / long_drafts) / (1 + short / short_drafts),
    ),
    "vocabulary_coverage": Metric(("num_in_draft_vocabulary", "baseline_num_tokens"), lambda covered, tokens: covered / tokens),
}


def measured(metric: Metric, sums: PromptSums) -> list[NDArray[np.float64]]:
    """The metric's sums [P], of the prompts for which all of them were measured.

    Prompts decoded together share their times, so for a metric of times the prompts of a batch are added up: [number of batches].
    """
    chosen = np.stack([sums[name] for name in metric.sums])
    complete = ~np.isnan(chosen).any(axis=0)
    chosen = chosen[:, complete]
    if metric.is_timed and "batch" in sums:
        batches, batch_of = np.unique(sums["batch"][complete], return_inverse=True)
        chosen = np.stack([np.bincount(batch_of, column, len(batches)) for column in chosen])
    return list(chosen)


def value(metric: Metric, sums: PromptSums) -> float | None:
    """The metric over all prompts, or None when nothing it needs was measured."""
    with np.errstate(divide="ignore", invalid="ignore"):
        result = float(metric.formula(*(column.sum() for column in measured(metric, sums))))
    return result if np.isfinite(result) else None


def acceptance(accepted: Sequence[Sequence[int]], drafted: Sequence[Sequence[int]], num_positions: int) -> dict[str, Any]:
    """Counts and rates of drafts, from the accepted and drafted number of tokens of each round, prompt by prompt.

    accepted_per_position [K]: drafts whose position k was accepted. Rates per position are over all drafts (unconditional), so that
    mean_acceptance_length = 1 + their sum; conditional rate k = rate k / rate k-1, None where position k was never reached.
    """
    per_draft: NDArray[np.int64] = np.array([count for prompt in accepted for count in prompt], dtype=np.int64)
    num_drafts, num_drafted, num_accepted = len(per_draft), sum(map(sum, drafted)), int(per_draft.sum())
    per_position = [int((per_draft >= k).sum()) for k in range(1, num_positions + 1)]
    counts = {
        "num_drafts": num_drafts,
        "num_draft_tokens": num_drafted,
        "num_accepted_tokens": num_accepted,
        "accepted_per_position": per_position,
    }
    if not num_drafts:
        return counts
    rates = [count / num_drafts for count in per_position]
    return {
        **counts,
        "mean_acceptance_length": 1 + num_accepted / num_drafts,
        "acceptance_rate": num_accepted / num_drafted,
        "acceptance_rate_per_position": rates,
        "conditional_acceptance_rate": conditional_rates(rates),
    }
