"""Which result rows belong together: a cell is one way of measuring, and a sweep has a cell for each value of a setting."""

from collections.abc import Mapping, Sequence
from typing import Any

from specdistill.evaluation.columns import MIN_BUCKET_DRAFTS

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
    return sorted(rows, key=lambda row: _order(row[setting])) if len(rows) > 1 else []


def whole_rows(report: Mapping[str, Any]) -> list[Row]:
    """The whole-suite row of every cell, in the report's order; only the first row where nothing was swept."""
    return [row for row in report["results"] if row["category"] == ALL]


def by_context(report: Mapping[str, Any]) -> list[Row]:
    """The acceptance length at each length of the text before a round, where there are enough drafts to tell it."""
    return [entry for entry in report["context"] if entry["num_drafts"] >= MIN_BUCKET_DRAFTS]


def k_of(row: Row) -> int:
    """K, the tokens drafted a round."""
    return int(row.get("num_speculative_tokens", len(row["accepted_per_position"])))


def _order(value: Any) -> float:
    """Of a setting's values; a context bucket is a number in words, or `all`, the whole prompts, which come last."""
    return float("inf") if value == ALL else float(value)


def _same(row: Row, other: Row, names: Sequence[str]) -> bool:
    return all(row.get(name) == other.get(name) for name in names)
