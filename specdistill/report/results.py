"""The result rows of a report, made from the records of its prompts (one row for the whole suite, one for each category), and found again.

Acceptance and speed come from the two metric modules under `eval/metrics`; every other number is a formula of
specdistill.statistics.metrics. What was not measured is absent, with the reason under `not_measured`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdistill.project import METRICS as METRIC_MODULES
from specdistill.statistics.intervals import estimates, macro_interval
from specdistill.statistics.metrics import (
    METRICS,
    MIN_BUCKET_DRAFTS,
    PromptSums,
    accepted_by_bucket,
    long_context_start,
    measured,
    prompt_sums,
    value,
)
from specdistill.statistics.records import ALL, CONFIGURATION_KEYS, Configuration, PromptRecord
from specdistill.statistics.theory import RoundCost, alpha_from_acceptance_length, best_point, speedup_curve
from specdistill.suites.suite import Suite

Row = Mapping[str, Any]

NO_REASONS: Mapping[str, str] = MappingProxyType({})
WITHOUT_INTERVAL = (
    "draft_ms",
    "verify_ms",
    "baseline_step_ms",
    "overhead_factor",
    "predicted_speedup",
    "prediction_gap",
    "decode_speedup",
)
NEED_DRAFTS = (
    "mean_acceptance_length",
    "acceptance_rate",
    "acceptance_rate_per_position",
    "conditional_acceptance_rate",
    "draft_ms",
    "predicted_speedup",
    "prediction_gap",
    "overhead_factor",
)
QUOTED = ("mean_acceptance_length", "speedup")
SLOW_BASELINE = 0.95  # below this share of the speed of transformers' `generate()` the baseline flatters the draft


def result_rows(
    records: Sequence[PromptRecord],
    suite: Suite,
    configuration: Configuration,
    *,
    seed: int,
    confidence: float = 0.95,
    reasons: Mapping[str, str] = NO_REASONS,
) -> list[dict[str, Any]]:
    """A configuration's rows, from its records: the suite's (`category: all`) and one for each category, in the suite's order.

    confidence: of each interval (see `estimates`). reasons: why this way of measuring cannot give some numbers.
    """
    groups = {ALL: list(records)}
    for record in records:
        groups.setdefault(record.category, []).append(record)
    scope = {"suite": suite.name, "suite_version": suite.version}
    return [
        {**scope, "category": category, **asdict(configuration), **_numbers(group, configuration, seed, confidence, reasons)}
        for category, group in groups.items()
    ]


def context_rows(records: Sequence[PromptRecord]) -> list[dict[str, Any]]:
    """Acceptance by the number of tokens before a round, in powers of two."""
    rows = []
    for bucket, accepted in sorted(accepted_by_bucket(records).items()):
        length = 1 + sum(accepted) / len(accepted)
        rows.append({"bucket": f"{bucket}-{2 * bucket - 1}", "num_drafts": len(accepted), "mean_acceptance_length": length})
    return rows


def theory(row: dict[str, Any], costs: Sequence[RoundCost], passes: Callable[[int], int]) -> dict[str, Any] | None:
    """What the suite's row implies: alpha, v and c at K, and the speedup to expect at K' up to K; None without drafts.

    costs: rounds timed at K' up to K; only what they cost relative to each other counts. passes: K' -> forward passes of the draft
    in such a round. Of a tree K is the depth, and c·K the cost of drafting all its nodes.
    """
    needed = ("acceptance_rate_per_position", "verify_ms", "draft_ms", "baseline_step_ms", "predicted_speedup")
    if any(name not in row for name in needed):
        return None
    rates, step = row["acceptance_rate_per_position"], row["baseline_step_ms"]
    num_drafted = row["num_draft_tokens"] / row["num_drafts"] if row["tree"] else len(rates)
    cost = RoundCost(len(rates), row["verify_ms"], row["draft_ms"] * num_drafted)
    curve = speedup_curve(rates, step, cost, costs)
    return {
        "alpha": alpha_from_acceptance_length(row["mean_acceptance_length"], len(rates)),
        "K": len(rates),
        "v": cost.verify_ms / step,
        "c": cost.draft_ms / cost.k / step,
        "predicted": row["predicted_speedup"],
        "best_k": best_point(curve)["k"],
        "curve": [{**point, "draft_passes": passes(int(point["k"]))} for point in curve],
    }


def headline(rows: Sequence[dict[str, Any]], records: Sequence[PromptRecord], *, confidence: float = 0.95) -> dict[str, Any]:
    """The numbers to quote of a configuration, from its rows and records: acceptance length and speedup, as macro-averages over the
    categories, and as the micro-averages of the whole suite, in which a category counts by its drafts or its time.
    """
    by_category = [row for row in rows if row["category"] != ALL]
    quoted = [name for name in QUOTED if by_category and all(name in row for row in by_category)]
    if not quoted:
        return {}
    sums, categories = prompt_sums(records), [record.category for record in records]
    macro: dict[str, Any] = {}
    for name in quoted:
        macro[name] = sum(row[name] for row in by_category) / len(by_category)
        if bounds := macro_interval(METRICS[name], sums, categories, confidence=confidence):
            macro[f"{name}_ci95"] = list(bounds)
    return {
        **macro,
        "average": f"macro over {len(by_category)} categories, each a micro-average over its drafts",
        "micro": {
            **{key: rows[0][key] for name in quoted for key in (name, f"{name}_ci95") if key in rows[0]},
            "average": f"micro over {rows[0]['num_drafts']} drafts and {rows[0]['num_new_tokens']} tokens of {len(records)} prompts",
        },
    }


def main_rows(report: Row) -> list[Row]:
    """The rows of the main configuration: the whole suite and its categories."""
    return [row for row in report["results"] if _equal(row, report["results"][0], CONFIGURATION_KEYS)]


def whole_rows(report: Row) -> list[Row]:
    """The whole suite's row of every configuration."""
    return [row for row in report["results"] if row["category"] == ALL]


