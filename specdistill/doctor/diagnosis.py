"""The whole examination, files first, and decoding for what is sound enough to be decoded with; and how a person reads it."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from specdistill.doctor.acceptance import Acceptance, Recorded, check_acceptance, prompts_of, recorded
from specdistill.doctor.checkpoint import Examination, Finding, Severity, describe, examine, note, refusals
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget

STYLES = {Severity.PROBLEM: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}
INDENT = 9


@dataclass(frozen=True)
class Diagnosis:
    """acceptance: None where nothing was decoded. recorded: what training saw; None where there is no history."""

    files: Examination
    findings: list[Finding]
    acceptance: Acceptance | None
    recorded: Recorded | None

    @property
    def is_sound(self) -> bool:
        return all(finding.severity != Severity.PROBLEM for finding in self.findings)


def diagnose(
    draft: Path,
    engine: str | None = None,
    *,
    decode: bool = True,
    suite: str | None = None,
    num_prompts: int = 8,
    model: str | None = None,
    **target: Any,
) -> Diagnosis:
    """Examine the draft in a folder.

    Args:
        engine: one with `loaders`, which the draft is checked against.
        decode: with a target, decode `num_prompts` prompts of a suite (see `prompts_of`).
        model: its target, pico, a folder or a Hub id; `target`: the other arguments of `FrozenTarget.load`.

    Raises UserError for a target or a suite that is none, ResourceError when the Hub fails.
    """
    files = examine(draft, TargetFiles.of(model, target.get("revision")) if model else None, engine)
    acceptance = None
    if model and decode and files.method is not None and not files.refused:
        loaded = FrozenTarget.load(model, **target)
        prompts = prompts_of(draft, suite, loaded, num_prompts)
        with refusals(files):
            acceptance, more = check_acceptance(draft, files.method, loaded, prompts)
            files.findings += more
    elif model and decode:
        files.findings.append(note("not decoded: what is broken comes first"))
    return Diagnosis(files, files.findings, acceptance, recorded(draft))


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
        said = f"acceptance length {seen.length:.2f} with {seen.num_tokens} draft tokens, greedy, {seen.num_rounds} rounds"
        if simulated := made.recorded:
            said += f"; training simulated {simulated.length:.2f} with {simulated.num_tokens}"
        console.print(said, soft_wrap=True)
    count = Counter(finding.severity for finding in made.findings)
    counted = [
        f"{count[kind]} {kind}{'s' * (count[kind] != 1)}" for kind in (Severity.PROBLEM, Severity.WARNING) if count[kind]
    ]
    console.print(Text(", ".join(counted) or "no problem found", style="bold"))
