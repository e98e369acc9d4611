"""Measure a draft by real speculative decoding and judge it: report.json, samples.jsonl, report.md, report.html and junit.xml.

python eval/run.py recipe=pico/eagle3
python eval/run.py recipe=pico/eagle3 eval.engine=vllm 'eval.sweep.concurrency=[4,16]'
python eval/run.py recipe=pico/eagle3 eval.engine=vllm eval.server=http://127.0.0.1:8000 eval.baseline_server=http://127.0.0.1:8001
python eval/run.py target=pico draft=runs/demo/draft method=eagle3 suite=pico output_dir=runs/report
"""

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specdistill.command import check_writable, run
from specdistill.decoding.batch_decoder import BatchDecoder
from specdistill.decoding.proposer import Proposer
from specdistill.decoding.tree import tree_shape
from specdistill.errors import ExitCode, UserError
from specdistill.export import export
from specdistill.gate.decide import FIRST_RELEASE, Evidence, is_decided, judge, read_baseline
from specdistill.gate.rules import load_gate
from specdistill.measurement.configurations import Plan, Settings, plan_configurations
from specdistill.measurement.hardware import fit_threads, hardware, resources_used, total_used
from specdistill.measurement.losslessness import greedy_check, sampling_test
from specdistill.measurement.measure import measure, prompt_records, round_costs
from specdistill.measurement.measured import (
    FinishedConfigurations,
    MeasuredConfiguration,
    draft_report,
    measurement_identity,
)
from specdistill.measurement.quality import add_quality
from specdistill.measurement.server_report import engine_report
from specdistill.measurement.servers import (
    Start,
    Task,
    check_draft,
    check_startable,
    connect_pair,
    measure_running,
    measure_started,
)
from specdistill.methods import METHODS
from specdistill.methods.load import describe_draft, load_proposer, locate
from specdistill.methods.recipe import Recipe
from specdistill.methods.target_record import check_target
from specdistill.recipe.sections import EvalConfig
from specdistill.report.files import digest, previous_report, write_report
from specdistill.report.text import print_power_analysis, print_report
from specdistill.statistics.records import PromptRecord
from specdistill.statistics.sample_size import PriorRun, power_analysis
from specdistill.suites.suite import Suite, cut_prompts, load_suite, tokenize
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.loading import read_tokenizer

SHORTHANDS = {"target": "target.model", "draft": "eval.draft", "suite": "eval.suite", "output_dir": "eval.output_dir"}


def main(recipe: Recipe) -> ExitCode:
    config = recipe.eval
    recipe.target.check_measured()
    folder = Path(config.output_dir or Path(recipe.train["output_dir"]) / "report")
    check_writable(folder, "eval.output_dir")
    rules, suite = load_gate(recipe.gate), load_suite(config.suite, recipe.target.model)
    baseline = read_baseline(config.baseline, rules, "eval.baseline")
    known, place = ((baseline.report, baseline.records), config.baseline) if baseline else (previous_report(folder), folder)
    prior = PriorRun(*known, str(place)) if known else None

    # Measure: in this process, or in an inference engine
    finished = folder / "configurations"
    if config.engine == "specdistill":
        report, records = measure_here(recipe, suite, prior, finished, is_decided=partial(is_decided, rules, baseline))
    else:
        report, records = measure_engine(recipe, suite, prior, folder / "engine")

    # Judge and write
    report["digest"] = digest(report, records)
    report = judge(rules, Evidence(report, records), baseline, first_release=config.baseline == FIRST_RELEASE)
    write_report(folder, report, records)
    if config.engine == "specdistill":
        shutil.rmtree(finished)
    print_report(report, folder)
    if report.get("incomplete"):
        print(f"error: {report['not_measured']['incomplete']}", file=sys.stderr)
        return ExitCode.RESOURCE_ERROR
    return ExitCode.DONE if report["gate"]["passed"] else ExitCode.CHECK_FAILED


