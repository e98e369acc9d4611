"""The report without a browser: report.md, and a few lines on stdout.

report.md fits a CI job's summary, which may hold 1 MiB on GitHub: the verdict, what changed, and a line for each rule, category,
configuration and change.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.table
from rich import box
from rich.text import Text

from specdistill.report import phrases, tables
from specdistill.report.draft_lengths import by_load, fastest_lengths
from specdistill.report.phrases import between, number, times
from specdistill.statistics.intervals import (
    ASSUMED_SPREAD,
    POWER,
    SIGNIFICANCE,
    minimum_detectable_change,
)
from specdistill.terminal import Console, printable

COLOURS = {
    "passed": "green",
    "failed": "red",
    "inconclusive": "yellow",
    "not judged": "yellow",
    "warning": "yellow",
}
MARKUP = re.compile(r"[\\`*\[\]<>|#~&$]|(?<![^\W_])_|_(?![^\W_])")
# Mentions, links and issues, which GitHub finds in rendered text, where escapes and entities are gone: a zero-width space after these stops
# them. `org/name@v1` is none, and can be copied.
REFERS = re.compile(
    r"(?<![A-Za-z0-9_])@|@(?!v?\d)|#(?=\w)|\bGH-|:(?=//)|\bwww(?=\.)", re.IGNORECASE
)


def to_markdown(report: Mapping[str, Any]) -> str:
    head = (
        f"{phrases.verdict(report)}: {phrases.title(report)}",
        phrases.summary(report),
        phrases.failed_rules(report),
    )
    return "# " + "\n\n".join([*map(plain, filter(None, head)), measured(report)]) + "\n"


def measured(report: Mapping[str, Any]) -> str:
    """What follows the verdict in `to_markdown`, for a page with a beginning of its own."""
    return "\n\n".join(section for section in _sections(report) if section)


def _sections(report: Mapping[str, Any]) -> Iterator[str]:
    rules = report["gate"]["rules"]
    yield plain(phrases.settings_line(report))
    yield _list(
        f"**{plain(finding['name'])}**: {plain(finding['message'])}"
        for finding in report["findings"]
    )
    yield _list(map(plain, phrases.warnings(report)))
    if "baseline" in report:
        yield "## Since the last release"
        yield plain(phrases.since(report))
        yield cells(tables.changes(report))
    if rules:
        yield "## Gate"
        columns = (
            phrases.outcome,
            phrases.metric_title,
            phrases.scope,
            phrases.requirement,
            phrases.measured,
            phrases.note,
        )
        named = ("", "rule", "scope", "required", "measured", "note")
        yield table(named, ([plain(column(rule)) for column in columns] for rule in rules))
    yield "## Results"
    yield cells(tables.by_category(report))
    yield _list(
        map(
            plain,
            [
                *phrases.averages(report),
                f"Accepted per position: {phrases.per_position(report['results'][0])}",
            ],
        )
    )
    yield plain(
        phrases.absences(
            report["results"][0], ("mean_acceptance_length", "speedup", "predicted_speedup")
        )
    )
    if len(tables.whole_rows(report)) > 1:
        yield "## Configurations"
        yield cells(tables.by_configuration(report))
        yield cells(by_load(fastest_lengths(report)))
    if "training" in report["draft"]:
        yield "## Before and after training"
        yield cells(tables.training(report))
    yield "## Losslessness"
    yield _list(map(plain, phrases.losslessness(report)))
    if report.get("quality"):
        yield "## Task quality"
        yield cells(tables.quality(report))


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def cells(content: tables.Table) -> str:
    """A table whose cells have their notes in brackets."""
    rows = (
        [plain(f"{value} ({', '.join(notes)})" if notes else value) for value, *notes in row]
        for row in content.rows
    )
    return table([*map(plain, content.head)], rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return (
        "\n".join([f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *lines]) if lines else ""
    )


def plain(text: str) -> str:
    """Text in which nothing is markup, and of which GitHub makes neither mentions nor links: names come from outside."""
    return REFERS.sub(
        "\\g<0>\N{ZERO WIDTH SPACE}", MARKUP.sub(r"\\\g<0>", printable(" ".join(text.split())))
    )


def print_report(report: Mapping[str, Any], folder: Path) -> None:
    """The main numbers, the findings, the rules that did not pass, and where the report is."""
    row, console = report["results"][0], Console()
    grid = rich.table.Table(
        box=box.SIMPLE, show_header=False, title=Text(phrases.title(report)), title_justify="left"
    )
    lines = {
        "acceptance length": number(row.get("mean_acceptance_length"))
        + between(row, "mean_acceptance_length"),
        "accepted per position": phrases.per_position(row),
        "speedup": times(row.get("speedup")) + between(row, "speedup"),
        "predicted speedup": times(row.get("predicted_speedup")),
        "tokens per second": f"{number(row.get('tokens_per_second'), 0)}, plain {number(row.get('baseline_tokens_per_second'), 0)}",
        "gate": phrases.verdict(report),
    }
    for name, text in lines.items():
        grid.add_row(Text(name, style="dim"), Text(text, style=COLOURS.get(text.lower(), "")))
    console.print(grid)
    console.print(Text(phrases.summary(report)), soft_wrap=True)
    for finding in report["findings"]:
        console.print(Text(f"note: {finding['message']}", style="yellow"), soft_wrap=True)
    _print_rules(console, report, [rule for rule in report["gate"]["rules"] if not rule["passed"]])
    console.print(Text(f"report: {folder / 'report.html'}", style="bold"), soft_wrap=True)


def print_power_analysis(clusters: Sequence[str]) -> None:
    """The change that a run can detect, before it runs. clusters: of each prompt."""
    num_prompts = len(set(clusters))
    of = (
        f"{len(clusters)} prompts, of them {num_prompts} drawn alone,"
        if num_prompts < len(clusters)
        else f"{num_prompts} prompts"
    )
    sentence = (
        f"{of} can detect a change of {minimum_detectable_change(num_prompts):.1%} of the acceptance length: power "
        f"{POWER:.0%}, two-sided {SIGNIFICANCE:.0%}, by an assumed spread of {ASSUMED_SPREAD:.0%} a prompt."
    )
    Console(stderr=True).print(Text(sentence, style="dim"), soft_wrap=True)


def print_gate(report: Mapping[str, Any]) -> None:
    """Every rule with its evidence, then the verdict."""
    console, verdict = Console(), phrases.verdict(report)
    _print_rules(console, report, report["gate"]["rules"])
    console.print(Text(verdict, style=f"bold {COLOURS[verdict.lower()]}"))


def _print_rules(
    console: Console, report: Mapping[str, Any], rules: Iterable[Mapping[str, Any]]
) -> None:
    """The rules with their evidence, and what an inconclusive verdict lacks."""
    for rule in rules:
        outcome = phrases.outcome(rule)
        line = f"{phrases.rule_name(rule)}: {phrases.evidence(rule)}"
        console.print(Text(f"{outcome:7}", style=COLOURS[outcome]), Text(line), soft_wrap=True)
    if missing := phrases.undecided(report):
        console.print(Text(missing), soft_wrap=True)
