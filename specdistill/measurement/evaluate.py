"""A recipe's draft measured, by `measure`: in an inference engine, or in this process, where every configuration of its sweep is decoded,
each prompt with the draft and without.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specdistill.decoding.decoder import Decoder
from specdistill.decoding.proposer import Proposer
from specdistill.decoding.sampling import GREEDY
from specdistill.errors import UserError, logger
from specdistill.measurement.configurations import MeasurementPlan, Settings, plan_configurations
from specdistill.measurement.hardware import fit_threads, resources_used
from specdistill.measurement.in_engine import measure_in_engine
from specdistill.measurement.losslessness import greedy_check, sampling_test
from specdistill.measurement.measure import (
    Journal,
    calibrate,
    measure_together,
    prompt_records,
    round_costs,
)
from specdistill.measurement.measured import (
    FinishedConfigurations,
    MeasuredConfiguration,
    Measurement,
    draft_report,
    measurement_identity,
)
from specdistill.measurement.quality import add_quality
from specdistill.methods import METHODS
from specdistill.methods.load import describe_draft, load_proposer, locate
from specdistill.methods.recipe import Recipe, TrainedRecipe
from specdistill.methods.target_record import recorded_target, use_recorded_template
from specdistill.processes import is_first, join, of_all, share
from specdistill.recipe.sections import EvalConfig
from specdistill.report.text import print_power_analysis
from specdistill.statistics.records import ALL, PromptRecord
from specdistill.suites.conversations import use_template
from specdistill.suites.suite import (
    Suite,
    SuiteRow,
    cut_prompts,
    load_suite,
    num_measured,
    tokenize,
)
from specdistill.targets.files import TargetFiles, combined
from specdistill.targets.frozen import FrozenTarget

FINISHED, ENGINE = "configurations", "engine"  # folders next to the report's files
Pair = tuple[
    FrozenTarget, Proposer, str | None
]  # a target, what drafts for it, and where the draft is


def measure(recipe: Recipe, folder: Path) -> tuple[dict[str, Any], list[PromptRecord]]:
    """The report and its records, measured as `eval.engine` says.

    folder: of the report. A measurement in this process keeps its finished configurations in FINISHED, so that an interrupted run resumes;
    one in an engine leaves in ENGINE what its servers load and print.
    """
    config, suite = recipe.eval, load_suite(recipe.eval.suite, recipe.target.model)
    _, num_processes = join()
    if num_processes > 1:
        check_shares(recipe)
    if config.engine != "specdistill":
        return measure_in_engine(recipe, suite, folder / ENGINE)
    if isinstance(recipe.target.adapter, list):
        pair, suite, found = across_adapters(recipe, recipe.target.adapter, suite, folder)
    else:
        pair = load_pair(recipe)
        found = measure_pair(recipe, pair, suite, folder)
    target, proposer, draft = pair
    made = None
    if is_first():
        made = (
            draft_report(target, proposer, suite, found, describe_draft(draft, recipe.method)),
            found.records,
        )
        add_quality(
            *made,
            suite,
            special_tokens=target.tokenizer.all_special_tokens,
            run_code=config.run_code,
        )
        if target.device.type == "cuda":
            made[0]["hardware"]["count"] = num_processes
    of_first, *_ = of_all(made)
    return of_first


def measure_pair(recipe: Recipe, pair: Pair, suite: Suite, folder: Path) -> Measurement:
    """What a recipe asks to be measured of a target and what drafts for it."""
    config, (target, proposer, draft), (rank, num_processes) = recipe.eval, pair, share()
    plans = plan_all(config, suite, target)
    if is_first():
        print_power_analysis([it.cluster or it.id for it in plans[0].prompts])
    if any(plan.settings.batch_size > 1 for plan in plans):
        Decoder(target, proposer).check_batches()  # before anything is measured

    identity = measurement_identity(target, proposer, suite, method=recipe.method, draft=draft)
    finished = FinishedConfigurations(folder / FINISHED, identity)
    own = [share_of(plan, rank, num_processes) for plan in plans]
    measured = together(plans, of_all(measure_each(target, proposer, suite, own, finished)))
    prompts, settings = plans[0].prompts, plans[0].settings
    if not is_first():
        return Measurement(settings, measured)

    # Of the main configuration also: is sampling lossless, and what do rounds of fewer draft tokens cost?
    with resources_used(target.device) as took:
        calibrate(target, proposer, prompts, settings)
        tested = sampling_test(target, proposer, prompts, settings, num_draws=config.sampling_draws)
        costs = round_costs(target, proposer, prompts, settings)
    return Measurement(
        settings, measured, tested, costs, summed([*(entry.took for entry in measured), took])
    )


def summed(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "seconds": sum(part["seconds"] for part in parts),
        "peak_memory_bytes": max(part["peak_memory_bytes"] for part in parts),
    }


def across_adapters(
    recipe: Recipe, adapters: Sequence[str], suite: Suite, folder: Path
) -> tuple[Pair, Suite, Measurement]:
    """One draft measured with each of a target's adapters in turn: the last pair, the suite with its rows for each adapter, and what was
    measured. An adapter's name, or its path if names repeat, is the rows' category, and in front of their ids.

    The draft was made for the base, or for one of the adapters. Greedy completions are compared with those of each adapted target; of the
    tests of sampling that with the lowest p-value is kept, and of the costs of rounds the last adapter's.
    """
    if repeated := next((name for name in adapters if adapters.count(name) > 1), None):
        raise UserError("target.adapter", got=f"{repeated} twice", expected="different adapters")
    names = [Path(adapter).name for adapter in adapters]
    names = names if len({ALL, *names}) > len(names) else [*adapters]
    base, draft = recipe.target, draft_of(recipe)
    files = [TargetFiles(base.model, base.revision, adapter) for adapter in (None, *adapters)]
    recorded = recorded_target(locate(draft), "eval.draft") if draft else None
    made_for = next(
        (each for each in files if recorded and recorded.is_same(each.identity)), files[0]
    )

    pair: Pair | None = None
    rows: list[SuiteRow] = []
    found: list[Measurement] = []
    for name, adapter in zip(names, adapters, strict=True):
        logger.info(f"Adapter {len(found) + 1} of {len(adapters)}: {adapter}")
        own = replace(suite, rows=tuple(_of_adapter(row, name) for row in suite.rows))
        adapted = recipe.model_copy(update={"target": base.model_copy(update={"adapter": adapter})})
        pair = None  # one target is in memory at a time
        pair = load_pair(adapted, made_for)
        found.append(measure_pair(adapted, pair, own, folder))
        rows += own.rows
    assert pair is not None
    pair[0].name = f"{base.model} + {', '.join(adapters)}"
    measured = [
        MeasuredConfiguration(
            [it for one in each for it in one.records],
            [it for one in each for it in one.compared],
            {},
        )
        for each in zip(*(one.measured for one in found), strict=True)
    ]
    whole = Measurement(
        found[0].settings,
        measured,
        min(
            (one.tested for one in found),
            key=lambda test: float("-inf" if isinstance(test, str) else test["p_value"]),
        ),
        found[-1].costs,
        summed([one.took for one in found]),
        combined(each.identity.weights for each in files[1:]),
    )
    return pair, replace(suite, rows=tuple(rows)), whole


def _of_adapter(row: SuiteRow, name: str) -> SuiteRow:
    return replace(row, id=f"{name}/{row.id}", category=name, cluster=row.cluster or row.id)


def check_shares(recipe: Recipe) -> None:
    """Raises UserError for a measurement that processes cannot share: in an engine, by a target that is shared itself or has several
    adapters, or with a draft that looks earlier outputs up, of which each process has its own alone.
    """
    config, lookup = recipe.eval, recipe.eval.lookup_first
    refused = {
        "eval.engine": config.engine if config.engine != "specdistill" else None,
        "target.shard": recipe.target.shard if recipe.target.shard != "none" else None,
        "target.adapter": recipe.target.adapter
        if isinstance(recipe.target.adapter, list)
        else None,
        "method": recipe.method if recipe.method == "suffix" else None,
        "eval.lookup_first.method": lookup.method if lookup and lookup.method == "suffix" else None,
    }
    for key, given in refused.items():
        if given is not None:
            raise UserError(
                key, got=f"{given} in several processes", expected="another value, or no launch=…"
            )


def share_of(plan: MeasurementPlan, rank: int, num_processes: int) -> MeasurementPlan:
    """What one of several processes measures of a plan: as many prompts of each category as the others, with seeds of its own.

    Raises UserError where they are fewer than a batch.
    """
    if num_processes == 1:
        return plan
    count, batch = len(plan.prompts), plan.settings.batch_size
    if count // num_processes < batch:
        got = f"{num_processes} for {count} prompts, {batch} at a time"
        raise UserError("num_processes", got=got, expected="fewer: each has at least a batch")
    dealt = sorted(plan.prompts, key=lambda prompt: prompt.category)
    settings = replace(plan.settings, seed=plan.settings.seed + rank * count)
    return replace(plan, prompts=dealt[rank::num_processes], settings=settings)


def together(
    plans: Sequence[MeasurementPlan], shares: Sequence[Sequence[MeasuredConfiguration]]
) -> list[MeasuredConfiguration]:
    """The configurations of which each process measured a share, on a device of its own.

    Acceptance and losslessness are of all prompts. Speedups are of the first device alone: the others' records get no baseline.
    """
    first, *others = shares
    if not others:
        return [*first]
    merged = []
    for plan, own, *rest in zip(plans, first, *others, strict=True):
        place = {prompt.id: index for index, prompt in enumerate(plan.prompts)}
        records = [
            replace(record, baseline=None, hf_generate=None)
            for entry in rest
            for record in entry.records
        ]
        records = sorted([*own.records, *records], key=lambda record: place[record.id])
        merged.append(
            MeasuredConfiguration(
                records, [one for entry in (own, *rest) for one in entry.compared], own.took
            )
        )
    return merged


def measure_each(
    target: FrozenTarget,
    proposer: Proposer,
    suite: Suite,
    plans: Sequence[MeasurementPlan],
    finished: FinishedConfigurations,
) -> list[MeasuredConfiguration]:
    """Every prompt of each configuration with and without the draft, and whether greedy decoding is lossless; for that, prompts of a main
    configuration that samples are decoded greedily as well.
    """

    def measured(number: int, plan: MeasurementPlan, journal: Journal) -> MeasuredConfiguration:
        if len(plans) > 1:
            logger.info(f"Configuration {number} of {len(plans)}")
        settings = plan.settings
        with resources_used(target.device) as took:
            calibrate(target, proposer, plan.prompts, settings)
            (runs,) = measure_together(target, [proposer], plan.prompts, settings, journal=journal)
            checked = number == 1 or settings.sampling.is_greedy
            compared = greedy_check(target, proposer, runs, settings) if checked else []
            records = prompt_records(suite.name, settings.configuration, target, proposer, runs)
        return MeasuredConfiguration(records, compared, took)

    return [
        finished.measured(plan, partial(measured, number, plan))
        for number, plan in enumerate(plans, start=1)
    ]


def draft_of(recipe: Recipe) -> str | None:
    """The folder or Hub id of the draft; None for a method without weights."""
    trained, own = METHODS[recipe.method].is_trained, Path(recipe.train["output_dir"]) / "draft"
    if trained and recipe.eval.draft is None and not own.is_dir():
        text = f"eval.draft: no trained draft in {own}. Run specdistill train with this recipe first, or pass draft=PATH"
        raise UserError("eval.draft", got="null", text=text)
    return recipe.eval.draft or str(own) if trained else None


def load_pair(recipe: Recipe, made_for: TargetFiles | None = None) -> Pair:
    """The target, what drafts for it, and the folder or Hub id of the draft. made_for: the draft's target, if it is another."""
    draft = draft_of(recipe)
    target = FrozenTarget.load(**vars(recipe.target))
    use_recorded_template([locate(draft)] if draft else [], target.tokenizer, "eval.draft")
    use_template(target.tokenizer, recipe)
    fit_threads(target)
    shape: dict[str, Any] = {
        name: getattr(recipe.eval, name) for name in ("lookup_first", "draft_length", "compile")
    }
    proposer = load_proposer(
        recipe.method, draft, target, made_for=made_for, **shape, **recipe.proposer_options()
    )
    return target, proposer, draft


