"""Which result rows belong together: those of the main configuration, and of a sweep the configurations that one setting leads through."""

from collections.abc import Mapping, Sequence
from typing import Any

from specdistill.statistics.configuration import ALL, CONFIGURATION_KEYS
from specdistill.statistics.prompt_sums import MIN_BUCKET_DRAFTS

Row = Mapping[str, Any]


def main_rows(report: Mapping[str, Any]) -> list[Row]:
    """The rows of the first row's configuration: whole suites and their categories."""
    return [row for row in report["results"] if _same(row, report["results"][0], CONFIGURATION_KEYS)]


def whole_rows(report: Mapping[str, Any]) -> list[Row]:
    """The whole-suite row of every configuration, in the report's order; only the first row where nothing was swept."""
    return [row for row in report["results"] if row["category"] == ALL]


def sweep(report: Mapping[str, Any], setting: str) -> list[Row]:
    """The first row and those that differ from it in `setting` alone, by that setting's value; empty where it was not swept."""
    others = [name for name in ("suite", "category", *CONFIGURATION_KEYS) if name != setting]
    rows = [row for row in report["results"] if _same(row, report["results"][0], others)]
    return sorted(rows, key=lambda row: _order(row[setting])) if len(rows) > 1 else []


def by_context(report: Mapping[str, Any]) -> list[Row]:
    """The acceptance length at each length of the text before a round, where there are enough drafts to tell it."""
    return [entry for entry in report["context"] if entry["num_drafts"] >= MIN_BUCKET_DRAFTS]


def _order(value: Any) -> float:
    """Of a setting's values; a context bucket is a number in words, or `all`, the whole prompts, which come last."""
    return float("inf") if value == ALL else float(value)


def _same(row: Row, other: Row, names: Sequence[str]) -> bool:
    return all(row[name] == other[name] for name in names)
