"""Measure a draft by decoding with it, judge the report by a gate, and write its pages."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from specdistill.common.errors import announce_resumption
from specdistill.common.processes import is_first
from specdistill.evaluation.gate.decide import FIRST_RELEASE, Evidence, judge, read_baseline
from specdistill.evaluation.gate.rules import load_gate
from specdistill.evaluation.measurement.cache import CACHE_FOLDER, discard_cache
from specdistill.evaluation.measurement.runner import measure_recipe
from specdistill.evaluation.report.files import check_replaceable, compute_digest, write_report
from specdistill.methods.recipe import Recipe

# The schema of a recipe requires `train.output_dir`. A measurement without a recipe has no training
# run, so it uses this folder, below which the report is written.
ARGUMENTS_WITHOUT_RECIPE = ["train.output_dir=runs/eval"]


def evaluate(recipe: Recipe) -> tuple[dict[str, Any], Path]:
    """Measure the draft of a recipe and judge it by the recipe's gate.

    Every process of a launch calls this function. The first process writes the report.

    Args:
        recipe: the target, the draft, and the settings of the measurement.

    Returns:
        The report with the verdict of its gate, and the folder that it is written to.

    Raises:
        UserError: for a draft, suite or setting that cannot be measured. The error names the key.
        ResourceError: if memory, an engine or the Hub fails.
    """
    # For a quick look, lower the settings. Read the gate and the baseline report first, so that a
    # mistake in them is reported before the measurement, which may take hours.
    recipe = recipe.model_copy(update={"eval": recipe.eval.limit_quick_look()})
    config = recipe.eval
    folder = Path(config.output_dir or Path(recipe.train["output_dir"]) / "report")
    check_replaceable(folder, "eval.output_dir")
    rules = load_gate(recipe.gate)
    baseline = read_baseline(config.baseline, rules, "eval.baseline")

    # Measure. Every decoded batch is cached next to the report, so that the same command, typed
    # again after an interruption, continues from there. Answers of an engine are not cached.
    is_cached = config.engine == "specdistill"
    with announce_resumption() if is_cached else nullcontext():
        report, records = measure_recipe(recipe, folder)

    # Judge the report. The digest is a hash of the measured results only, so it is computed before
    # the verdict is added to the report.
    report["digest"] = compute_digest(report, records)
    report = judge(
        rules,
        Evidence(report, records),
        baseline,
        first_release=config.baseline == FIRST_RELEASE,
    )

    # Write the report. The cache of decoded batches is not needed any more: the first process of
    # each machine removes it from the disk of the machine.
    if is_first():
        write_report(folder, report, records)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        discard_cache(folder / CACHE_FOLDER)
    return report, folder
