"""The best draft length for each load, the requests at once, that a report's sweep measured."""

from collections.abc import Sequence
from typing import NamedTuple

from specdistill.report.phrases import Report, times
from specdistill.report.tables import Table, of_chains

OTHER_LENGTHS = {"lookup_first", "draft_length"}  # what of `settings.drafting` says that rounds differ in length


class DraftLength(NamedTuple):
    """k: draft tokens per round with which `batch_size` sequences at once decode fastest; 0: plain decoding is faster.

    speedup: of the draft that comes closest or is fastest.
    """

    batch_size: int
    k: int
    speedup: float


def draft_lengths(report: Report | None) -> tuple[DraftLength, ...]:
    """Of each load, by its size. Empty without a sweep of K or of the load, and where a round does not draft a chain of K tokens."""
    if report is None or report["settings"].get("tree") or OTHER_LENGTHS & report["settings"].get("drafting", {}).keys():
        return ()
    rows = [row for row in of_chains(report) if "speedup" in row]
    fastest = {row["batch_size"]: row for row in sorted(rows, key=lambda row: float(row["speedup"]))} if len(rows) > 1 else {}
    return tuple(
        DraftLength(size, row["num_speculative_tokens"] if row["speedup"] > 1 else 0, row["speedup"])
        for size, row in sorted(fastest.items())
    )


def usual_length(report: Report) -> int:
    """K, as engines draft it; of lengths that were chosen online the mean of the rounds that drafted."""
    row, k = report["results"][0], int(report["settings"]["num_speculative_tokens"])
    is_mean = "num_rounds_per_length" in row and row["num_drafts"] and not report["settings"]["drafting"].get("lookup_first")
    return round(row["num_draft_tokens"] / row["num_drafts"]) if is_mean else k


def by_length(lengths: Sequence[DraftLength]) -> Table:
    """A row for each load."""
    return Table(
        ("requests at once", "draft tokens", "speedup"),
        [((str(size),), (str(k),), (times(speedup),)) for size, k, speedup in lengths],
    )
