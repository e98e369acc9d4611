"""Measure a draft by decoding with it, judge the report by a gate, and write its pages."""

import os
from pathlib import Path
from typing import Any

from specdistill.common.processes import is_first
from specdistill.evaluation.gate.decide import FIRST_RELEASE, Evidence, judge, read_baseline
from specdistill.evaluation.gate.rules import load_gate
from specdistill.evaluation.measurement.cache import CACHE_FOLDER, discard_cache
from specdistill.evaluation.measurement.runner import measure_recipe
from specdistill.evaluation.report.files import check_replaceable, compute_digest, write_report
from specdistill.methods.recipe import Recipe

# A measurement without a recipe has no run; the schema requires the key.
ARGUMENTS_WITHOUT_RECIPE = ["train.output_dir=runs/eval"]


def evaluate(recipe: Recipe) -> tuple[dict[str, Any], Path]:
    """Measure the draft of a recipe and judge it.

    Every process of a launch calls this function; the first one writes the report.

    Returns:
        The report with the verdict of its gate, and the folder that it is written to.

    Raises:
        UserError: for what cannot be measured, naming the key.
        ResourceError: when memory, an engine or the Hub fails.
    """
    # Read the gate and the baseline first: a mistake in them must not cost a measurement.
    config = recipe.eval
    folder = Path(config.output_dir or Path(recipe.train["output_dir"]) / "report")
    check_replaceable(folder, "eval.output_dir")
    rules = load_gate(recipe.gate)
    baseline = read_baseline(config.baseline, rules, "eval.baseline")

    # Measure. Finished work is kept next to the report, so that a repeated command resumes.
    report, records = measure_recipe(recipe, folder)

    # Judge.
    report["digest"] = compute_digest(report, records)
    report = judge(
        rules,
        Evidence(report, records),
        baseline,
        first_release=config.baseline == FIRST_RELEASE,
    )

    # Write the report. The first process of each machine removes what only a repeated command
    # would have needed.
    if is_first():
        write_report(folder, report, records)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        discard_cache(folder / CACHE_FOLDER)
    return report, folder
