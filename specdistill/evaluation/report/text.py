"""The report without a browser: report.md, and a few lines on stdout.

report.md fits the summary of a CI job, which may hold 1 MiB on GitHub. It has the verdict, what
changed, and a line for each rule, category, configuration and change.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import rich.table
from rich import box
from rich.text import Text

from specdistill.common.errors import logger
from specdistill.common.progress import format_speed
from specdistill.common.terminal import Console, make_printable
from specdistill.evaluation.report import phrases, tables
from specdistill.evaluation.report.phrases import Report, format_bracketed_interval, format_times
from specdistill.evaluation.report.schema import RuleDocument
from specdistill.evaluation.report.tables import find_fastest_lengths, tabulate_by_load
from specdistill.evaluation.statistics.intervals import (
    ASSUMED_SPREAD,
    POWER,
    SIGNIFICANCE,
    estimate_detectable_change,
)

COLOURS = {
    "passed": "green",
    "failed": "red",
    "inconclusive": "yellow",
    "not judged": "yellow",
    "warning": "yellow",
}
# Prompts with which a gate decides about a loss of 3 % of the acceptance length, by the simulation
# in bench/gate.py.
GATE_PROMPTS = 128
# Characters that are markup in GitHub's Markdown. An underscore inside a word is none.
MARKUP = re.compile(r"[\\`*\[\]<>|#~&$]|(?<![^\W_])_|_(?![^\W_])")
# The characters with which GitHub begins a mention, a link or the number of an issue. GitHub looks
# for them in the rendered text, where escapes no longer exist. A zero-width space after the
# character stops it. `org/name@v1` is no mention and stays as it is, so that it can be copied.
REFERENCE_PATTERN = re.compile(
    r"(?<![A-Za-z0-9_])@|@(?!v?\d)|#(?=\w)|\bGH-|:(?=//)|\bwww(?=\.)", re.IGNORECASE
)


def to_markdown(report: Report) -> str:
    """Return the content of report.md: the verdict as its title, then the sections."""
    head = (
        f"{phrases.format_verdict(report)}: {phrases.format_title(report)}",
        phrases.format_summary(report),
        phrases.describe_failed_rules(report),
    )
    return (
        "# "
        + "\n\n".join([*map(escape_markdown, filter(None, head)), format_measurement(report)])
        + "\n"
    )


def format_measurement(report: Report) -> str:
    """Return report.md without its title and summary, for a page that has its own."""
    return "\n\n".join(section for section in _list_sections(report) if section)


def _list_sections(report: Report) -> Iterator[str]:
    """Yield the sections of report.md that follow the verdict, in Markdown; some may be empty.

    Args:
        report: the content of report.json.
    """
    # The settings, the findings and the warnings come first. A finding is a sentence that a reader
    # must know before quoting the numbers.
    yield escape_markdown(phrases.format_settings(report))
    yield _format_list(
        f"**{escape_markdown(finding['name'])}**: {escape_markdown(finding['message'])}"
        for finding in report["findings"]
    )
    yield _format_list(map(escape_markdown, phrases.list_warnings(report)))

    # Next: what changed since the last release, and how the gate judged each of its rules.
    if "baseline" in report:
        yield "## Since the last release"
        yield escape_markdown(phrases.describe_baseline(report))
        yield format_cells(tables.tabulate_changes(report))
    if report["gate"]["rules"]:
        yield "## Gate"
        yield _format_rules(report["gate"]["rules"])

    # The numbers of the main configuration, and of the other ones.
    yield from _list_result_sections(report)

    # What training changed.
    if "training" in report["draft"]:
        yield "## Before and after training"
        yield format_cells(tables.tabulate_training(report))

    # Whether the output is the target's, and how good it is.
    yield "## Losslessness"
    yield _format_list(map(escape_markdown, phrases.describe_losslessness(report)))
    if report.get("quality"):
        yield "## Task quality"
        yield format_cells(tables.tabulate_quality(report))


def _format_rules(rules: Iterable[RuleDocument]) -> str:
    """Return a Markdown table of the gate's rules, with a row for each rule."""
    # Each column is a function: rule -> the text of its cell.
    columns = (
        phrases.find_outcome,
        phrases.name_metric,
        phrases.format_scope,
        phrases.format_requirement,
        phrases.format_measured,
        phrases.note,
    )
    rows = []
    for rule in rules:
        rows.append([escape_markdown(column(rule)) for column in columns])
    return format_table(("", "rule", "scope", "required", "measured", "note"), rows)


def _list_result_sections(report: Report) -> Iterator[str]:
    """Yield the sections with the numbers of all configurations, in Markdown.

    Args:
        report: the content of report.json. Its first row has the main configuration.
    """
    # The main configuration: its table, the averages, and why numbers are absent.
    row = report["results"][0]
    yield "## Results"
    yield format_cells(tables.tabulate_by_category(report))
    per_position = f"Accepted per position: {phrases.format_per_position(row)}"
    yield _format_list(map(escape_markdown, [*phrases.format_averages(report), per_position]))
    absences = phrases.describe_absences(
        row, ("mean_acceptance_length", "speedup", "predicted_speedup")
    )
    yield escape_markdown(absences)

    # The other configurations, if a sweep measured any.
    if len(tables.select_whole_rows(report)) > 1:
        yield "## Configurations"
        yield format_cells(tables.tabulate_by_configuration(report))
        yield format_cells(tabulate_by_load(find_fastest_lengths(report)))


