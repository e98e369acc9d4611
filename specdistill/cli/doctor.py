"""`specdistill doctor`: check a draft, and print what is wrong with it."""

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

# The severity of a finding -> the style that it is printed in. Findings are printed in this order.
STYLES = {"problem": "bold red", "warning": "yellow", "note": "dim"}
INDENT = 9  # the width of the severity column, which stands before the text of a finding
DOCTOR = {**TARGET, "suite": "eval.suite"}  # short key -> recipe key, for this command


def doctor(arguments: list[str]) -> int:
    """Check a draft: its files, fit to the target, loading and decoding (exit code 1: problems).

    specdistill doctor draft=runs/mine/draft target=path/to/model
    specdistill doctor draft=org/draft engine=vllm
    """
    # Check the options before torch is imported, which is slow.
    options = load_recipe(DoctorOptions, select_recipe_keys(arguments, DOCTOR))
    import_libraries()
    # This module imports torch, so it is imported only here.
    from specdistill.advice.doctor.diagnosis import diagnose

    diagnosis = diagnose(options)
    print_diagnosis(diagnosis)
    print_result(diagnosis)
    return ExitCode.DONE if diagnosis.is_sound else ExitCode.CHECK_FAILED


def print_diagnosis(diagnosis: "Diagnosis") -> None:
    """Print the draft, every finding with its remedy, the acceptance length, and a summary."""
    # The draft in one line, for example its method, layers and dtype.
    console = Console(soft_wrap=True)
    console.print(
        Text(f"{diagnosis.folder}", style="bold").append(
            f": {diagnosis.description}", style="not bold"
        )
    )

    # The findings, the worst first (STYLES has the severities in this order). The remedy of a
    # finding stands below it.
    severities = list(STYLES)
    for finding in sorted(
        diagnosis.findings, key=lambda finding: severities.index(finding.severity)
    ):
        console.print(
            Text(f"{finding.severity:<{INDENT}}", style=STYLES[finding.severity]).append(
                finding.what, style="not bold"
            )
        )
        if finding.do:
            console.print(" " * INDENT + finding.do)

    # The acceptance length on a few prompts, and the acceptance length that training simulated.
    if diagnosis.prompts:
        console.print(f"prompts: {diagnosis.prompts}")
    decoded = diagnosis.acceptance
    if decoded:
        line = (
            f"acceptance length {decoded.length:.2f} with {decoded.num_tokens} draft tokens,"
            f" greedy, {decoded.num_rounds} rounds"
        )
        simulated = diagnosis.recorded
        if simulated:
            line += f"; training simulated {simulated.length:.2f} with {simulated.num_tokens}"
        console.print(line)

    # The acceptance length if the lookup proposes tokens, and the draft proposes only where the
    # lookup finds nothing.
    with_lookup = diagnosis.behind_lookup
    if with_lookup:
        console.print(
            f"with the lookup in front: acceptance length {with_lookup.length:.2f} (up to"
            f" {with_lookup.num_tokens} looked-up tokens per round)"
        )

    # How many problems and warnings there are. Notes are not counted.
    counts = Counter(finding.severity for finding in diagnosis.findings)
    summary = [
        f"{counts[severity]} {severity}{'s' if counts[severity] > 1 else ''}"
        for severity in ("problem", "warning")
        if counts[severity]
    ]
    console.print(Text(", ".join(summary) or "no problem found", style="bold"))
