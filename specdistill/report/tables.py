"""The tables of a report, for markdown and HTML alike: a cell is its value and, below it, what qualifies that (an interval, a note).

Times are told apart by what they go into: prefill, and in each round the draft, the target's step and the rest, with and without the draft.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specdistill.report import phrases
from specdistill.report.phrases import Report, ResultRow, interval, number, percent, signed, times
from specdistill.statistics.metrics import prompt_sums
from specdistill.statistics.records import ALL, CONFIGURATION_KEYS, PromptRecord

Cell = tuple[str, ...]


class Table(NamedTuple):
    head: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]


def main_rows(report: Report) -> list[ResultRow]:
    """The rows of the main configuration: the whole suite and its categories."""
    return _like_the_first(report, "category")


def whole_rows(report: Report) -> list[ResultRow]:
    """The whole suite's row of every configuration."""
    return [row for row in report["results"] if row["category"] == ALL]


def sweep(report: Report, setting: str) -> list[ResultRow]:
    """The first row and those that differ from it in `setting` alone, by its value; empty where it was not swept."""
    rows = _like_the_first(report, setting)
    # A context bucket is a number of tokens as text, or `all`, which comes last.
    return (
        sorted(rows, key=lambda row: math.inf if row[setting] == ALL else float(row[setting]))
        if len(rows) > 1
        else []
    )


def of_chains(report: Report) -> list[ResultRow]:
    """The first row and those that differ from it in K or the number of prompts decoded together alone."""
    return _like_the_first(report, "num_speculative_tokens", "batch_size")


def _like_the_first(report: Report, *varied: str) -> list[ResultRow]:
    """The first row and those that differ from it in `varied` alone."""
    first, *others = report["results"]
    same = {"suite", "category", *CONFIGURATION_KEYS} - {*varied}
    return [first, *(row for row in others if all(row[name] == first[name] for name in same))]


def by_category(report: Report) -> Table:
    return _numbers("category", phrases.row_name, main_rows(report))


def whole_suite(report: Report) -> Table:
    """`by_category` without the categories."""
    return _numbers("suite", phrases.row_name, main_rows(report)[:1])


def by_configuration(report: Report) -> Table:
    return _numbers("configuration", phrases.configuration_name, whole_rows(report))


def _numbers(what: str, name: Callable[[ResultRow], str], rows: Sequence[ResultRow]) -> Table:
    head = (
        what,
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
            cell(
                number(row.get("mean_acceptance_length")), interval(row, "mean_acceptance_length")
            ),
            (percent(row.get("acceptance_rate")),),
            (number(row.get("tokens_per_second"), 0),),
            (number(row.get("baseline_tokens_per_second"), 0),),
            cell(times(row.get("speedup")), interval(row, "speedup")),
            (times(row.get("predicted_speedup")),),
        )
        for row in rows
    ]
    return Table(head, lines)


def cell(value: str, *notes: str) -> Cell:
    """A cell without its empty notes."""
    return (value, *filter(None, notes))


CHANGED = (
    "mean_acceptance_length",
    "acceptance_rate",
    "speedup",
    "tokens_per_second",
    "draft_ms",
    "verify_ms",
)


def changes(report: Report) -> Table:
    """Each number before and now, its change, and whether that is better, worse or open."""
    rows: list[tuple[Cell, ...]] = []
    for change in report["baseline"]["changes"]:
        metric, reading = change["metric"], phrases.direction(change)
        category = "" if change["category"] == ALL else f", {change['category'].replace('_', ' ')}"
        note = (
            " to ".join(map(signed, change["ci95"]))
            if "ci95" in change
            else change.get("reason", "")
        )
        relative = signed(change["change"]) if "change" in change else "–"
        old, new = (
            "".join(phrases.in_unit(metric, change[side])) if side in change else "–"
            for side in ("old", "new")
        )
        rows.append(
            (
                (f"{phrases.METRICS[metric][0]}{category}",),
                (old,),
                (new,),
                cell(relative, note),
                (reading,),
            )
        )
    return Table(("number", "before", "now", "change", "reading"), rows)


def training(report: Report) -> Table:
    """Acceptance length before the training's first step and of the draft that it left; empty where it was not measured before."""
    gained = report["draft"].get("training", {})
    head = (
        "acceptance length",
        "before training",
        f"after {phrases.counted(gained.get('steps', 0), 'step')}",
    )
    names = {
        "simulated": "simulated, on held-out rows",
        "decoded": "decoded, on the prompts of selection",
    }
    pairs = ((names[name], gained[name]) for name in names if name in gained)
    return Table(
        head,
        [((name,), (number(pair["before"]),), (number(pair["after"]),)) for name, pair in pairs],
    )


def quality(report: Report) -> Table:
    """The share of completions that succeed with the draft and without, a row for each metric."""
    rows: list[tuple[Cell, ...]] = []
    for name, scores in report.get("quality", {}).items():
        ends = scores.get("difference_ci95", ())
        points, *bounds = (signed(share)[:-1] for share in (scores["difference"], *ends))
        reading = (
            "open"
            if not ends
            else "equal within the interval"
            if ends[0] <= 0 <= ends[1]
            else "different"
        )
        row = (
            (name.replace("_", " "),),
            (str(scores["num_prompts"]),),
            (f"{scores['without_draft']:.1%}",),
            (f"{scores['with_draft']:.1%}",),
            (points, " to ".join(bounds) or "too few completions"),
            (
                reading,
                f"{scores['only_with_draft']} only with it, {scores['only_without_draft']} only without it",
            ),
        )
        rows.append(row)
    return Table(
        (
            "succeed by",
            "completions",
            "without draft",
            "with draft",
            "difference, points",
            "reading",
        ),
        rows,
    )


def latency(records: Sequence[PromptRecord]) -> Table:
    """Milliseconds, plain and with the draft: a prompt's prefill, the parts of a round, a token. Without records of a server, which does
    not show what their time goes into.
    """
    sums = prompt_sums([record for record in records if record.counts is None and record.baseline])
    rows: dict[str, list[float]] = {}
    for side in ("baseline_", "") if sums else ():
        total = {
            name.removeprefix(side): float(column.sum())
            for name, column in sums.items()
            if name.startswith(side)
        }
        # Plain decoding drafts nothing; what the clock saw there is the loop's.
        draft = 0.0 if side else total["draft_seconds"]
        prefill, target = total["prefill_seconds"], total["verify_seconds"]
        for name, seconds, count in (
            ("prefill of a prompt", prefill, sums["num_prompts"].sum()),
            ("drafting, per round", draft, total["num_rounds"]),
            ("target's step, per round", target, total["num_rounds"]),
            (
                "rest, per round",
                max(total["seconds"] - prefill - draft - target, 0.0),
                total["num_rounds"],
            ),
            ("per token, in all", total["seconds"], total["num_tokens"]),
        ):
            rows.setdefault(name, []).append(1000 * seconds / (count or math.inf))
    shown = [
        ((name,), *((number(time or None),) for time in times))
        for name, times in rows.items()
        if any(times)
    ]
    return Table(("milliseconds", "plain", "with draft"), shown)
