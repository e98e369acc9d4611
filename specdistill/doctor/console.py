"""A diagnosis as a person reads it."""

from collections import Counter

from rich.console import Console
from rich.text import Text

from specdistill.doctor.checkpoint import describe
from specdistill.doctor.diagnosis import Diagnosis
from specdistill.doctor.findings import Severity

STYLES = {Severity.PROBLEM: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}
INDENT = 9


def print_diagnosis(made: Diagnosis, console: Console | None = None) -> None:
    """What the draft is, every finding with what to do about it, what was accepted, and the verdict."""
    console = console or Console(highlight=False)
    title = Text(f"{made.files.folder}", style="bold").append(f": {describe(made.files)}", style="not bold")
    console.print(title, soft_wrap=True)
    for finding in sorted(made.findings, key=lambda finding: list(Severity).index(finding.severity)):
        line = Text(f"{finding.severity:<{INDENT}}", style=STYLES[finding.severity]).append(finding.what, style="not bold")
        console.print(line, soft_wrap=True)
        if finding.do:
            console.print(" " * INDENT + finding.do, soft_wrap=True)
    if made.acceptance:
        seen = made.acceptance
        drafted = f"{seen.num_tokens} draft tokens, greedy, {seen.num_rounds} rounds"
        console.print(f"acceptance length {seen.length:.2f} with {drafted}{_beside(made)}", soft_wrap=True)
    count = Counter(finding.severity for finding in made.findings)
    counted = [
        f"{count[kind]} {kind}{'s' * (count[kind] != 1)}" for kind in (Severity.PROBLEM, Severity.WARNING) if count[kind]
    ]
    console.print(Text(", ".join(counted) or "no problem found", style="bold"))


def _beside(made: Diagnosis) -> str:
    if made.recorded is None:
        return ""
    return f"; training simulated {made.recorded.length:.2f} with {made.recorded.num_tokens}"
