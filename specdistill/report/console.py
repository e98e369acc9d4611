"""What the commands print to stdout: a report in a few lines, and a gate's rules."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdistill.report.numbers import between, number, percent, times
from specdistill.report.phrases import measured, outcome, requirement, scope, summary, title, verdict

COLOURS = {"Passed": "green", "Failed": "red", "Not judged": "yellow", "passed": "green", "failed": "red", "warning": "yellow"}


def print_report(report: Mapping[str, Any], folder: Path) -> None:
    """The main numbers, the findings, the rules that did not pass, and where the report is."""
    row, console = report["results"][0], Console(highlight=False)
    table = Table(box=box.SIMPLE, show_header=False, title=Text(title(report)), title_justify="left")
    lines = {
        "acceptance length": number(row.get("mean_acceptance_length")) + between(row, "mean_acceptance_length"),
        "accepted per position": "  ".join(percent(rate) for rate in row.get("acceptance_rate_per_position", [])) or "–",
        "speedup": times(row.get("speedup")) + between(row, "speedup"),
        "predicted speedup": times(row.get("predicted_speedup")),
        "tokens a second": f"{number(row.get('tokens_per_second'), 0)}, plain {number(row.get('baseline_tokens_per_second'), 0)}",
        "gate": verdict(report),
    }
    for name, text in lines.items():
        table.add_row(Text(name, style="dim"), Text(text, style=COLOURS.get(text, "")))
    console.print(table)
    console.print(Text(summary(report)), soft_wrap=True)
    for finding in report["findings"]:
        console.print(Text(f"note: {finding['message']}", style="yellow"), soft_wrap=True)
    _print_rules(console, [rule for rule in report["gate"]["rules"] if not rule["passed"]])
    console.print(Text(f"report: {folder / 'report.html'}", style="bold"), soft_wrap=True)


def print_power_analysis(sentence: str) -> None:
    """The change that a run can detect, before it runs."""
    Console(highlight=False).print(Text(sentence, style="dim"), soft_wrap=True)


def print_gate(report: Mapping[str, Any]) -> None:
    """Every rule with its evidence, then the verdict."""
    console = Console(highlight=False)
    _print_rules(console, report["gate"]["rules"])
    console.print(Text(verdict(report), style=f"bold {COLOURS[verdict(report)]}"))


def _print_rules(console: Console, rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        mark = outcome(rule)
        line = f"{rule['metric']} {requirement(rule)} [{scope(rule)}]: {measured(rule)}; {rule['reason']}"
        console.print(Text(f"{mark:7}", style=COLOURS[mark]), Text(line), soft_wrap=True)
