"""A report that is judged again: `specdistill gate`."""

from pathlib import Path
from typing import Any

from specdistill.command import check_writable
from specdistill.errors import UserError
from specdistill.gate.decide import FIRST_RELEASE, Evidence, judge, read_baseline
from specdistill.gate.rules import load_gate
from specdistill.recipe.fields import Section, like, option
from specdistill.recipe.sections import EvalConfig
from specdistill.report.files import read_report, write_report


class GateOptions(Section):
    report: str = option(..., "report.json, or its folder")
    gates: str = option("default", "gate name, or a gate YAML")
    baseline: str | None = like(EvalConfig, "baseline")
    output_dir: str | None = option(
        None, "folder of the verdict's report; null: named by the gate, beside the report that is judged"
    )


def judge_again(report: Path, gates: str, *, baseline: str | None = None, output_dir: Path | None = None) -> dict[str, Any]:
    """The report with the verdict of a gate, written into a folder of its own beside the one that is judged, or into `output_dir`."""
    rules = load_gate(gates)
    judged = report if report.is_dir() else report.parent
    folder = output_dir or judged / Path(gates).stem
    if folder.resolve() == judged.resolve():
        raise UserError("output_dir", got=f"{folder}, the report that is judged", expected="another folder")
    check_writable(folder, "output_dir")
    evidence = Evidence(*read_report(report))
    verdict = judge(rules, evidence, read_baseline(baseline, rules), first_release=baseline == FIRST_RELEASE)
    write_report(folder, verdict, evidence.records)
    return verdict
