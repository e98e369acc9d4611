"""The tables of a report, for Markdown and HTML alike, and the best draft lengths of its sweep.

A cell is a value and, below it, what qualifies the value (an interval, a note). Times are divided
by what they are spent on: the prefill and, in each round, the draft, the step of the target and the
rest. They are shown with and without the draft.

The best draft length is found for each load that a sweep measured. It is a measured K, or one that
only the cost model knows. The model's speedup (`theory.compute_speedup_curve`) is goodput(K)
divided by that of plain decoding. goodput(K) is the number of tokens that a round emits in its
first K + 1 positions, over T_verify(K + 1) + T_draft(K). The model leaves out the prefill and the
loop. So at each load, the predicted speedups are multiplied by measured / predicted speedup at the
K that was measured.
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
    """Return the rows of a report that differ only in one setting, in the order of its values.

    The first row of the report, which has the main configuration, is one of them. The list is empty
    if only one value of the setting was measured.

    Args:
        report: the content of report.json.
        setting: the name of the setting, e.g. "temperature".
    """
    rows = _select_rows_like_first(report, setting)
    # All settings are numbers, except `context_bucket`, which may be "all". It comes last.
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
    """Return the first row of a report, and the rows that differ from it only in some keys.

    Args:
        report: the content of report.json. Its first row has the main configuration.
        varied: the keys of a row that may differ, e.g. "category" or "temperature".
    """
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
    """Return a table of acceptance and speed, with one line for each row of the report.

    Args:
        first_column: the title of the first column.
        name: row of the report -> the text of the first column.
        rows: the rows of the report.
    """
    # A cell is a tuple: its value, and then notes such as a confidence interval.
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
    """Return a table that compares a report with an earlier one: each number before and now.

    The last column says whether the change is better, worse or open (its interval includes 0).

    Args:
        report: the content of report.json. Its section `baseline` has the changes.
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
    """Return a table of the acceptance length before and after training.

    It was measured in up to two ways: simulated on held-out rows of the training data, and by
    decoding the prompts of the recipe's section `selection`, which every evaluation during training
    decodes. "Before" is the untrained draft, "after" the draft that training saved. The table has
    no rows if nothing was measured before training.
    """
    gains = report["draft"].get("training", {})
    head = (
        "acceptance length",
        "before training",
        f"after {phrases.format_count(gains.get('steps', 0), 'step')}",
    )
    titles = {
        "simulated": "simulated, on held-out rows",
        "decoded": "decoded, on the recipe's selection prompts",
    }
    rows = [
        ((title,), (format_number(gains[key]["before"]),), (format_number(gains[key]["after"]),))
        for key, title in titles.items()
        if key in gains
    ]
    return Table(head, rows)


def tabulate_quality(report: Report) -> Table:
    """Return a table of task quality: the share of correct completions with and without the draft.

    Args:
        report: the content of report.json. Its section `quality` has the shares for each metric
            that judges whether a completion is correct, e.g. `exact_match`.
    """
    rows: list[tuple[Cell, ...]] = []
    for metric, scores in report.get("quality", {}).items():
        # Show the difference in percentage points. If its interval includes 0, the completions do
        # not show that the draft changes the quality.
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
                (metric.replace("_", " "),),
                (str(scores["num_prompts"]),),
                (f"{scores['without_draft']:.1%}",),
                (f"{scores['with_draft']:.1%}",),
                (difference, interval),
                (reading, counts),
            )
        )
    head = (
        "metric",
        "completions",
        "correct without draft",
        "correct with draft",
        "difference, points",
        "reading",
    )
    return Table(head, rows)


def tabulate_latency(records: Sequence[PromptRecord]) -> Table:
    """Return a table of where the time goes: milliseconds of plain decoding, and with the draft.

    The rows are the prefill of a prompt, the parts of a round, and a whole token.

    Args:
        records: the records of the prompts. Those from a server are left out, because a server does
            not show what its time is spent on.
    """
    head = ("milliseconds", "plain", "with draft")
    # Only records of this package's decoder (without `counts`) have the times of steps.
    sums = collect_prompt_sums(
        [record for record in records if record.counts is None and record.baseline]
    )
    if not sums:
        return Table(head, [])

    # Add up the times and counts of all prompts. Those of plain decoding have names that begin with
    # "baseline_".
    draft_totals = {name: float(column.sum()) for name, column in sums.items()}
    plain_totals = {
        name.removeprefix("baseline_"): value
        for name, value in draft_totals.items()
        if name.startswith("baseline_")
    }
    # Plain decoding drafts nothing. The little time that is measured there is overhead of the
    # decoding loop, so it is counted in the rest.
    plain_totals["draft_seconds"] = 0.0

    rows: dict[str, list[float]] = {}
    for total in (plain_totals, draft_totals):
        draft_seconds = total["draft_seconds"]
        prefill_seconds = total["prefill_seconds"]
        verify_seconds = total["verify_seconds"]
        other_seconds = total["seconds"] - prefill_seconds - draft_seconds - verify_seconds

        # Divide each time by the number of prompts, rounds or tokens that it was spent on. If there
        # were none, `math.inf` makes the result 0.
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
    return Table(head, lines)


class DraftLength(NamedTuple):
    """The draft length with which a load decodes fastest.

    Attributes:
        batch_size: the load: the number of sequences decoded at once.
        k: draft tokens per round; 0 if plain decoding is faster.
        speedup: the speedup with the best draft length; at most 1 if plain decoding is faster.
        is_measured: whether the speedup was measured; otherwise the cost model predicts it.
    """

    batch_size: int
    k: int
    speedup: float
    is_measured: bool


