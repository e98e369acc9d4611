"""The tables of a report, for Markdown and HTML alike, and the best draft lengths of its sweep.

A cell is a value and, below it, what qualifies the value (an interval, a note). Times are divided
by what they are spent on: the prefill and, in each round, the draft, the step of the target and the
rest. They are shown with and without the draft.

The best draft length is found for each load that a sweep measured. It is a measured K, or one that
only the cost model knows. The model's speedup (`theory.speedup_curve`) is goodput(K) divided by
that of plain decoding. goodput(K) is the number of tokens that a round emits in its first K + 1
positions, over T_verify(K + 1) + T_draft(K). The model leaves out the prefill and the loop. So at
each load its speedup is scaled by the measured K's ratio of measured to predicted speedup.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from specdistill.common.progress import format_speed
from specdistill.evaluation.report import phrases
from specdistill.evaluation.report.phrases import (
    Report,
    ResultRow,
    format_interval,
    format_number,
    format_percent,
    format_signed,
    format_times,
)
from specdistill.evaluation.statistics.metrics import collect_prompt_sums
from specdistill.evaluation.statistics.records import ALL_PROMPTS, CONFIGURATION_KEYS, PromptRecord
from specdistill.evaluation.statistics.theory import BETTER_K_GAIN, RoundCost, compute_speedup_curve

# The numbers of a row that the cost model needs.
COSTS = ("emitted_per_position", "verify_ms", "draft_ms", "baseline_step_ms", "predicted_speedup")
Cell = tuple[str, ...]


class Table(NamedTuple):
    """A table: the names of its columns, and its rows of cells."""

    head: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]


def select_main_rows(report: Report) -> list[ResultRow]:
    """Return the rows of the main configuration: the whole suite and its categories."""
    return _select_rows_like_first(report, "category")


def select_whole_rows(report: Report) -> list[ResultRow]:
    """Return the whole suite's row of every configuration."""
    return [row for row in report["results"] if row["category"] == ALL_PROMPTS]


def sweep(report: Report, setting: str) -> list[ResultRow]:
    """Return the rows of a sweep over one setting, in the order of its values.

    They are the first row of the report and the rows that differ from it in this setting alone. The
    list is empty if the setting was not swept.
    """
    rows = _select_rows_like_first(report, setting)
    # A context bucket is a number of tokens as text, or `all`, which comes last.
    return (
        sorted(
            rows, key=lambda row: math.inf if row[setting] == ALL_PROMPTS else float(row[setting])
        )
        if len(rows) > 1
        else []
    )


def select_chain_rows(report: Report) -> list[ResultRow]:
    """Return the first row of a report and those that differ from it in K or batch size alone."""
    return _select_rows_like_first(report, "num_speculative_tokens", "batch_size")


def _select_rows_like_first(report: Report, *varied: str) -> list[ResultRow]:
    """Return the first row of a report and the rows that differ from it in `varied` alone."""
    first = report["results"][0]
    fixed_keys = {"suite", "category", *CONFIGURATION_KEYS} - {*varied}
    rows = []
    for row in report["results"]:
        if all(row[key] == first[key] for key in fixed_keys):
            rows.append(row)
    return rows


def tabulate_by_category(report: Report) -> Table:
    """Return the numbers of the main configuration, for the whole suite and each category."""
    return _tabulate_numbers("category", phrases.name_row, select_main_rows(report))


def tabulate_whole_suite(report: Report) -> Table:
    """Return the numbers of the main configuration, for the whole suite alone."""
    return _tabulate_numbers("suite", phrases.name_row, select_main_rows(report)[:1])


def tabulate_by_configuration(report: Report) -> Table:
    """Return the numbers of the whole suite, for each configuration."""
    return _tabulate_numbers("configuration", phrases.name_configuration, select_whole_rows(report))


def _tabulate_numbers(
    first_column: str, name: Callable[[ResultRow], str], rows: Sequence[ResultRow]
) -> Table:
    """Return the table of acceptance and speed with a line for each result row.

    Args:
        first_column: the title of the first column.
        name: returns the text of the first column.
        rows: the result rows.
    """
    head = (
        first_column,
        "prompts",
        "acceptance length",
        "rate",
        "tokens/s",
        "plain",
        "speedup",
        "predicted",
    )
    lines = [
        (
            (name(row),),
            (str(row["num_prompts"]),),
            join_cell(
                format_number(row.get("mean_acceptance_length")),
                format_interval(row, "mean_acceptance_length"),
            ),
            (format_percent(row.get("acceptance_rate")),),
            (format_speed(row.get("tokens_per_second")),),
            (format_speed(row.get("baseline_tokens_per_second")),),
            join_cell(format_times(row.get("speedup")), format_interval(row, "speedup")),
            (format_times(row.get("predicted_speedup")),),
        )
        for row in rows
    ]
    return Table(head, lines)


def join_cell(value: str, *notes: str) -> Cell:
    """Return a cell: its value, and below it the notes that are not empty."""
    return (value, *filter(None, notes))