def plan_all(config: EvalConfig, suite: Suite, target: FrozenTarget) -> list[MeasurementPlan]:
    """The configurations to measure, the one that the report is about first."""
    axes = suite.sweep.model_copy(
        update={name: values for name, values in vars(config.sweep).items() if values}
    )
    room = {"max_new_tokens": config.max_new_tokens, "max_length": target.max_length}
    num_prompts = num_measured(suite, config.num_prompts)
    prompts = tokenize(
        suite, target.tokenizer, vocab_size=target.vocab_size, num_prompts=num_prompts, **room
    )
    return plan_configurations(
        MeasurementPlan(Settings.of(config), prompts),
        axes,
        cut_prompts(suite, target.tokenizer, axes.context, num_prompts=num_prompts, **room),
    )


def decoded_acceptance_length(
    recipe: TrainedRecipe, target: FrozenTarget
) -> Callable[[Path], float] | None:
    """What chooses the best of a training's checkpoints: (draft folder) -> tokens a target pass, decoding greedily as `eval:` says on the
    prompts of `selection:`; None: not asked for.

    Raises UserError for a suite that cannot be decoded with the target.
    """
    if recipe.selection is None:
        return None
    limit = recipe.selection.max_new_tokens
    suite = load_suite(recipe.selection.suite, recipe.target.model)
    room = {
        "max_new_tokens": limit,
        "max_length": target.max_length,
        "vocab_size": target.vocab_size,
    }
    prompts = tokenize(suite, target.tokenizer, num_prompts=recipe.selection.num_prompts, **room)
    settings = replace(Settings.of(recipe.eval), max_new_tokens=limit, sampling=GREEDY)

    def measure(folder: Path) -> float:
        proposer = load_proposer(recipe.method, str(folder), target, **recipe.proposer_options())
        decoder = Decoder(target, proposer)
        with torch.compiler.set_stance("force_eager"):  # of a target that is compiled for training
            runs = [decoder.generate(prompt.token_ids, **settings.decoding) for prompt in prompts]
        accepted = [round.num_accepted for run in runs for round in run.rounds if round.drafted]
        if not accepted:
            raise UserError(
                "selection.suite",
                got=f"{suite.name}, whose completions end at once",
                expected="longer completions",
            )
        return 1 + sum(accepted) / len(accepted)

    return measure
