"""Judge a report again: exit code 0 when it passes, 1 when it fails, 4 when it is inconclusive.

The verdict and its pages go next to the report that was judged.

python eval/gate.py report=runs/demo/report/report.json gates=default                  # writes runs/demo/report/default
python eval/gate.py report=runs/demo/report gates=release baseline=org/name@v1.2
python eval/gate.py report=runs/demo/report gates=release baseline=none                # a first release
"""

import sys

from specdistill.command import run
from specdistill.errors import ExitCode
from specdistill.gate.decide import EXIT_CODES, GateOptions, judge_again
from specdistill.report.text import print_gate
from specdistill.terminal import result


def main(options: GateOptions) -> ExitCode:
    report = judge_again(options)
    print_gate(report)
    result(report)
    return EXIT_CODES[report["gate"]["verdict"]]


if __name__ == "__main__":
    sys.exit(run(main, GateOptions))
