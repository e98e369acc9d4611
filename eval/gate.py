"""Judge a report again: exit code 0 when it passes, 1 when it does not. The verdict and its pages go beside the report that was judged.

python eval/gate.py report=runs/demo/report/report.json gates=default                  # writes runs/demo/report/default
python eval/gate.py report=runs/demo/report gates=release baseline=org/name@v1.2
python eval/gate.py report=runs/demo/report gates=release baseline=none                # a first release
"""

import sys
from pathlib import Path

from specdistill.command import check_writable, run
from specdistill.errors import ExitCode, UserError
from specdistill.gate.decide import FIRST_RELEASE, Evidence, judge, read_baseline
from specdistill.gate.rules import load_gate
from specdistill.recipe.fields import Section, like, option
from specdistill.recipe.sections import EvalConfig
from specdistill.report.files import read_report, write_report
from specdistill.report.text import print_gate


class GateOptions(Section):
    report: str = option(..., "report.json, or its folder")
    gates: str = option("default", "gate name, or a gate YAML")
    baseline: str | None = like(EvalConfig, "baseline")
    output_dir: str | None = option(
        None, "folder of the verdict's report; null: named by the gate, beside the report that is judged"
    )


def main(options: GateOptions) -> ExitCode:
    rules = load_gate(options.gates)
    path = Path(options.report)
    judged = path if path.is_dir() else path.parent
    folder = Path(options.output_dir or judged / Path(options.gates).stem)
    if folder.resolve() == judged.resolve():
        raise UserError("output_dir", got=f"{folder}, the report that is judged", expected="another folder")
    check_writable(folder, "output_dir")
    evidence = Evidence(*read_report(path))
    baseline = read_baseline(options.baseline, rules)

    report = judge(rules, evidence, baseline, first_release=options.baseline == FIRST_RELEASE)
    write_report(folder, report, evidence.records)
    print_gate(report)
    return ExitCode.DONE if report["gate"]["passed"] else ExitCode.CHECK_FAILED


if __name__ == "__main__":
    sys.exit(run(main, GateOptions))
