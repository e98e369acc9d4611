"""The tables of a report, for markdown and HTML alike: a cell is its value and, below it, what qualifies that (an interval, a note)."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from specdistill.report.numbers import interval, number, percent, signed, times
from specdistill.report.phrases import configuration_name, direction, row_name
from specdistill.statistics.records import ALL

Cell = tuple[str, ...]


class Table(NamedTuple):
    head: tuple[str, ...]
    rows: list[tuple[Cell, ...]]


NUMBERS = ("prompts", "acceptance length", "rate", "tokens/s", "plain", "speedup", "predicted")


def by_category(rows: Iterable[Mapping[str, Any]]) -> Table:
    return Table(("category", *NUMBERS), [((row_name(row),), *_numbers(row)) for row in rows])


def by_configuration(rows: Iterable[Mapping[str, Any]]) -> Table:
    return Table(("configuration", *NUMBERS), [((configuration_name(row),), *_numbers(row)) for row in rows])


def with_positions(table: Table, rows: Iterable[Mapping[str, Any]]) -> Table:
    """The table with the acceptance rate at each position in the draft."""
    rates = [" ".join(map(percent, row.get("acceptance_rate_per_position", []))) or "–" for row in rows]
    return Table((*table.head, "per position"), [(*cells, (rate,)) for cells, rate in zip(table.rows, rates, strict=True)])


def _numbers(row: Mapping[str, Any]) -> tuple[Cell, ...]:
    return (
        (str(row["num_prompts"]),),
        cell(number(row.get("mean_acceptance_length")), interval(row, "mean_acceptance_length")),
        (percent(row.get("acceptance_rate")),),
        (number(row.get("tokens_per_second"), 0),),
        (number(row.get("baseline_tokens_per_second"), 0),),
        cell(times(row.get("speedup")), interval(row, "speedup")),
        (times(row.get("predicted_speedup")),),
    )


def cell(value: str, *notes: str) -> Cell:
    """A cell without its empty notes."""
    return (value, *filter(None, notes))


# Since a baseline

METRICS_SHOWN = {
    "mean_acceptance_length": ("acceptance length", number),
    "acceptance_rate": ("acceptance rate", percent),
    "speedup": ("speedup", times),
    "tokens_per_second": ("tokens a second", lambda value: number(value, 0)),
    "draft_ms": ("ms to draft a token", lambda value: number(value, 3)),
    "verify_ms": ("ms to verify a draft", lambda value: number(value, 3)),
}


def changes(report: Mapping[str, Any]) -> Table:
    """Each number before and now, its change, and whether that is better, worse or open."""
    rows = [_change(change) for change in report["baseline"]["changes"]]
    return Table(("number", "before", "now", "change", "reading"), rows)


def _change(change: Mapping[str, Any]) -> tuple[Cell, ...]:
    name, shown = METRICS_SHOWN[change["metric"]]
    category = "" if change["category"] == ALL else f", {change['category'].replace('_', ' ')}"
    note = " to ".join(map(signed, change["ci95"])) if "ci95" in change else change.get("reason", "")
    relative = signed(change["change"]) if "change" in change else "–"
    old, new = shown(change.get("old")), shown(change.get("new"))
    return (f"{name}{category}",), (old,), (new,), cell(relative, note), (direction(change),)


# Task quality


def quality(report: Mapping[str, Any]) -> Table:
    """The share of completions that succeed with the draft and without, a row for each metric."""
    head = ("succeed by", "completions", "without draft", "with draft", "difference, points", "reading")
    return Table(head, [_quality(name, scores) for name, scores in report.get("quality", {}).items()])


def _quality(name: str, scores: Mapping[str, Any]) -> tuple[Cell, ...]:
    def points(share: float) -> str:
        return f"{100 * share:+.1f}".replace("-", "−")

    note, reading = "too few completions", "open"
    if ci95 := scores.get("difference_ci95"):
        note, reading = " to ".join(map(points, ci95)), "equal within the interval" if ci95[0] <= 0 <= ci95[1] else "different"
    return (
        (name.replace("_", " "),),
        (str(scores["num_prompts"]),),
        (f"{scores['without_draft']:.1%}",),
        (f"{scores['with_draft']:.1%}",),
        (points(scores["difference"]), note),
        (reading, f"{scores['only_with_draft']} only with it, {scores['only_without_draft']} only without it"),
    )