# The metrics whose change against an earlier report is shown.
CHANGED_METRICS = (
    "mean_acceptance_length",
    "acceptance_rate",
    "speedup",
    "tokens_per_second",
    "draft_ms",
    "verify_ms",
)


def tabulate_changes(report: Report) -> Table:
    """Return the table of changes since the baseline report: each number before and now.

    The last column says whether the change is better, worse or open.
    """
    rows: list[tuple[Cell, ...]] = []
    for change in report["baseline"]["changes"]:
        # Describe the change: its category, its size, and its interval or why there is none.
        metric = change["metric"]
        direction = phrases.find_direction(change)
        category = (
            "" if change["category"] == ALL_PROMPTS else f", {change['category'].replace('_', ' ')}"
        )
        note = (
            " to ".join(map(format_signed, change["ci95"]))
            if "ci95" in change
            else change.get("reason", "")
        )
        relative_change = format_signed(change["change"]) if "change" in change else "–"

        # Write both values with the unit of the metric.
        old, new = (
            "".join(phrases.format_in_unit(metric, change[side])) if side in change else "–"
            for side in ("old", "new")
        )
        rows.append(
            (
                (f"{phrases.METRICS[metric][0]}{category}",),
                (old,),
                (new,),
                join_cell(relative_change, note),
                (direction,),
            )
        )
    return Table(("number", "before", "now", "change", "reading"), rows)


def tabulate_training(report: Report) -> Table:
    """Return the table of acceptance lengths before and after training.

    The length before is measured before the first step of training, the length after on the draft
    that training saved. The table is empty if nothing was measured before training.
    """
    gains = report["draft"].get("training", {})
    head = (
        "acceptance length",
        "before training",
        f"after {phrases.format_count(gains.get('steps', 0), 'step')}",
    )
    titles = {
        "simulated": "simulated, on held-out rows",
        "decoded": "decoded, on the prompts of selection",
    }
    rows = [
        ((title,), (format_number(gains[key]["before"]),), (format_number(gains[key]["after"]),))
        for key, title in titles.items()
        if key in gains
    ]
    return Table(head, rows)


def tabulate_quality(report: Report) -> Table:
    """Return the table of task quality: the share of correct completions with and without draft."""
    rows: list[tuple[Cell, ...]] = []
    for name, scores in report.get("quality", {}).items():
        # The difference in percentage points. If its interval includes 0, the draft changes nothing
        # that the completions can show.
        difference = format_signed(scores["difference"]).removesuffix("%")
        interval = "too few completions"
        reading = "open"
        if "difference_ci95" in scores:
            low, high = scores["difference_ci95"]
            bounds = [format_signed(bound).removesuffix("%") for bound in (low, high)]
            interval = " to ".join(bounds)
            reading = "equal within the interval" if low <= 0 <= high else "different"
        counts = (
            f"{scores['only_with_draft']} only with it,"
            f" {scores['only_without_draft']} only without it"
        )
        rows.append(
            (
                (name.replace("_", " "),),
                (str(scores["num_prompts"]),),
                (f"{scores['without_draft']:.1%}",),
                (f"{scores['with_draft']:.1%}",),
                (difference, interval),
                (reading, counts),
            )
        )
    head = (
        "succeed by",
        "completions",
        "without draft",
        "with draft",
        "difference, points",
        "reading",
    )
    return Table(head, rows)


def tabulate_latency(records: Sequence[PromptRecord]) -> Table:
    """Return the table of milliseconds of plain decoding and of decoding with the draft.

    The rows are the prefill of a prompt, the parts of a round, and a token. Records of a server are
    left out, because a server does not show what its time is spent on.
    """
    # Only records of this package's decoder have the times of steps.
    sums = collect_prompt_sums(
        [record for record in records if record.counts is None and record.baseline]
    )
    rows: dict[str, list[float]] = {}
    for side in ("baseline_", "") if sums else ():
        # Add up the times of all prompts on this side: plain decoding, or with the draft.
        total = {
            name.removeprefix(side): float(column.sum())
            for name, column in sums.items()
            if name.startswith(side)
        }
        # Plain decoding drafts nothing. The little time that its clock shows belongs to the loop.
        draft_seconds = 0.0 if side else total["draft_seconds"]
        prefill_seconds = total["prefill_seconds"]
        verify_seconds = total["verify_seconds"]
        other_seconds = total["seconds"] - prefill_seconds - draft_seconds - verify_seconds

        # Divide each time by the number of prompts, rounds or tokens that it was spent on.
        num_rounds = total["num_rounds"]
        for name, seconds, count in (
            ("prefill of a prompt", prefill_seconds, sums["num_prompts"].sum()),
            ("drafting, per round", draft_seconds, num_rounds),
            ("target's step, per round", verify_seconds, num_rounds),
            ("rest, per round", max(other_seconds, 0.0), num_rounds),
            ("per token, in all", total["seconds"], total["num_tokens"]),
        ):
            rows.setdefault(name, []).append(1000 * seconds / (count or math.inf))

    # Leave out rows without any time.
    lines = []
    for name, times in rows.items():
        if any(times):
            lines.append(((name,), *((format_number(time or None),) for time in times)))
    return Table(("milliseconds", "plain", "with draft"), lines)


