"""`specdistill gate`: judge an existing report by a gate."""

from typing import TYPE_CHECKING

from specdistill.common.errors import ExitCode
from specdistill.common.terminal import print_result
from specdistill.recipe.load import load_recipe
from specdistill.recipe.short_keys import select_recipe_keys

if TYPE_CHECKING:
    from specdistill.evaluation.gate.decide import GateOptions


def gate(arguments: list[str]) -> int:
    """Judge an existing report by a gate (exit code 0: passed, 1: failed, 4: inconclusive).

    specdistill gate report=runs/mine/report gates=release baseline=org/name@v1.2
    """
    # This module imports scipy, so it is imported only here.
    from specdistill.evaluation.gate.decide import GateOptions

    return judge_report(load_recipe(GateOptions, select_recipe_keys(arguments)))


def judge_report(options: "GateOptions") -> ExitCode:
    """Judge a report by a gate, print the verdict, and return the exit code of the verdict.

    A gate is a set of rules that a draft has to pass before it is published.

    Args:
        options: the report, the gate, and the baseline report that the draft is compared with.
    """
    # These modules import scipy, so they are imported only here.
    from specdistill.evaluation.gate.decide import EXIT_CODES, judge_again
    from specdistill.evaluation.report.text import print_gate

    report = judge_again(options)
    print_gate(report)
    print_result(report)
    return EXIT_CODES[report["gate"]["verdict"]]
