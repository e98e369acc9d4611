"""`specdistill eval`, and what it prints of a measurement."""

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
    """Measure a draft by decoding with it: acceptance length, speedup, report, gate verdict.

    specdistill eval recipe=pico/eagle3
    specdistill eval target=path/to/model method=eagle3 draft=path/to/draft suite=prompts.jsonl
    specdistill eval recipe=mine.yaml eval.engine=vllm eval.sweep.concurrency=4,16
    """
    launch_options, recipe_arguments = load_own_keys(LaunchOptions, arguments)
    keys = select_recipe_keys(recipe_arguments, SHORTHANDS)

    # Check the two files that a measurement names before torch is imported.
    values = merge_values([key for key in keys if "=" in key])
    measurement = values.get("eval")
    suite = measurement.get("suite") if isinstance(measurement, Mapping) else None
    check_suite_and_gate(suite, values.get("gate"))

    # Measure in this process, or in those that accelerate starts.
    import_libraries()
    if launch_options.launch is not None:
        return launch(ROOT / "eval" / "run.py", recipe_arguments, launch_options)
    # This module imports torch, so it is imported only here.
    from specdistill.workflows.evaluate import ARGUMENTS_WITHOUT_RECIPE, evaluate

    report, folder = evaluate(load_recipe(Recipe, add_defaults(keys, ARGUMENTS_WITHOUT_RECIPE)))
    return print_verdict(report, folder)


def check_suite_and_gate(suite: object, gate_name: object) -> None:
    """Check the suite and the gate that are named, if they are named by text.

    Values of other types are refused when the recipe is loaded.
    """
    # These modules import scipy and pyarrow, so they are imported only here.
    from specdistill.evaluation.gate.rules import load_gate
    from specdistill.evaluation.suites.suite import check_suite

    if isinstance(suite, str):
        check_suite(suite)
    if isinstance(gate_name, str):
        load_gate(gate_name)


def print_verdict(report: Report, folder: Path) -> ExitCode:
    """Print a report on the first process of a launch, and return the exit code of its verdict."""
    # These modules import torch and scipy, so they are imported only here.
    from specdistill.common.processes import is_first
    from specdistill.evaluation.gate.decide import EXIT_CODES
    from specdistill.evaluation.report.text import print_report

    if not is_first():
        # Another code would end the launch while the first process writes.
        return ExitCode.DONE
    print_report(report, folder)
    print_result(report)
    if report.get("incomplete"):
        logger.error(f"error: {report['not_measured']['incomplete']}")
        return ExitCode.RESOURCE_ERROR
    return EXIT_CODES[report["gate"]["verdict"]]