def _format_list(items: Iterable[str]) -> str:
    """Return a bullet list in Markdown; empty without items."""
    return "\n".join(f"- {item}" for item in items)


def format_cells(content: tables.Table) -> str:
    """Return a table in Markdown, with the notes of each cell in brackets after its value.

    Args:
        content: the table. A cell is a tuple: its value, then notes such as an interval.
    """
    rows = []
    for row in content.rows:
        cells = []
        for value, *notes in row:
            text = f"{value} ({', '.join(notes)})" if notes else value
            cells.append(escape_markdown(text))
        rows.append(cells)
    return format_table([*map(escape_markdown, content.head)], rows)


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; an empty text if there are no rows.

    Args:
        head: the titles of the columns, escaped for Markdown.
        rows: the cells of each row, escaped for Markdown.
    """
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return (
        "\n".join([f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *lines]) if lines else ""
    )


def escape_markdown(text: str) -> str:
    """Escape a text for Markdown, so that nothing in it is markup, a mention or a link.

    The text may come from outside, e.g. a prompt. On GitHub, an @name in it would notify a person.
    """
    # Make one printable line, escape the markup, and put an invisible space into mentions (@name)
    # and links, so that they are no longer recognized.
    line = make_printable(" ".join(text.split()))
    escaped_line = MARKUP.sub(r"\\\g<0>", line)
    return REFERENCE_PATTERN.sub("\\g<0>\N{ZERO WIDTH SPACE}", escaped_line)


def print_report(report: Report, folder: Path) -> None:
    """Print the main numbers, the findings, the rules that did not pass, and the report's path.

    Args:
        report: the content of report.json. Its first row has the main configuration.
        folder: the folder of the report.
    """
    row = report["results"][0]
    console = Console()
    grid = rich.table.Table(
        box=box.SIMPLE,
        show_header=False,
        title=Text(phrases.format_title(report)),
        title_justify="left",
    )

    # Print the numbers to quote, and the verdict.
    lines = {
        "acceptance length": phrases.format_acceptance_length(row),
        "accepted per position": phrases.format_per_position(row),
        "speedup": format_times(row.get("speedup")) + format_bracketed_interval(row, "speedup"),
        "predicted speedup": format_times(row.get("predicted_speedup")),
        "tokens per second": (
            f"{format_speed(row.get('tokens_per_second'))}, plain"
            f" {format_speed(row.get('baseline_tokens_per_second'))}"
        ),
        "gate": phrases.format_verdict(report),
    }
    for name, text in lines.items():
        grid.add_row(Text(name, style="dim"), Text(text, style=COLOURS.get(text.lower(), "")))
    console.print(grid)
    console.print(Text(phrases.format_summary(report)), soft_wrap=True)

    # Print what a reader should know before quoting these numbers, and where the full report is.
    for finding in report["findings"]:
        console.print(Text(f"note: {finding['message']}", style="yellow"), soft_wrap=True)
    _print_rules(console, report, [rule for rule in report["gate"]["rules"] if not rule["passed"]])
    console.print(Text(f"report: {folder / 'report.html'}", style="bold"), soft_wrap=True)


def print_power_analysis(clusters: Sequence[str]) -> None:
    """Print the smallest change of the acceptance length that a measurement will be able to detect.

    If the prompts are few for a gate, a warning says so.

    Args:
        clusters: the cluster of each prompt. Prompts of one cluster, such as the turns of one
            conversation, are not independent, so they count as one prompt.
    """
    num_prompts = len(set(clusters))
    independent = f" ({num_prompts} of them independent)" if num_prompts < len(clusters) else ""
    sentence = (
        f"{len(clusters)} prompts{independent} can detect a change of"
        f" {estimate_detectable_change(num_prompts):.1%} of the acceptance length ({POWER:.0%}"
        f" power, two-sided α = {SIGNIFICANCE:g}, assumed standard deviation between prompts"
        f" {ASSUMED_SPREAD:.0%})."
    )
    Console(stderr=True).print(Text(sentence, style="dim"), soft_wrap=True)
    warn_few_prompts(num_prompts)


def warn_few_prompts(num_prompts: int) -> None:
    """Warn if a gate judges a draft on fewer than GATE_PROMPTS prompts."""
    if num_prompts < GATE_PROMPTS:
        logger.warning(
            f"The gate judges the draft on {num_prompts} prompts. With fewer than {GATE_PROMPTS} it"
            " is often inconclusive."
        )


def print_gate(report: Report) -> None:
    """Print every rule of the gate with the measured value, then the verdict."""
    console = Console()
    verdict = phrases.format_verdict(report)
    _print_rules(console, report, report["gate"]["rules"])
    console.print(Text(verdict, style=f"bold {COLOURS[verdict.lower()]}"))


def _print_rules(console: Console, report: Report, rules: Iterable[RuleDocument]) -> None:
    """Print the outcome and the measured value of rules, and what could decide undecided rules.

    Args:
        console: the console to print to.
        report: the content of report.json.
        rules: the rules of its gate to print.
    """
    for rule in rules:
        outcome = phrases.find_outcome(rule)
        console.print(
            Text(f"{outcome:7}", style=COLOURS[outcome]),
            Text(f"{phrases.name_rule(rule)}: {phrases.format_evidence(rule)}"),
            soft_wrap=True,
        )
    missing = phrases.describe_undecided(report)
    if missing:
        console.print(Text(missing), soft_wrap=True)