def measure_here(
    recipe: Recipe,
    suite: Suite,
    prior: PriorRun | None,
    folder: Path,
    *,
    is_decided: Callable[[Evidence], bool],
) -> tuple[dict[str, Any], list[PromptRecord]]:
    """Decode in this process. folder: where finished configurations are kept, so that an interrupted run resumes.

    is_decided: whether evidence leaves no rule of the gate inconclusive; until then eval.max_minutes goes on.
    """
    config, start = recipe.eval, time.monotonic()
    target, proposer, draft = load_pair(recipe)
    plans = plan_all(config, suite, target)
    prompts = plans[0].prompts
    print_power_analysis(power_analysis(len(prompts), suite.name, prior))
    if any(plan.settings.batch_size > 1 for plan in plans):
        BatchDecoder(target, proposer)  # refuses what cannot be batched, before anything is measured

    report_of = partial(draft_report, target, proposer, suite, draft=describe_draft(draft, recipe.method))

    def is_enough(records: Sequence[PromptRecord]) -> bool:
        """Of the main configuration: its gate is decided, or its time is over."""
        used = {"seconds": time.monotonic() - start}
        known = [MeasuredConfiguration(list(records), None, used)]
        report = report_of(plans[:1], known, sampling_test="not tested yet", costs=(), took=used)
        return used["seconds"] > 60 * (config.max_minutes or 0) or is_decided(Evidence(report, records))

    # Measure each that an earlier run has not finished
    finished = FinishedConfigurations(folder, measurement_identity(target, proposer, suite, method=recipe.method, draft=draft))
    measured = []
    for number, plan in enumerate(plans, start=1):
        if (known := finished.read(plan)) is None:
            if len(plans) > 1:
                print(f"Configuration {number} of {len(plans)}", file=sys.stderr)
            now_measured = measure_configuration(target, proposer, suite, plan, is_enough, check_sampled=number == 1)
            known = finished.write(plan, now_measured)
        measured.append(known)

    # Of the main configuration also: is sampling lossless, and what do rounds of fewer draft tokens cost?
    with resources_used(target.device) as took:
        tested = sampling_test(target, proposer, prompts, plans[0].settings, num_draws=config.sampling_draws)
        costs = round_costs(target, proposer, prompts, plans[0].settings)

    # Report
    used = total_used([*(entry.took for entry in measured), took])
    report = report_of(plans, measured, sampling_test=tested, costs=costs, took=used)
    records = [record for entry in measured for record in entry.records]
    add_quality(report, records, suite, special_tokens=target.tokenizer.all_special_tokens, run_code=config.run_code)
    return report, records


def load_pair(recipe: Recipe) -> tuple[FrozenTarget, Proposer, str | None]:
    """The target, what drafts for it, and the folder or Hub id of the draft; None for a method without weights."""
    trained, own = METHODS[recipe.method].is_trained, Path(recipe.train["output_dir"]) / "draft"
    if trained and recipe.eval.draft is None and not own.is_dir():
        expected = "the run's draft, which training writes at its end, or another one"
        raise UserError("eval.draft", got=f"null, and {own} is no folder", expected=expected)
    draft = recipe.eval.draft or str(own) if trained else None
    target = FrozenTarget.load(**vars(recipe.target))
    fit_threads(target)
    return target, load_proposer(recipe.method, draft, target, **recipe.proposer_options()), draft


def plan_all(config: EvalConfig, suite: Suite, target: FrozenTarget) -> list[Plan]:
    """The configurations to measure, the one that the report is about first."""
    axes = suite.sweep.model_copy(update={name: values for name, values in vars(config.sweep).items() if values})
    room = {"max_new_tokens": config.max_new_tokens, "max_length": target.max_length}
    prompts = tokenize(suite, target.tokenizer, num_prompts=config.num_prompts, **room)
    further = []
    if config.max_minutes:
        further = [prompt for prompt in tokenize(suite, target.tokenizer, **room) if prompt not in prompts]
        if not further:
            expected = f"eval.num_prompts below the {len(prompts)} of {suite.name}, so that there are more to measure"
            raise UserError("eval.max_minutes", got=config.max_minutes, expected=expected)
    return plan_configurations(
        Plan(Settings.of(config), prompts, config.target_precision, further),
        num_speculative_tokens=axes.num_speculative_tokens,
        temperatures=axes.temperature,
        batch_sizes=axes.batch_size,
        trees=[tree_shape(**vars(tree)) for tree in axes.tree],
        contexts=cut_prompts(suite, target.tokenizer, axes.context, num_prompts=config.num_prompts, **room),
    )