class DraftLength(NamedTuple):
    """The draft length with which a load decodes fastest.

    Attributes:
        batch_size: the load: the number of sequences decoded at once.
        k: draft tokens per round; 0 if plain decoding is faster.
        speedup: the speedup with the best draft length; at most 1 if plain decoding is faster.
        is_measured: whether its own configuration was measured; otherwise the cost model gives it.
    """

    batch_size: int
    k: int
    speedup: float
    is_measured: bool


def draft_lengths(report: Report | None) -> tuple[DraftLength, ...]:
    """Return the best draft length of each load, if an engine can be started with it.

    An engine can be told K only for chains. So the result is also empty for a tree, and for a
    lookup in front of the draft.

    Args:
        report: the draft's report; None gives no draft lengths.
    """
    if (
        report is None
        or report["settings"].get("tree")
        or "lookup_first" in report["settings"].get("drafting", {})
    ):
        return ()
    return find_fastest_lengths(report)


def find_fastest_lengths(report: Report) -> tuple[DraftLength, ...]:
    """Return the best draft length of each load, from the smallest load to the largest.

    A load is a number of sequences decoded at once. The result is empty without a sweep of K or of
    the load.
    """
    # Find the loads that were measured. A single row is no sweep.
    rows = [row for row in select_chain_rows(report) if "speedup" in row]
    loads = sorted({row["batch_size"] for row in rows}) if len(rows) > 1 else []

    # Choose the best draft length for each load.
    lengths = []
    for size in loads:
        rows_of_load = [row for row in rows if row["batch_size"] == size]
        lengths.append(_select_best_length(rows_of_load, report))
    return tuple(lengths)


def _select_best_length(rows: Sequence[ResultRow], report: Report) -> DraftLength:
    """Return the draft length with the highest speedup, measured or modelled, for one load.

    A modelled speedup counts for less, by the margin within which the model may be wrong.

    Args:
        rows: the result rows of this load.
        report: the report that has these rows, for its section `theory`.
    """
    # Collect the speedup at each K, and whether it was measured. A measured one replaces a
    # modelled one.
    speedups: dict[int, tuple[float, bool]] = {}
    for row in rows:
        for k, predicted_speedup in _model_shorter_lengths(row, report):
            speedups[k] = (predicted_speedup, False)
    speedups |= {row["num_speculative_tokens"]: (row["speedup"], True) for row in rows}

    # Choose the highest speedup, with the modelled ones reduced by the margin.
    margin = max(BETTER_K_GAIN, report.get("theory", {}).get("cost_deviation", 0.0))
    weights = {k: 1 if is_measured else 1 - margin for k, (_, is_measured) in speedups.items()}
    best_k = max(speedups, key=lambda k: speedups[k][0] * weights[k])
    speedup, is_measured = speedups[best_k]
    return DraftLength(rows[0]["batch_size"], best_k if speedup > 1 else 0, speedup, is_measured)


def _model_shorter_lengths(row: ResultRow, report: Report) -> Iterator[tuple[int, float]]:
    """Yield (K', modelled speedup) for drafts that are shorter than those of a measured row.

    Only the K' that the report timed are modelled, and only from a row with the report's own K.

    The cost of a pass over K' + 1 tokens is interpolated in proportion to K', between the passes
    over 1 and over K + 1 tokens that were timed at this load. The cost of drafting is in proportion
    to the passes of the draft.
    """
    theory = report.get("theory", {})
    if row["num_speculative_tokens"] != theory.get("K") or any(name not in row for name in COSTS):
        return

    # Estimate the costs of rounds with fewer draft tokens, at this load.
    k = theory["K"]
    step_ms = row["baseline_step_ms"]
    verify_ms = row["verify_ms"]
    passes = {point["k"]: max(point["draft_passes"], 1) for point in theory["curve"] if point["k"]}
    draft_ms = row["draft_ms"] * row["num_draft_tokens"] / row["num_rounds"]
    costs = [
        RoundCost(n, step_ms + (verify_ms - step_ms) * n / k, draft_ms * passes[n] / passes[k])
        for n in passes
    ]
    cost = RoundCost(k, verify_ms, draft_ms)
    curve = compute_speedup_curve(
        row["emitted_per_position"], row["num_drafts"], step_ms, cost, costs
    )

    # The curve of the report's first row is in the report already.
    if row is report["results"][0]:
        curve = theory["curve"]

    # Scale the curve by the share of its predicted speedup that the row reached.
    for point in curve:
        if 0 < point["k"] < k:
            yield (
                int(point["k"]),
                point["predicted_speedup"] * row["speedup"] / row["predicted_speedup"],
            )


def tabulate_by_load(lengths: Sequence[DraftLength]) -> Table:
    """Return the table of the best draft length for each load."""
    rows = [
        (
            (str(size),),
            (str(k),) if k else ("0", "plain decoding is faster"),
            (format_times(speedup),),
            ("measured" if is_measured else "cost model",),
        )
        for size, k, speedup, is_measured in lengths
    ]
    return Table(("requests at once", "draft tokens", "speedup", "known from"), rows)
