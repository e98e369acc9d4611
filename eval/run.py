r"""Measure a draft by real speculative decoding, and judge it.

This writes report.json, samples.jsonl, report.md, report.html and junit.xml.

python eval/run.py recipe=pico/eagle3
python eval/run.py recipe=pico/eagle3 eval.engine=vllm eval.sweep.concurrency=4,16
python eval/run.py recipe=pico/eagle3 eval.engine=vllm eval.server=http://127.0.0.1:8000 \
    eval.baseline_server=http://127.0.0.1:8001
python eval/run.py target=pico draft=runs/demo/draft method=eagle3 suite=pico output_dir=runs/report
"""

import sys

from specdistill.cli.command import run
from specdistill.cli.eval import print_verdict
from specdistill.common.errors import ExitCode
from specdistill.methods.recipe import Recipe
from specdistill.recipe.short_keys import SHORTHANDS
from specdistill.workflows.evaluate import ARGUMENTS_WITHOUT_RECIPE, evaluate


def main(recipe: Recipe) -> ExitCode:
    """Measure the draft of a recipe, judge the measurement by a gate, and print the verdict.

    Returns:
        The exit code for the verdict.
    """
    report, folder = evaluate(recipe)
    return print_verdict(report, folder)


if __name__ == "__main__":
    sys.exit(run(main, Recipe, shorthands=SHORTHANDS, without_recipe=ARGUMENTS_WITHOUT_RECIPE))
