"""`specdistill eval`: measure a draft, and print the report and its verdict."""

from collections.abc import Mapping
from pathlib import Path

from specdistill.cli.launch import LaunchOptions, import_libraries, launch
from specdistill.common.errors import ExitCode, logger
from specdistill.common.project import ROOT
from specdistill.common.terminal import print_result
from specdistill.evaluation.report.phrases import Report
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_own_keys, load_recipe, merge_values
from specdistill.recipe.short_keys import SHORTHANDS, add_defaults, select_recipe_keys


def eval(arguments: list[str]) -> int:
    """Measure acceptance length and speedup of a draft, write a report, and judge it by a gate.

    specdistill eval recipe=pico/eagle3
    specdistill eval target=path/to/model method=eagle3 draft=path/to/draft suite=prompts.jsonl
    specdistill eval recipe=mine.yaml eval.engine=vllm eval.sweep.concurrency=4,16
    """
    # Separate the keys of the launcher from the keys of the recipe.
    launch_options, recipe_arguments = load_own_keys(LaunchOptions, arguments)
    keys = select_recipe_keys(recipe_arguments, SHORTHANDS)

    # Check the suite and the gate before torch is imported, which is slow. If `eval` is no section,
    # because of a mistake in the recipe, loading the recipe below raises the error. Flags, such as
    # --json, have no `=` and are left out.
    values = merge_values([key for key in keys if "=" in key])
    measurement = values.get("eval")
    suite = measurement.get("suite") if isinstance(measurement, Mapping) else None
    check_suite_and_gate(suite, values.get("gate"))

    # Measure in this process, or in the processes that accelerate starts.
    import_libraries()
    if launch_options.launch is not None:
        return launch(ROOT / "eval" / "run.py", recipe_arguments, launch_options)
    # This module imports torch, so it is imported only here.
    from specdistill.workflows.evaluate import ARGUMENTS_WITHOUT_RECIPE, evaluate

    report, folder = evaluate(load_recipe(Recipe, add_defaults(keys, ARGUMENTS_WITHOUT_RECIPE)))
    return print_verdict(report, folder)


def check_suite_and_gate(suite: object, gate_name: object) -> None:
    """Check the suite and the gate of a measurement without importing torch.

    A value that is not text is not checked here: it is refused when the recipe is loaded.

    Args:
        suite: the value of `eval.suite`; None for no suite.
        gate_name: the value of `gate`; None for no gate.

    Raises:
        UserError: for a suite or a gate that does not exist or is broken.
    """
    # These modules import scipy and pyarrow, so they are imported only here.
    from specdistill.evaluation.gate.rules import load_gate
    from specdistill.evaluation.suites.suite import check_suite

    if isinstance(suite, str):
        check_suite(suite)
    if isinstance(gate_name, str):
        load_gate(gate_name)


def print_verdict(report: Report, folder: Path) -> ExitCode:
    """Print a report in the first process of a launch, and return the exit code of its verdict.

    Args:
        report: the content of report.json.
        folder: the folder of the report.
    """
    # These modules import torch and scipy, so they are imported only here.
    from specdistill.common.processes import is_first
    from specdistill.evaluation.gate.decide import EXIT_CODES
    from specdistill.evaluation.report.text import print_report

    if not is_first():
        # Only the first process returns the code of the verdict. If another process ended with an
        # error code, accelerate would kill all processes, even the first one while it writes.
        return ExitCode.DONE
    print_report(report, folder)
    print_result(report)

    # A report is incomplete if, for example, a server died during the measurement.
    if report.get("incomplete"):
        logger.error(f"error: {report['not_measured']['incomplete']}")
        return ExitCode.RESOURCE_ERROR
    return EXIT_CODES[report["gate"]["verdict"]]