def sweep(report: Row, setting: str) -> list[Row]:
    """The first row and those that differ from it in `setting` alone, by its value; empty where it was not swept."""
    others = [name for name in ("suite", "category", *CONFIGURATION_KEYS) if name != setting]
    rows = [row for row in report["results"] if _equal(row, report["results"][0], others)]
    # A context bucket is a number of tokens as text, or `all`, which comes last.
    return sorted(rows, key=lambda row: np.inf if row[setting] == ALL else float(row[setting])) if len(rows) > 1 else []


def by_context(report: Row) -> list[Row]:
    """The context buckets with enough drafts to tell their acceptance length."""
    return [bucket for bucket in report["context"] if bucket["num_drafts"] >= MIN_BUCKET_DRAFTS]


def _equal(row: Row, other: Row, names: Sequence[str]) -> bool:
    return all(row[name] == other[name] for name in names)


def _numbers(
    records: Sequence[PromptRecord], configuration: Configuration, seed: int, confidence: float, reasons: Mapping[str, str]
) -> dict[str, Any]:
    sums = prompt_sums(records)
    row: dict[str, Any] = {
        "num_prompts": len(records),
        "num_batches": len(np.unique(sums["batch"])) if "batch" in sums else len(records),
        "num_new_tokens": int(sums["num_tokens"].sum()),
        **_total(sums, "num_rounds"),
        **({"num_looping": sum(map(is_looping, records))} if all(record.token_ids for record in records) else {}),
        "num_empty": int((sums["num_tokens"] <= 1).sum()),
        **_acceptance(records, configuration.num_speculative_tokens, seed, confidence),
        **_speed(sums, seed, confidence),
        **{name: number for name in WITHOUT_INTERVAL if (number := value(METRICS[name], sums)) is not None},
        **_against_hf(records, sums, seed, confidence),
        **estimates(("tokens_per_round", "context_ratio", "vocabulary_coverage"), sums, seed, confidence),
    }
    absent = {name: reason for name, reason in reasons.items() if name not in row}
    row["not_measured"] = _reasons(row, records, configuration.temperature) | absent
    return row


def _acceptance(records: Sequence[PromptRecord], k: int, seed: int, confidence: float) -> dict[str, Any]:
    drafts = [record.drafts() for record in records]
    return _compute(
        "acceptance",
        predictions=[[accepted for _, accepted in prompt] for prompt in drafts],
        references=[[drafted for drafted, _ in prompt] for prompt in drafts],
        num_positions=k,
        seed=seed,
        confidence=confidence,
    )


