"""Measure a draft by real speculative decoding and judge it: report.json, samples.jsonl, report.md, report.html and junit.xml.

python eval/run.py recipe=pico/eagle3
python eval/run.py recipe=pico/eagle3 eval.engine=vllm eval.server=http://127.0.0.1:8000 eval.baseline_server=http://127.0.0.1:8001
python eval/run.py target=pico draft=runs/demo/draft method=eagle3 suite=pico output_dir=runs/report
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from specdistill.command import run
from specdistill.decoding.tree import tree_shape
from specdistill.errors import ExitCode
from specdistill.gate.baseline import read_baseline
from specdistill.gate.decide import Evidence
from specdistill.gate.judge import judge
from specdistill.gate.rules import load_gate
from specdistill.hub import resolve
from specdistill.measurement.evaluate import evaluate_draft
from specdistill.measurement.measure import Settings
from specdistill.measurement.quality import add_quality
from specdistill.measurement.sweep import Plan, plan_configurations
from specdistill.methods import METHODS
from specdistill.methods.load import load_proposer
from specdistill.methods.recipe import Recipe
from specdistill.report.console import print_power_analysis, print_report
from specdistill.report.files import check_writable, previous_report, write_report
from specdistill.servers.run import connect, evaluate_server
from specdistill.statistics.power import PriorRun, power_analysis
from specdistill.statistics.records import PromptRecord
from specdistill.suites.suite import Suite, cut_prompts, load_suite, tokenize
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.loading import read_tokenizer

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
    prior = prior_run(folder, baseline, config.baseline)
    measured_configurations = folder / "configurations"
    if config.engine == "specdistill":
        report, records = measure_here(recipe, suite, prior, measured_configurations)
    else:
        report, records = measure_server(recipe, suite, prior)

    # Judge and write
    report = judge(rules, Evidence(report, records), baseline)
    write_report(folder, report, records)
    if config.engine == "specdistill":
        shutil.rmtree(measured_configurations)
    print_report(report, folder)
    if report.get("incomplete"):
        print(f"error: {report['not_measured']['incomplete']}", file=sys.stderr)
        return ExitCode.RESOURCE_ERROR
    return ExitCode.DONE if report["gate"]["passed"] else ExitCode.CHECK_FAILED


def measure_here(
    recipe: Recipe, suite: Suite, prior: PriorRun | None, measured_configurations: Path
) -> tuple[dict[str, Any], list[PromptRecord]]:
    """Decode in this process. measured_configurations: the folder of what is measured already, for a run that goes on."""
    config = recipe.eval
    trained = METHODS[recipe.method].artifact is not None
    draft = config.draft or str(Path(recipe.train["output_dir"]) / "draft") if trained else None
    target = FrozenTarget.load(**vars(recipe.target))
    proposer = load_proposer(
        recipe.method,
        draft,
        target,
        **recipe.proposer_options(),
    )
    prompts = tokenize(
        suite,
        target.tokenizer,
        max_new_tokens=config.max_new_tokens,
        max_length=target.max_length,
        num_prompts=config.num_prompts,
    )
    axes = suite.sweep.model_copy(update={name: values for name, values in vars(config.sweep).items() if values})
    contexts = cut_prompts(
        suite,
        target.tokenizer,
        axes.context,
        max_new_tokens=config.max_new_tokens,
        max_length=target.max_length,
        num_prompts=config.num_prompts,
    )
    print_power_analysis(power_analysis(len(prompts), suite.name, prior))
    plans = plan_configurations(
        Plan(Settings.of(config), prompts, config.target_precision),
        num_speculative_tokens=axes.num_speculative_tokens,
        temperatures=axes.temperature,
        batch_sizes=axes.batch_size,
        trees=[tree_shape(**vars(tree)) for tree in axes.tree],
        contexts=contexts,
    )
    report, records = evaluate_draft(
        target,
        proposer,
        suite,
        plans,
        method=recipe.method,
        draft=draft,
        sampling_draws=config.sampling_draws,
        folder=measured_configurations,
    )
    add_quality(report, records, suite, special_tokens=target.tokenizer.all_special_tokens, run_code=config.run_code)
    return report, records


def measure_server(recipe: Recipe, suite: Suite, prior: PriorRun | None) -> tuple[dict[str, Any], list[PromptRecord]]:
    """Send the suite to running servers. Which draft they loaded they do not say: eval.draft is written down as it is given."""
    config, target = recipe.eval, recipe.target
    tokenizer, longest = read_tokenizer(target.model, revision=target.revision, trust_remote_code=target.trust_remote_code)
    speculative, plain = connect(
        config.engine,
        config.server,
        config.baseline_server,
        target=(target.model, resolve(target.model)),
        k=config.num_speculative_tokens,
        timeout=config.server_timeout,
    )
    prompts = tokenize(
        suite,
        tokenizer,
        max_new_tokens=config.max_new_tokens,
        max_length=min(longest, speculative.identity.max_length or longest),
        num_prompts=config.num_prompts,
    )
    print_power_analysis(power_analysis(len(prompts), suite.name, prior))
    report, records = evaluate_server(
        speculative,
        plain,
        suite,
        prompts,
        Settings.of(config),
        tokenizer=tokenizer,
        target={"model": target.model, "revision": target.revision},
        draft={"model": config.draft, "revision": None, "method": recipe.method},
    )
    add_quality(report, records, suite, special_tokens=tokenizer.all_special_tokens, run_code=config.run_code)
    return report, records


def prior_run(folder: Path, baseline: Evidence | None, place: str | None) -> PriorRun | None:
    """The baseline, or else the report that this one will replace."""
    if baseline is not None:
        return PriorRun(baseline.report, baseline.records, str(place))
    previous = previous_report(folder)
    return PriorRun(*previous, str(folder)) if previous else None


if __name__ == "__main__":
    sys.exit(run(main, Recipe, shorthands=SHORTHANDS, without_recipe=["train.output_dir=runs/eval"]))
