"""A recipe's draft measured here or in an inference engine: the report that no gate has judged yet, and its records."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from specdistill.errors import UserError
from specdistill.export import export
from specdistill.measurement.hardware import hardware
from specdistill.measurement.here import measure_here
from specdistill.measurement.quality import add_quality
from specdistill.measurement.server_report import engine_report
from specdistill.measurement.servers import (
    ServerTask,
    check_draft,
    check_startable,
    connect_pair,
    measure_running,
    measure_started,
)
from specdistill.methods.load import describe_draft, locate
from specdistill.methods.recipe import Recipe
from specdistill.methods.target_record import check_target
from specdistill.report.text import print_power_analysis
from specdistill.statistics.records import PromptRecord
from specdistill.statistics.sample_size import PriorRun, power_analysis
from specdistill.suites.suite import Suite, load_suite
from specdistill.targets.files import TargetFiles
from specdistill.targets.loading import read_tokenizer

FINISHED, ENGINE = "configurations", "engine"  # folders next to the report's files


def measure(
    recipe: Recipe,
    folder: Path,
    *,
    prior: PriorRun | None = None,
    is_decided: Callable[[dict[str, Any], Sequence[PromptRecord]], bool] = lambda report, records: True,
) -> tuple[dict[str, Any], list[PromptRecord]]:
    """The report and its records, measured as `eval.engine` says.

    folder: of the report. A measurement in this process keeps its finished configurations in FINISHED, so that an interrupted run resumes;
    one in an engine leaves in ENGINE what its servers load and print. prior: an earlier run, which says what this one can detect.
    is_decided: see `measure_here`.
    """
    suite = load_suite(recipe.eval.suite, recipe.target.model)
    if recipe.eval.engine == "specdistill":
        return measure_here(recipe, suite, prior, folder / FINISHED, is_decided=is_decided)
    return measure_in_engine(recipe, suite, prior, folder / ENGINE)


def measure_in_engine(
    recipe: Recipe, suite: Suite, prior: PriorRun | None, folder: Path
) -> tuple[dict[str, Any], list[PromptRecord]]:
    """The suite sent to an engine's servers: running ones, or those that are started here with the draft as it is exported for them."""
    config, target, draft = recipe.eval, recipe.target, recipe.eval.draft
    if target.adapter:
        expected = f"null with eval.engine={config.engine}: name the merged model that it serves in target.model"
        raise UserError("target.adapter", got=target.adapter, expected=expected)
    files = TargetFiles.of(target.model, target.revision)
    tokenizer, max_length = read_tokenizer(target.model, revision=target.revision, trust_remote_code=target.trust_remote_code)

    # What can be refused before anything is measured
    if config.server:
        check_draft(draft, recipe.method, files)
        speculative, baseline = connect_pair(config, (target.model, files.name))
        max_length = min(max_length, speculative.identity.max_length or max_length)
    else:
        check_startable(config.engine, recipe.method)
        draft = draft or str(Path(recipe.train["output_dir"]) / "draft")
        check_target(source := locate(draft), files, "eval.draft")
    task = ServerTask.of(config, suite, tokenizer, max_length)
    print_power_analysis(power_analysis(len(task.prompts), suite.name, prior))

    # Measure
    of_target: dict[str, Any] = {"model": target.model, "revision": target.revision}
    if config.server:
        measurement = measure_running(task, speculative, baseline)
        of_draft: dict[str, Any] = {"model": draft, "revision": None, "method": recipe.method}
        machine: dict[str, Any] = {"device": "server", "name": config.server}
    else:
        shutil.rmtree(folder, ignore_errors=True)
        k = config.num_speculative_tokens
        served = export(source, config.engine, folder / "draft", files, num_speculative_tokens=k)
        measurement = measure_started(task, config, target, served, folder)
        of_target |= {"dtype": target.dtype, "weights": files.identity.weights}
        of_draft = describe_draft(draft, served.method or recipe.method)
        found = hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        machine = {name: found[name] for name in ("device", "name", "count", "memory_bytes")}  # threads are the engine's own

    report, records = engine_report(task, measurement, target=of_target, draft=of_draft, hardware=machine)
    add_quality(report, records, suite, special_tokens=tokenizer.all_special_tokens, run_code=config.run_code)
    return report, records
