"""The metrics of a report, each one formula over the totals of per-prompt sums.

Definitions are vLLM's, so that numbers compare: the acceptance length counts the bonus token, rates per position are unconditional, and
every ratio is a micro-average, a ratio of sums over all drafts of a row. The same formula gives the value and, on resampled prompts, its
interval: the bootstrap resamples prompts, or what was drawn together, so nothing else is summed before.

Context buckets are powers of two: bucket b holds the rounds that began with b to 2b - 1 tokens before them.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specdistill.statistics.records import PromptRecord, Timing
from specdistill.statistics.theory import conditional_rates, predicted_speedup

PromptSums = dict[str, NDArray[np.float64]]

MIN_BUCKET_DRAFTS = 30  # below this a bucket's acceptance length is mostly noise


def prompt_sums(records: Sequence[PromptRecord]) -> PromptSums:
    """Name of a sum -> [P], its value for each prompt; NaN where it was not measured.

    Where prompts were decoded together, `batch` numbers the batch of each; where they were drawn together, `cluster`. Neither is a sum.
    """
    long_from = long_context_start(records)
    rows = [{**_sums(record), **_long_and_short(record, long_from)} for record in records]
    # What was not measured is None, which becomes NaN.
    sums = {
        name: np.array([row[name] for row in rows], dtype=np.float64)
        for name in (rows[0] if rows else ())
    }
    if any(record.batch is not None for record in records):
        sums["batch"] = np.array([record.batch for record in records], dtype=np.float64)
    if any(record.cluster is not None for record in records):
        drawn = [record.cluster or record.id for record in records]
        sums["cluster"] = np.unique(drawn, return_inverse=True)[1].astype(np.float64)
    return sums


def accepted_by_bucket(records: Sequence[PromptRecord]) -> dict[int, list[int]]:
    """Context bucket -> the number of accepted tokens of each round with a draft that began in it."""
    accepted = defaultdict(list)
    for record in records:
        context = record.num_prompt_tokens + 1
        for round in record.rounds:
            if round.drafted:
                accepted[1 << (context.bit_length() - 1)].append(len(round.accepted))
            context += len(round.emitted)
    return accepted


def long_context_start(records: Sequence[PromptRecord]) -> int | None:
    """Where long contexts begin: the highest bucket with enough drafts in it and below it; None without one."""
    counts = {bucket: len(accepted) for bucket, accepted in accepted_by_bucket(records).items()}
    for bucket in sorted(counts, reverse=True):
        num_below = sum(count for other, count in counts.items() if other < bucket)
        if counts[bucket] >= MIN_BUCKET_DRAFTS and num_below >= MIN_BUCKET_DRAFTS:
            return bucket
    return None


def _sums(record: PromptRecord) -> dict[str, float | None]:
    drafts, hf = record.drafts(), record.hf_generate
    positions = [
        (len(round.accepted), len(round.drafted)) for round in record.rounds if round.drafted
    ]
    baseline = (
        asdict(record.baseline)
        if record.baseline
        else {field.name: None for field in fields(Timing)}
    )
    return {
        "num_prompts": 1,
        "num_drafts": len(drafts),
        "num_draft_tokens": sum(drafted for drafted, _ in drafts),
        "num_accepted_tokens": sum(accepted for _, accepted in drafts),
        "num_accepted_first": sum(accepted > 0 for accepted, _ in positions),
        "num_accepted_later": sum(max(accepted - 1, 0) for accepted, _ in positions),
        # A position is reached when the one before it was accepted; the first rejection ends a draft.
        "num_reached_later": sum(min(accepted + 1, drafted) - 1 for accepted, drafted in positions),
        **asdict(record.speculative),
        **{f"baseline_{name}": number for name, number in baseline.items()},
        "hf_num_tokens": hf.num_tokens if hf else None,
        "hf_seconds": hf.seconds if hf else None,
        "num_in_draft_vocabulary": record.num_in_draft_vocabulary,
    }


def _long_and_short(record: PromptRecord, long_from: int | None) -> dict[str, float]:
    """Drafts and accepted tokens at long and at shorter contexts; NaN where the suite has no long ones."""
    sums = {
        f"num_{what}_{length}": np.nan
        for what in ("drafts", "accepted")
        for length in ("long", "short")
    }
    if long_from is not None:
        sums = dict.fromkeys(sums, 0.0)
        for bucket, accepted in accepted_by_bucket([record]).items():
            length = "long" if bucket >= long_from else "short"
            sums[f"num_drafts_{length}"] += len(accepted)
            sums[f"num_accepted_{length}"] += sum(accepted)
    return sums


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


def _of(formula: Callable[..., Any], better: Literal["higher", "lower"] = "higher") -> Metric:
    """The metric of a formula whose parameters have the names of its sums."""
    return Metric(tuple(inspect.signature(formula).parameters), formula, better)


def _speedup(num_tokens: Any, seconds: Any, baseline_num_tokens: Any, baseline_seconds: Any) -> Any:
    """Tokens per second with the draft over tokens per second without; over the same tokens, the ratio of times."""
    return (num_tokens / seconds) / (baseline_num_tokens / baseline_seconds)


def _predicted(
    accepted: Any, drafted: Any, rounds: Any, draft: Any, verify: Any, plain_rounds: Any, plain: Any
) -> Any:
    """`theory.predicted_speedup`, with AL, v and d as means over all rounds, also those in which nothing was drafted."""
    step = plain / plain_rounds
    a_token = (
        draft / drafted / step
    )  # undefined where nothing was drafted, and with it the prediction
    return predicted_speedup(
        1 + accepted / rounds, verify / rounds / step, a_token * (drafted / rounds)
    )


_COUNTS, _SECONDS = (
    ("num_accepted_tokens", "num_draft_tokens", "num_rounds"),
    ("draft_seconds", "verify_seconds"),
)
_PREDICTED = Metric(
    (*_COUNTS, *_SECONDS, "baseline_num_rounds", "baseline_verify_seconds"), _predicted
)
_SPEEDUP = _of(_speedup)

METRICS: dict[str, Metric] = {
    "mean_acceptance_length": _of(
        lambda num_accepted_tokens, num_drafts: 1 + num_accepted_tokens / num_drafts
    ),
    # Rounds in which nothing was drafted count here, and not in the acceptance length.
    "tokens_per_round": _of(
        lambda num_accepted_tokens, num_rounds: 1 + num_accepted_tokens / num_rounds
    ),
    "acceptance_rate": _of(
        lambda num_accepted_tokens, num_draft_tokens: num_accepted_tokens / num_draft_tokens
    ),
    "tokens_per_second": _of(lambda num_tokens, seconds: num_tokens / seconds),
    "baseline_tokens_per_second": _of(
        lambda baseline_num_tokens, baseline_seconds: baseline_num_tokens / baseline_seconds
    ),
    "speedup": _SPEEDUP,
    # Without the prefill, which yields the first token of each prompt.
    "decode_speedup": Metric(
        (*_SPEEDUP.sums, "num_prompts", "prefill_seconds", "baseline_prefill_seconds"),
        lambda tokens, seconds, plain_tokens, plain_seconds, prompts, prefill, plain_prefill: (
            _speedup(
                tokens - prompts,
                seconds - prefill,
                plain_tokens - prompts,
                plain_seconds - plain_prefill,
            )
        ),
    ),
    "draft_ms": _of(
        lambda draft_seconds, num_draft_tokens: 1000 * draft_seconds / num_draft_tokens, "lower"
    ),
    "verify_ms": _of(
        lambda verify_seconds, num_rounds: 1000 * verify_seconds / num_rounds, "lower"
    ),
    "baseline_step_ms": _of(
        lambda baseline_verify_seconds, baseline_num_rounds: (
            1000 * baseline_verify_seconds / baseline_num_rounds
        ),
        "lower",
    ),
    "overhead_factor": Metric(
        ("num_accepted_tokens", "num_drafts", *_SPEEDUP.sums),
        lambda accepted, drafts, *times: (1 + accepted / drafts) / _speedup(*times),
        "lower",
    ),
    "predicted_speedup": _PREDICTED,
    "prediction_gap": Metric(
        (*_SPEEDUP.sums, *_PREDICTED.sums),
        lambda *sums: np.abs(_speedup(*sums[:4]) / _predicted(*sums[4:]) - 1),
        "lower",
    ),
    "hf_generate_tokens_per_second": _of(
        lambda hf_num_tokens, hf_seconds: hf_num_tokens / hf_seconds
    ),
    "baseline_over_hf_generate": Metric(
        ("baseline_num_tokens", "baseline_seconds", "hf_num_tokens", "hf_seconds"), _speedup
    ),
    "speedup_over_hf_generate": Metric(
        ("num_tokens", "seconds", "hf_num_tokens", "hf_seconds"), _speedup
    ),
    "context_ratio": Metric(
        ("num_accepted_long", "num_drafts_long", "num_accepted_short", "num_drafts_short"),
        lambda long, long_drafts, short, short_drafts: (
            (1 + long / long_drafts) / (1 + short / short_drafts)
        ),
    ),
    "vocabulary_coverage": Metric(
        ("num_in_draft_vocabulary", "baseline_num_tokens"), lambda covered, tokens: covered / tokens
    ),
}


def measured(metric: Metric, sums: PromptSums) -> list[NDArray[np.float64]]:
    """The metric's sums [P], of the prompts for which all of them were measured.

    Prompts of a cluster are not independent, nor are the times of a batch: they are added up, [number of clusters] or [number of batches].
    """
    chosen = np.stack([sums[name] for name in metric.sums])
    complete = ~np.isnan(chosen).any(axis=0)
    chosen = chosen[:, complete]
    if (units := units_of(metric, sums)) is not None:
        different, unit_of = np.unique(units[complete], return_inverse=True)
        chosen = np.stack([np.bincount(unit_of, column, len(different)) for column in chosen])
    return list(chosen)


def units_of(metric: Metric, sums: PromptSums) -> NDArray[np.float64] | None:
    """[P], the number of the batch or cluster that resamples of the metric draw a prompt with; None where each is drawn alone.

    Where times have both, these are the fewer ones: to join batches that share a cluster would join nearly all.
    """
    names = ("batch", "cluster") if metric.is_timed else ("cluster",)
    return min(
        (sums[name] for name in names if name in sums),
        key=lambda units: len(np.unique(units)),
        default=None,
    )


def value(metric: Metric, sums: PromptSums) -> float | None:
    """The metric over all prompts, or None when nothing it needs was measured."""
    with np.errstate(divide="ignore", invalid="ignore"):
        result = float(metric.formula(*(column.sum() for column in measured(metric, sums))))
    return result if np.isfinite(result) else None


def acceptance(drafts: Sequence[tuple[int, int]], num_positions: int) -> dict[str, Any]:
    """Counts of drafts and their rates by position, from the (drafted, accepted) number of tokens of each.

    accepted_per_position [K]: drafts whose position k was accepted. Rates per position are over all drafts (unconditional), so that
    the acceptance length is 1 + their sum; conditional rate k = rate k / rate k-1, None where position k was never reached.
    """
    per_position = [
        sum(accepted >= k for _, accepted in drafts) for k in range(1, num_positions + 1)
    ]
    counts = {
        "num_drafts": len(drafts),
        "num_draft_tokens": sum(drafted for drafted, _ in drafts),
        "num_accepted_tokens": sum(accepted for _, accepted in drafts),
        "accepted_per_position": per_position,
    }
    if not drafts:
        return counts
    rates = [count / len(drafts) for count in per_position]
    return {
        **counts,
        "acceptance_rate_per_position": rates,
        "conditional_acceptance_rate": conditional_rates(rates),
    }