def draft_lengths(report: Report | None) -> tuple[DraftLength, ...]:
    """Return the K to start an engine with, for each load that was measured.

    A load is a number of sequences decoded at once. K is the number of draft tokens per round with
    the highest speedup.

    Args:
        report: the draft's report; None if there is none.

    Returns:
        The best K for each load. Empty without a report, and if the draft was measured with a tree
        or with a lookup in front of it, because an engine cannot be told a K for these.
    """
    if (
        report is None
        or report["settings"].get("tree")
        or "lookup_first" in report["settings"].get("drafting", {})
    ):
        return ()
    return find_fastest_lengths(report)


def find_fastest_lengths(report: Report) -> tuple[DraftLength, ...]:
    """Return the best draft length (K, draft tokens per round) for each load.

    A load is a number of sequences decoded at once. The result begins with the smallest load. It is
    empty if the report has only one value of K and one load, because there is nothing to choose
    from.
    """
    # Find the loads that were measured.
    rows = [row for row in select_chain_rows(report) if "speedup" in row]
    loads = sorted({row["batch_size"] for row in rows}) if len(rows) > 1 else []

    # Choose the best draft length for each load.
    lengths = []
    for size in loads:
        rows_of_load = [row for row in rows if row["batch_size"] == size]
        lengths.append(_select_best_length(rows_of_load, report))
    return tuple(lengths)


def _select_best_length(rows: Sequence[ResultRow], report: Report) -> DraftLength:
    """Return the draft length (K) with the highest speedup for one load.

    The speedup at some K was measured, at other K it is predicted by the cost model. The model may
    be wrong. So a K with a predicted speedup is chosen only if it stays the best one after this
    speedup is reduced by a margin of at least 2 %.

    Args:
        rows: the rows of the report that were measured at this load.
        report: the report, whose section `theory` has the predictions.
    """
    # Collect the predicted and the measured speedups, by K.
    predicted: dict[int, float] = {}
    for row in rows:
        predicted |= dict(_model_shorter_lengths(row, report))
    measured = {row["num_speculative_tokens"]: row["speedup"] for row in rows}

    # Find the margin. A prediction is only as precise as the times that it is made from. The times
    # of verification should rise with K. `cost_deviation` is the largest relative distance of one
    # of them from a rising curve: it shows how noisy they are. The margin is at least as large.
    timing_noise = report.get("theory", {}).get("cost_deviation", 0.0)
    margin = max(BETTER_K_GAIN, timing_noise)

    # Choose the highest speedup, after reducing the predicted ones by the margin. A measured
    # speedup replaces a predicted one.
    reduced = {k: speedup * (1 - margin) for k, speedup in predicted.items()}
    compared = reduced | measured
    best_k = max(compared, key=lambda k: compared[k])

    # The result has the speedup without the margin. K = 0 means that plain decoding is fastest.
    speedup = (predicted | measured)[best_k]
    return DraftLength(
        batch_size=rows[0]["batch_size"],
        k=best_k if speedup > 1 else 0,
        speedup=speedup,
        is_measured=best_k in measured,
    )


def _model_shorter_lengths(row: ResultRow, report: Report) -> Iterator[tuple[int, float]]:
    """Yield (K', predicted speedup) for drafts of K' tokens, fewer than the K of a measured row.

    The report's section `theory` says which K' can be predicted. It was made for one K, so a row
    with another K yields nothing.

    A row was measured at one load: a number of sequences decoded at once. How long rounds with K'
    draft tokens take at this load is estimated. The time to verify is interpolated between a step
    of plain decoding (K' = 0) and a round with K. The time to draft is in proportion to the draft's
    forward passes.

    Args:
        row: the measured row of the report.
        report: the report.
    """
    # The model needs the costs of the row, and the row must have the K of the section.
    theory = report.get("theory", {})
    if row["num_speculative_tokens"] != theory.get("K") or any(name not in row for name in COSTS):
        return

    # The draft's forward passes in a round, for each K' above 0. A lookup runs no model and has 0
    # passes. It gets 1 here, so that its time is the same for every K'.
    passes = {point["k"]: max(point["draft_passes"], 1) for point in theory["curve"] if point["k"]}

    # The row has the drafting time of a draft token. Convert it to that of a round.
    draft_ms_per_token = row["draft_ms"]
    draft_ms_per_round = draft_ms_per_token * row["num_draft_tokens"] / row["num_rounds"]

    # Estimate the costs of a round at the load of the row, for each K' up to K.
    k = theory["K"]
    step_ms = row["baseline_step_ms"]
    verify_ms = row["verify_ms"]
    costs = []
    for length, num_passes in passes.items():
        costs.append(
            RoundCost(
                k=length,
                verify_ms=step_ms + (verify_ms - step_ms) * length / k,
                draft_ms=draft_ms_per_round * num_passes / passes[k],
            )
        )
    cost = RoundCost(k, verify_ms, draft_ms_per_round)
    curve = compute_speedup_curve(
        row["emitted_per_position"], row["num_drafts"], step_ms, cost, costs
    )

    # For the first row, the report has a better curve: its costs at each K' were timed.
    if row is report["results"][0]:
        curve = theory["curve"]

    # The row's measured speedup may differ from the one that is predicted at K. Multiply the whole
    # curve by the ratio of the two.
    for point in curve:
        if 0 < point["k"] < k:
            yield (
                int(point["k"]),
                point["predicted_speedup"] * row["speedup"] / row["predicted_speedup"],
            )


def tabulate_by_load(lengths: Sequence[DraftLength]) -> Table:
    """Return a table with the best number of draft tokens for each load (sequences at once)."""
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
