"""Measure a draft by real speculative decoding and judge it: report.json, samples.jsonl, report.md, report.html and junit.xml.

python eval/run.py recipe=pico/eagle3
python eval/run.py recipe=pico/eagle3 eval.engine=vllm eval.sweep.concurrency=4,16
python eval/run.py recipe=pico/eagle3 eval.engine=vllm eval.server=http://127.0.0.1:8000 eval.baseline_server=http://127.0.0.1:8001
python eval/run.py target=pico draft=runs/demo/draft method=eagle3 suite=pico output_dir=runs/report
"""

import sys

from specdistill.api import WITHOUT_RECIPE, evaluate
from specdistill.command import SHORTHANDS, run
from specdistill.errors import ExitCode, logger
from specdistill.gate.decide import EXIT_CODES
from specdistill.methods.recipe import Recipe
from specdistill.processes import is_first
from specdistill.report.text import print_report
from specdistill.terminal import result


def main(recipe: Recipe) -> ExitCode:
    report, folder = evaluate(recipe)
    if not is_first():
        return ExitCode.DONE  # another code would end the launch while the first one writes
    print_report(report, folder)
    result(report)
    if report.get("incomplete"):
        logger.error(f"error: {report['not_measured']['incomplete']}")
        return ExitCode.RESOURCE_ERROR
    return EXIT_CODES[report["gate"]["verdict"]]


if __name__ == "__main__":
    sys.exit(run(main, Recipe, shorthands=SHORTHANDS, without_recipe=WITHOUT_RECIPE))
