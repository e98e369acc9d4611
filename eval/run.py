"""Measure a draft by real speculative decoding and judge it: report.json, samples.jsonl, report.md, report.html and junit.xml.

python eval/run.py recipe=pico/eagle3
python eval/run.py recipe=pico/eagle3 eval.engine=vllm eval.sweep.concurrency=4,16
python eval/run.py recipe=pico/eagle3 eval.engine=vllm eval.server=http://127.0.0.1:8000 eval.baseline_server=http://127.0.0.1:8001
python eval/run.py target=pico draft=runs/demo/draft method=eagle3 suite=pico output_dir=runs/report
"""

import sys
from pathlib import Path

from specdistill.command import SHORTHANDS, run
from specdistill.errors import ExitCode, logger
from specdistill.gate.decide import EXIT_CODES, FIRST_RELEASE, Evidence, is_decided, judge, read_baseline
from specdistill.gate.rules import load_gate
from specdistill.measurement.evaluate import FINISHED, measure
from specdistill.measurement.measured import discard_finished
from specdistill.methods.recipe import Recipe
from specdistill.report.files import check_replaceable, digest, previous_report, write_report
from specdistill.report.text import print_report
from specdistill.statistics.sample_size import PriorRun
from specdistill.terminal import result


def main(recipe: Recipe) -> ExitCode:
    # By which rules, and compared with what
    config = recipe.eval
    folder = Path(config.output_dir or Path(recipe.train["output_dir"]) / "report")
    check_replaceable(folder, "eval.output_dir")
    rules = load_gate(recipe.gate)
    baseline = read_baseline(config.baseline, rules, "eval.baseline")
    known, place = ((baseline.report, baseline.records), config.baseline) if baseline else (previous_report(folder), folder)
    prior = PriorRun(*known, str(place)) if known else None

    # Measure
    report, records = measure(
        recipe, folder, prior=prior, is_decided=lambda *measured: is_decided(rules, baseline, Evidence(*measured))
    )

    # Judge
    report["digest"] = digest(report, records)
    report = judge(rules, Evidence(report, records), baseline, first_release=config.baseline == FIRST_RELEASE)

    # Write
    write_report(folder, report, records)
    discard_finished(folder / FINISHED)

    # Say
    print_report(report, folder)
    result(report)
    if report.get("incomplete"):
        logger.error(f"error: {report['not_measured']['incomplete']}")
        return ExitCode.RESOURCE_ERROR
    return EXIT_CODES[report["gate"]["verdict"]]


if __name__ == "__main__":
    sys.exit(run(main, Recipe, shorthands=SHORTHANDS, without_recipe=["train.output_dir=runs/eval"]))
