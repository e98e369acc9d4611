"""The best draft length for each load that a report's sweep measured: its K, and those that only the cost model knows.

The model's speedup (`theory.speedup_curve`) is goodput(K) = (1 + Σ_{j≤K} Π_{i≤j} α_i) / (T_verify(K + 1) + T_draft(K)) over that of plain
decoding. It leaves out the prefill and the loop, so at each load it is scaled by what the measured K gained of its prediction.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from specdistill.report.phrases import Report, ResultRow, times
from specdistill.report.tables import Table, of_chains
from specdistill.statistics.theory import BETTER_K_GAIN, RoundCost, speedup_curve

OTHER_LENGTHS = {
    "lookup_first",
    "draft_length",
}  # what of `settings.drafting` says that rounds differ in length
COSTS = (
    "acceptance_rate_per_position",
    "verify_ms",
    "draft_ms",
    "baseline_step_ms",
    "predicted_speedup",
)


class DraftLength(NamedTuple):
    """k: draft tokens per round with which `batch_size` sequences at once decode fastest; 0: plain decoding is faster.

    speedup: of the draft that comes closest or is fastest. is_measured: by its own configuration, not by the cost model.
    """

    batch_size: int
    k: int
    speedup: float
    is_measured: bool


def draft_lengths(report: Report | None) -> tuple[DraftLength, ...]:
    """`fastest_lengths`, for an engine; empty also where a round does not draft a chain of K tokens."""
    if (
        report is None
        or report["settings"].get("tree")
        or OTHER_LENGTHS & report["settings"].get("drafting", {}).keys()
    ):
        return ()
    return fastest_lengths(report)


def fastest_lengths(report: Report) -> tuple[DraftLength, ...]:
    """Of each load, by its size. Empty without a sweep of K or of the load."""
    rows = [row for row in of_chains(report) if "speedup" in row]
    loads = sorted({row["batch_size"] for row in rows}) if len(rows) > 1 else []
    return tuple(
        _best([row for row in rows if row["batch_size"] == size], report) for size in loads
    )


def usual_length(report: Report) -> int:
    """K, as engines draft it; of lengths that were chosen online the mean of the rounds that drafted."""
    row, k = report["results"][0], int(report["settings"]["num_speculative_tokens"])
    is_mean = (
        "num_rounds_per_length" in row
        and row["num_drafts"]
        and not report["settings"]["drafting"].get("lookup_first")
    )
    return round(row["num_draft_tokens"] / row["num_drafts"]) if is_mean else k


def _best(rows: Sequence[ResultRow], report: Report) -> DraftLength:
    modelled = {k: (speedup, False) for row in rows for k, speedup in _modelled(row, report)}
    speedups = {
        **modelled,
        **{row["num_speculative_tokens"]: (row["speedup"], True) for row in rows},
    }
    k = max(speedups, key=lambda k: speedups[k][0] * (1 if speedups[k][1] else 1 - BETTER_K_GAIN))
    speedup, is_measured = speedups[k]
    return DraftLength(rows[0]["batch_size"], k if speedup > 1 else 0, speedup, is_measured)


def _modelled(row: ResultRow, report: Report) -> Iterator[tuple[int, float]]:
    """(K', speedup) of the shorter drafts that the report timed, from the row of its own K.

    A pass over K' + 1 tokens costs, between those over 1 and over K + 1 that were timed at this load, in proportion to K'; drafting, by
    passes of the draft.
    """
    theory: Mapping[str, Any] = report.get("theory", {})
    if row["num_speculative_tokens"] != theory.get("K") or any(name not in row for name in COSTS):
        return
    k, step, verify = theory["K"], row["baseline_step_ms"], row["verify_ms"]
    passes = {point["k"]: max(point["draft_passes"], 1) for point in theory["curve"] if point["k"]}
    draft = row["draft_ms"] * row["num_draft_tokens"] / row["num_drafts"]
    timed = [
        RoundCost(n, step + (verify - step) * n / k, draft * passes[n] / passes[k]) for n in passes
    ]
    curve = speedup_curve(
        row["acceptance_rate_per_position"], step, RoundCost(k, verify, draft), timed
    )
    for point in theory["curve"] if row is report["results"][0] else curve:
        if 0 < point["k"] < k:
            yield (
                int(point["k"]),
                point["predicted_speedup"] * row["speedup"] / row["predicted_speedup"],
            )


def by_load(lengths: Sequence[DraftLength]) -> Table:
    rows = [
        (
            (str(size),),
            (str(k),) if k else ("0", "plain decoding is faster"),
            (times(speedup),),
            ("measured" if is_measured else "cost model",),
        )
        for size, k, speedup, is_measured in lengths
    ]
    return Table(("requests at once", "draft tokens", "speedup", "known from"), rows)
