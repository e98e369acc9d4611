"""Judge a report again: exit code 0 when it passes, 1 when it does not. The report's gate section and pages are rewritten.

python eval/gate.py report=runs/demo/report/report.json gates=default
python eval/gate.py report=runs/demo/report gates=release baseline=org/name@v1.2
"""

import sys
from pathlib import Path

from specdistill.command import check_writable, run
from specdistill.errors import ExitCode
from specdistill.gate.decide import Evidence, judge, read_baseline
from specdistill.gate.rules import load_gate
from specdistill.recipe.fields import Section, like, option
from specdistill.recipe.sections import EvalConfig
from specdistill.report.files import read_report, write_report
from specdistill.report.text import print_gate


class GateOptions(Section):
    report: str = option(..., "report.json, or its folder")
    gates: str = option("default", "gate name, or a gate YAML")
    baseline: str | None = like(EvalConfig, "baseline")


def main(options: GateOptions) -> ExitCode:
    rules = load_gate(options.gates)
    path = Path(options.report)
    folder = path if path.is_dir() else path.parent
    check_writable(folder, "report")
    evidence = Evidence(*read_report(path))
    baseline = read_baseline(options.baseline) if options.baseline else None

    report = judge(rules, evidence, baseline)
    write_report(folder, report, evidence.records)
    print_gate(report)
    return ExitCode.DONE if report["gate"]["passed"] else ExitCode.CHECK_FAILED


if __name__ == "__main__":
    sys.exit(run(main, GateOptions))