def _total(sums: PromptSums, name: str) -> dict[str, int]:
    total = sums[name].sum()
    return {} if np.isnan(total) else {name: int(total)}


def _speed(sums: PromptSums, seed: int, confidence: float) -> dict[str, Any]:
    if np.isnan(sums["baseline_seconds"]).any():
        return estimates(("tokens_per_second",), sums, seed, confidence)

    def timings(tokens: NDArray[np.float64], seconds: NDArray[np.float64]) -> list[dict[str, float]]:
        return [{"num_tokens": int(count), "seconds": time} for count, time in zip(tokens, seconds, strict=True)]

    tokens, seconds, baseline_tokens, baseline_seconds = measured(METRICS["speedup"], sums)
    return _compute(
        "speedup",
        predictions=timings(tokens, seconds),
        references=timings(baseline_tokens, baseline_seconds),
        seed=seed,
        confidence=confidence,
    )


def _compute(module: str, **inputs: Any) -> dict[str, Any]:
    """What a metric module under `eval/metrics` computes."""
    import evaluate  # imports torch, which reading and judging reports does not need

    numbers: dict[str, Any] = evaluate.load(str(METRIC_MODULES / module), keep_in_memory=True).compute(**inputs)
    return numbers


def _against_hf(records: Sequence[PromptRecord], sums: PromptSums, seed: int, confidence: float) -> dict[str, Any]:
    """Speed compared with transformers' `generate()`, over the prompts on which that was timed; the speedup over it when the
    baseline is clearly slower.
    """
    timed = sum(record.hf_generate is not None for record in records)
    if not timed:
        return {}
    numbers = estimates(("hf_generate_tokens_per_second", "baseline_over_hf_generate"), sums, seed, confidence)
    if numbers["baseline_over_hf_generate"] < SLOW_BASELINE:
        numbers |= estimates(("speedup_over_hf_generate",), sums, seed, confidence)
    return {**numbers, "hf_generate_num_prompts": timed}


def is_looping(record: PromptRecord) -> bool:
    """Whether the completion ends in a loop: its last 48 tokens repeat with a period of at most 16. Loops inflate acceptance."""
    tail = record.token_ids[-48:]
    if len(tail) < 48:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, 17))


def _reasons(row: dict[str, Any], records: Sequence[PromptRecord], temperature: float) -> dict[str, str]:
    few = "fewer than two prompts" if len(records) < 2 else "its resamples are undefined: too few prompts"
    reasons = dict.fromkeys(("tokens_per_second", "baseline_tokens_per_second", "speedup"), "no time was measured")
    reasons |= dict.fromkeys(NEED_DRAFTS, "nothing was drafted")
    reasons |= dict.fromkeys(
        ("tokens_per_round", "verify_ms", "baseline_step_ms", "decode_speedup"), "every completion ended with its first token"
    )
    hf = (
        "transformers' generate() is timed on greedy decoding only"
        if temperature
        else "none of these prompts was among those timed"
    )
    reasons |= dict.fromkeys(("hf_generate_tokens_per_second", "baseline_over_hf_generate"), hf)
    reasons["speedup_over_hf_generate"] = (
        "the baseline is as fast as transformers' generate()" if "baseline_over_hf_generate" in row else hf
    )
    start = long_context_start(records)
    reasons["context_ratio"] = "too few drafts at a long or a short context" if start is None else "nothing was drafted"
    reasons["vocabulary_coverage"] = "this method can propose any token"
    missing = {name: reason for name, reason in reasons.items() if name not in row}
    with_interval = (
        "mean_acceptance_length",
        "tokens_per_round",
        "acceptance_rate",
        "tokens_per_second",
        "baseline_tokens_per_second",
        "speedup",
    )
    one_batch = row["num_batches"] == 1 < len(records)
    intervals = {
        f"{name}_ci95": "its prompts share the times of one batch" if one_batch and METRICS[name].is_timed else few
        for name in with_interval
        if name in row and f"{name}_ci95" not in row
    }
    return missing | intervals
