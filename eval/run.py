"""Measure a draft by real speculative decoding and judge it: report.json, samples.jsonl, report.md, report.html and junit.xml.

python eval/run.py recipe=pico/eagle3
python eval/run.py target=pico draft=runs/demo/draft method=eagle3 suite=pico output_dir=runs/report
"""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from specdistill.command import run
from specdistill.decoding.load import load_proposer, proposer_options
from specdistill.errors import ExitCode
from specdistill.evaluation.baseline import read_baseline
from specdistill.evaluation.changes import judge
from specdistill.evaluation.gate import Evidence, load_gate
from specdistill.evaluation.measure import Settings
from specdistill.evaluation.pipeline import evaluate_draft
from specdistill.evaluation.report.console import print_report
from specdistill.evaluation.report.files import check_writable, write_report
from specdistill.evaluation.suites import cut_prompts, load_suite, tokenize
from specdistill.evaluation.sweep import Plan, plan_cells
from specdistill.recipe import Recipe
from specdistill.targets.frozen import FrozenTarget

SHORTHANDS = {
    "target": "target.model",
    "draft": "eval.draft",
    "suite": "eval.suite",
    "output_dir": "eval.output_dir",
}


def main(recipe: Recipe) -> ExitCode:
    config = recipe.eval
    run_folder = Path(recipe.train["output_dir"])
    folder = Path(config.output_dir or run_folder / "report")
    check_writable(folder, "eval.output_dir")
    rules, suite = load_gate(recipe.gate), load_suite(config.suite)
    baseline = read_baseline(config.baseline, "eval.baseline") if config.baseline else None

    # Target, draft and prompts
    draft = None if recipe.method == "ngram" else config.draft or str(run_folder / "draft")
    target = FrozenTarget.load(**vars(recipe.target))
    proposer = load_proposer(
        recipe.method,
        draft,
        target,
        heterogeneous_vocab=recipe.draft.heterogeneous_vocab,
        **proposer_options(config),
    )
    prompts = tokenize(
        suite,
        target.tokenizer,
        max_new_tokens=config.max_new_tokens,
        max_length=target.max_length,
        num_prompts=config.num_prompts,
    )
    axes = replace(suite.sweep, **{name: values for name, values in vars(config.sweep).items() if values})
    contexts = cut_prompts(
        suite,
        target.tokenizer,
        axes.context,
        max_new_tokens=config.max_new_tokens,
        max_length=target.max_length,
        num_prompts=config.num_prompts,
    )

    # Measure
    settings = Settings.of(config)
    plans = plan_cells(
        Plan(settings, prompts),
        num_speculative_tokens=axes.num_speculative_tokens,
        temperatures=axes.temperature,
        contexts=contexts,
    )
    finished_cells = folder / "cells"
    report, records = evaluate_draft(
        target,
        proposer,
        suite,
        plans,
        method=recipe.method,
        draft=draft,
        sampling_draws=config.sampling_draws,
        folder=finished_cells,
    )

    # Judge and write
    report = judge(rules, Evidence(report, records), baseline)
    write_report(folder, report, records)
    shutil.rmtree(finished_cells)
    print_report(report, folder)
    return ExitCode.DONE if report["gate"]["passed"] else ExitCode.CHECK_FAILED


if __name__ == "__main__":
    sys.exit(run(main, Recipe, shorthands=SHORTHANDS, without_recipe=["train.output_dir=runs/eval"]))
