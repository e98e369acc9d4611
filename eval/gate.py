"""Judge a report again: exit code 0 when it passes, 1 when it fails, 4 when it is inconclusive.

The verdict and its pages are written next to the report that was judged.

# This writes to runs/demo/report/default.
python eval/gate.py report=runs/demo/report/report.json gates=default
python eval/gate.py report=runs/demo/report gates=release baseline=org/name@v1.2
python eval/gate.py report=runs/demo/report gates=release baseline=none  # a first release
"""

import sys

from specdistill.cli.command import run
from specdistill.cli.gate import judge_report
from specdistill.common.errors import ExitCode
from specdistill.evaluation.gate.decide import GateOptions


def main(options: GateOptions) -> ExitCode:
    """Judge a report by a gate, and return the verdict as an exit code."""
    return judge_report(options)


if __name__ == "__main__":
    sys.exit(run(main, GateOptions))
