"""report.md: the report as a page that fits a CI job's summary: the verdict, what changed, the rules, the main numbers.

A summary may hold 1 MiB on GitHub; this page has a line for each rule, category, configuration and change.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from specdistill.report import phrases, tables
from specdistill.report.results import main_rows, whole_rows


def to_markdown(report: Mapping[str, Any]) -> str:
    return "\n\n".join(section for section in _sections(report) if section) + "\n"


def _sections(report: Mapping[str, Any]) -> Iterator[str]:
    row, rules, main, whole = report["results"][0], report["gate"]["rules"], main_rows(report), whole_rows(report)
    yield f"# {phrases.verdict(report)}: {plain(phrases.title(report))}"
    yield phrases.summary(report)
    yield phrases.failed_rules(report)
    yield plain(phrases.settings_line(report))
    yield _list(f"**{plain(finding['name'])}**: {plain(finding['message'])}" for finding in report["findings"])
    if "baseline" in report:
        yield "## Since the last release"
        yield plain(phrases.since(report))
        yield cells(tables.changes(report))
    if rules:
        yield "## Gate"
        yield table(("", "metric", "scope", "required", "measured", "why"), map(_rule, rules))
    yield "## Results"
    yield cells(tables.with_positions(tables.by_category(main), main))
    yield _list(map(plain, phrases.averages(report)))
    yield plain(phrases.absences(row, ("mean_acceptance_length", "speedup", "predicted_speedup")))
    if len(whole) > 1:
        yield "## Configurations"
        yield cells(tables.with_positions(tables.by_configuration(whole), whole))
    yield "## Losslessness"
    yield _list(map(plain, phrases.losslessness(report)))
    if report.get("quality"):
        yield "## Task quality"
        yield cells(tables.quality(report))


def _rule(rule: Mapping[str, Any]) -> tuple[str, ...]:
    named = phrases.outcome(rule), rule["metric"], plain(phrases.scope(rule)), phrases.requirement(rule)
    return *named, phrases.measured(rule), plain(rule["reason"])


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def cells(content: tables.Table) -> str:
    """A table whose cells have their notes in brackets."""
    rows = ([plain(f"{value} ({', '.join(notes)})" if notes else value) for value, *notes in row] for row in content.rows)
    return table(content.head, rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *lines]) if lines else ""


def plain(text: str) -> str:
    """Text in which nothing is markup: names come from outside."""
    escaped = "".join(f"\\{character}" if character in "\\`*_[]<>|#" else character for character in text)
    return " ".join(escaped.split())
