"""`specdistill doctor`, what it prints, and its exit code."""

from collections import Counter
from typing import TYPE_CHECKING

from rich.text import Text

from specdistill.advice.doctor.options import DoctorOptions
from specdistill.cli.launch import import_libraries
from specdistill.common.errors import ExitCode
from specdistill.common.terminal import Console, print_result
from specdistill.recipe.load import load_recipe
from specdistill.recipe.short_keys import TARGET, select_recipe_keys

if TYPE_CHECKING:
    from specdistill.advice.doctor.diagnosis import Diagnosis

# Severity of a finding -> its style, the worst first.
STYLES = {"problem": "bold red", "warning": "yellow", "note": "dim"}
INDENT = 9
DOCTOR = {**TARGET, "suite": "eval.suite"}  # short key -> recipe key


def doctor(arguments: list[str]) -> int:
    """Check a draft: files, fit with its target, engine loader, decoding (exit code 1: a problem).

    specdistill doctor draft=runs/mine/draft target=path/to/model
    specdistill doctor draft=org/draft engine=vllm
    """
    options = load_recipe(DoctorOptions, select_recipe_keys(arguments, DOCTOR))
    import_libraries()
    # This module imports torch, so it is imported only here.
    from specdistill.advice.doctor.diagnosis import diagnose

    diagnosis = diagnose(options)
    print_diagnosis(diagnosis)
    print_result(diagnosis)
    return ExitCode.DONE if diagnosis.is_sound else ExitCode.CHECK_FAILED


def print_diagnosis(diagnosis: "Diagnosis") -> None:
    """Print what the draft is, every finding, what was accepted, and the verdict.

    A finding comes with what to do about it.
    """
    console = Console(soft_wrap=True)
    console.print(
        Text(f"{diagnosis.folder}", style="bold").append(
            f": {diagnosis.description}", style="not bold"
        )
    )
    for finding in sorted(
        diagnosis.findings, key=lambda finding: list(STYLES).index(finding.severity)
    ):
        console.print(
            Text(f"{finding.severity:<{INDENT}}", style=STYLES[finding.severity]).append(
                finding.what, style="not bold"
            )
        )
        if finding.do:
            console.print(" " * INDENT + finding.do)

    # What was accepted
    if diagnosis.prompts:
        console.print(f"prompts: {diagnosis.prompts}")
    decoded = diagnosis.acceptance
    if decoded:
        what = (
            f"acceptance length {decoded.length:.2f} with {decoded.num_tokens} draft tokens,"
            f" greedy, {decoded.num_rounds} rounds"
        )
        simulated = diagnosis.recorded
        if simulated:
            what += f"; training simulated {simulated.length:.2f} with {simulated.num_tokens}"
        console.print(what)
    behind = diagnosis.behind_lookup
    if behind:
        console.print(
            f"with the lookup in front: acceptance length {behind.length:.2f} (up to"
            f" {behind.num_tokens} looked-up tokens per round)"
        )

    # The verdict
    count = Counter(finding.severity for finding in diagnosis.findings)
    counted = [
        f"{count[kind]} {kind}{'s' * (count[kind] != 1)}"
        for kind in ("problem", "warning")
        if count[kind]
    ]
    console.print(Text(", ".join(counted) or "no problem found", style="bold"))
