"""Measure a draft by real speculative decoding and judge it: report.json, samples.jsonl, report.md, report.html and junit.xml.

python eval/run.py recipe=pico/eagle3
python eval/run.py recipe=pico/eagle3 eval.engine=vllm 'eval.sweep.concurrency=[4,16]'
python eval/run.py recipe=pico/eagle3 eval.engine=vllm eval.server=http://127.0.0.1:8000 eval.baseline_server=http://127.0.0.1:8001
python eval/run.py target=pico draft=runs/demo/draft method=eagle3 suite=pico output_dir=runs/report
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specdistill.command import check_writable, run
from specdistill.errors import ExitCode, UserError
from specdistill.export import export
from specdistill.gate.decide import FIRST_RELEASE, Evidence, is_decided, judge, read_baseline
from specdistill.gate.rules import load_gate
from specdistill.measurement.hardware import hardware
from specdistill.measurement.here import measure_here
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
from specdistill.methods.load import describe_draft, locate
from specdistill.methods.recipe import Recipe
from specdistill.methods.target_record import check_target
from specdistill.report.files import digest, previous_report, write_report
from specdistill.report.text import print_power_analysis, print_report
from specdistill.statistics.records import PromptRecord
from specdistill.statistics.sample_size import PriorRun, power_analysis
from specdistill.suites.suite import Suite, load_suite
from specdistill.targets.files import TargetFiles
from specdistill.targets.loading import read_tokenizer

SHORTHANDS = {"target": "target.model", "draft": "eval.draft", "suite": "eval.suite", "output_dir": "eval.output_dir"}


def main(recipe: Recipe) -> ExitCode:
    config = recipe.eval
    folder = Path(config.output_dir or Path(recipe.train["output_dir"]) / "report")
    check_writable(folder, "eval.output_dir")
    rules, suite = load_gate(recipe.gate), load_suite(config.suite, recipe.target.model)
    baseline = read_baseline(config.baseline, rules, "eval.baseline")
    known, place = ((baseline.report, baseline.records), config.baseline) if baseline else (previous_report(folder), folder)
    prior = PriorRun(*known, str(place)) if known else None

    # Measure: in this process, or in an inference engine
    finished = folder / "configurations"
    if config.engine == "specdistill":

        def decided(report: dict[str, Any], records: Sequence[PromptRecord]) -> bool:
            return is_decided(rules, baseline, Evidence(report, records))

        report, records = measure_here(recipe, suite, prior, finished, is_decided=decided)
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


def measure_engine(
    recipe: Recipe, suite: Suite, prior: PriorRun | None, folder: Path
) -> tuple[dict[str, Any], list[PromptRecord]]:
    """Send the suite to an engine's servers, running ones or those that are started here. folder: for what these serve and print."""
    config, target, k = recipe.eval, recipe.target, recipe.eval.num_speculative_tokens
    if target.adapter:
        expected = f"null with eval.engine={config.engine}: name the merged model that it serves in target.model"
        raise UserError("target.adapter", got=target.adapter, expected=expected)
    files, draft = TargetFiles.of(target.model, target.revision), config.draft
    tokenizer, _, longest = read_tokenizer(target.model, revision=target.revision, trust_remote_code=target.trust_remote_code)

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