def measure_configuration(
    target: FrozenTarget,
    proposer: Proposer,
    suite: Suite,
    plan: Plan,
    is_enough: Callable[[Sequence[PromptRecord]], bool],
    *,
    check_sampled: bool,
) -> MeasuredConfiguration:
    """Decode every prompt with and without the draft, and check that greedy decoding is lossless.

    is_enough: whether the records of a plan's prompts leave its further ones unmeasured.
    check_sampled: prompts of a sampled configuration are decoded greedily as well, for that check.
    """
    settings = plan.settings
    with resources_used(target.device) as took:
        runs = measure(target, proposer, suite.name, plan, is_enough)
        checked = check_sampled or settings.sampling.is_greedy
        lossless = greedy_check(target, proposer, runs, settings) if checked else None
        records = prompt_records(suite.name, settings.configuration, target, proposer, runs)
    return MeasuredConfiguration(records, lossless, took)


def measure_engine(
    recipe: Recipe, suite: Suite, prior: PriorRun | None, folder: Path
) -> tuple[dict[str, Any], list[PromptRecord]]:
    """Send the suite to an engine's servers, running ones or those that are started here. folder: for what these serve and print."""
    config, target, k = recipe.eval, recipe.target, recipe.eval.num_speculative_tokens
    if target.adapter:
        expected = f"null with eval.engine={config.engine}: name the merged model that it serves in target.model"
        raise UserError("target.adapter", got=target.adapter, expected=expected)
    files, draft = TargetFiles.of(target.model, target.revision), config.draft
    tokenizer, longest = read_tokenizer(target.model, revision=target.revision, trust_remote_code=target.trust_remote_code)

    # Running servers, which do not say which draft they loaded; those started here have it as it is exported for them
    if config.server:
        check_draft(draft, recipe.method, files)
        names, timeout = (target.model, files.name), config.server_timeout
        pair = connect_pair(config.engine, config.server, config.baseline_server, target=names, k=k, timeout=timeout)
        longest = min(longest, pair[0].identity.max_length or longest)
    else:
        check_startable(config.engine, recipe.method)
        draft = draft or str(Path(recipe.train["output_dir"]) / "draft")
        source = locate(draft)
        check_target(source, files, "eval.draft")

    # What they are asked
    task = Task.of(config, suite, tokenizer, longest)
    print_power_analysis(power_analysis(len(task.prompts), suite.name, prior))

    # Measure
    named: dict[str, dict[str, Any]] = {
        "target": {"model": target.model, "revision": target.revision},
        "draft": {"model": draft, "revision": None, "method": recipe.method},
    }
    if config.server:
        outcome, has_baseline = measure_running(task, *pair), pair[1] is not None
        machine: dict[str, Any] = {"device": "server", "name": config.server}
    else:
        shutil.rmtree(folder, ignore_errors=True)
        served = export(source, config.engine, folder / "draft", files, num_speculative_tokens=k)
        outcome, has_baseline = measure_started(task, Start.of(config, target, served, folder)), True
        found = hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        machine = {name: found[name] for name in ("device", "name", "count", "memory_bytes")}  # threads are the engine's own
        named["target"] |= {"dtype": target.dtype, "weights": files.identity.weights}
        named["draft"] = describe_draft(draft, served.method or recipe.method)

    report, records = engine_report(task, outcome, has_baseline=has_baseline, hardware=machine, **named)
    add_quality(report, records, suite, special_tokens=tokenizer.all_special_tokens, run_code=config.run_code)
    return report, records


if __name__ == "__main__":
    sys.exit(run(main, Recipe, shorthands=SHORTHANDS, without_recipe=["train.output_dir=runs/eval"]))
