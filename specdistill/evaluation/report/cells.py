"""Which result rows belong together: a cell is one way of measuring, and a sweep has a cell for each value of a setting."""

from collections.abc import Mapping, Sequence
from typing import Any

SETTINGS = ("num_speculative_tokens", "tree", "temperature", "batch_size")
ALL = "all"

Row = Mapping[str, Any]


def main_rows(report: Mapping[str, Any]) -> list[Row]:
    """The rows of the first row's cell, whole suites and their categories, over all context lengths."""
    first = report["results"][0]
    return [row for row in report["results"] if _same(row, first, SETTINGS) and row["context_bucket"] == ALL]


def sweep(report: Mapping[str, Any], setting: str) -> list[Row]:
    """The first row and those that differ from it in `setting` alone, by that setting's value; empty where it was not swept."""
    first = report["results"][0]
    others = [name for name in (*SETTINGS, "suite", "category", "context_bucket") if name != setting]
    rows = [row for row in report["results"] if setting in row and _same(row, first, others)]
    by_value = {row[setting]: row for row in reversed(rows)}  # the first of equals counts
    return [by_value[value] for value in sorted(by_value)] if len(by_value) > 1 else []


def cells(report: Mapping[str, Any]) -> list[Row]:
    """The whole-suite row of every cell, in the report's order; only the first row where nothing was swept."""
    return [row for row in report["results"] if row["category"] == ALL]


def by_context(report: Mapping[str, Any]) -> list[Row]:
    """The acceptance length of each context bucket: with its interval where the bucket has a row of its own."""
    first = report["results"][0]
    rows = {
        row["context_bucket"]: row
        for row in report["results"]
        if _same(row, first, (*SETTINGS, "suite", "category")) and row["context_bucket"] != ALL
    }
    return [{**entry, **_intervals(rows.get(entry["bucket"], {}))} for entry in report["context"]]


def k_of(row: Row) -> int:
    """K, the tokens drafted a round."""
    return int(row.get("num_speculative_tokens", len(row["accepted_per_position"])))


def _same(row: Row, other: Row, names: Sequence[str]) -> bool:
    return all(row.get(name) == other.get(name) for name in names)


def _intervals(row: Row) -> dict[str, Any]:
    return {name: row[name] for name in ("mean_acceptance_length_ci95",) if name in row}
