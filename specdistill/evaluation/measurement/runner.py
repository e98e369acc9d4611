"""Measure drafts: decode every prompt with each draft and without one, interleaved.

`measure` is the only runner. An evaluation measures one draft in several configurations. A
comparison measures several drafts in one configuration. The device should be otherwise idle.

**Timing is paired.** A measurement has several arms: plain decoding, and decoding with each draft.
All arms decode a prompt one right after the other, and the arm that comes first rotates. Every
repetition goes through all prompts again, so a drift of the machine affects all arms alike. A
prompt's time is a sum over its rounds that is robust to stalls (see `compute_timing`). Prompts with
disturbed rounds are decoded again.

**Batches.** With a batch size above 1, prompts are decoded in batches, in the suite's order, and
all arms get the same batches. A prompt's time is then its share of the batch: an equal part of each
round that it took part in (see `Decoder.generate_all`). The shares add up to the time of the batch,
so totals and speedups are right. The share of a single prompt depends on the other prompts of its
batch, so confidence intervals of times resample batches.

**Past outputs.** Some proposers look tokens up in earlier outputs (`UsesPastOutputs`). They know
the plain outputs of all prompts before the current batch, in the same order in every repetition.
They never know the output of the current prompt or of another configuration. In the warm-up and the
tests they know no output.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from specdistill.common.errors import logger
from specdistill.common.processes import (
    all_gather_object,
    find_rank_and_world_size,
    init_process_group,
    is_first,
)
from specdistill.common.progress import show_progress
from specdistill.decoding.decoder import Decoder
from specdistill.decoding.proposer import Proposer
from specdistill.evaluation.measurement.cache import (
    CACHE_FOLDER,
    MeasurementCache,
    identify_draft,
)
from specdistill.evaluation.measurement.configurations import (
    MeasurementPlan,
    Settings,
    plan_measurement,
)
from specdistill.evaluation.measurement.hardware import freeze_garbage_collector, measure_resources
from specdistill.evaluation.measurement.in_engine import measure_in_engine
from specdistill.evaluation.measurement.loading import (
    LoadedDraft,
    check_processes,
    load_recipe_draft,
    split_adapters,
)
from specdistill.evaluation.measurement.losslessness import (
    Divergences,
    check_greedy,
    count_check_passes,
    generate_greedily,
    run_sampling_test,
)
from specdistill.evaluation.measurement.prompt_runs import (
    BatchGenerations,
    PromptBatch,
    PromptRuns,
    add_generations,
    build_prompt_records,
    create_prompt_runs,
    decode_batch,
    generate_with_transformers,
    is_disturbed,
    log_estimate,
    measure_round_costs,
    remember_outputs,
    sample_batches,
    split_into_batches,
    sum_seconds,
)
from specdistill.evaluation.measurement.quality import add_quality
from specdistill.evaluation.measurement.results import (
    ConfigurationResult,
    DraftResult,
    Measurement,
    build_draft_report,
    merge_adapters,
    merge_processes,
    sum_resources,
)
from specdistill.evaluation.report.phrases import Report
from specdistill.evaluation.report.text import print_power_analysis
from specdistill.evaluation.statistics.records import PromptRecord
from specdistill.evaluation.suites.suite import Suite, SuiteRow, load_suite
from specdistill.methods.load import describe_draft
from specdistill.methods.recipe import Recipe
from specdistill.targets.files import combine_hashes
from specdistill.targets.frozen import FrozenTarget

# The folder next to the report's files that holds what the servers of an engine load and print.
ENGINE_FOLDER = "engine"
# Prompts on which transformers' `generate()` is timed as well. With fewer, its confidence interval
# is wider than 5 %.
MAX_HF_PROMPTS = 32
# How often a prompt is decoded again because some of its rounds were disturbed. The limit keeps a
# measurement on a busy machine from going on for ever.
MAX_EXTRA_REPETITIONS = 3


def measure_recipe(recipe: Recipe, folder: Path) -> tuple[Report, list[PromptRecord]]:
    """Measure a recipe's draft: acceptance, speed, losslessness and quality of answers.

    The draft is measured in this process, or in the inference engine that `eval.engine` names.

    Args:
        recipe: the recipe.
        folder: the folder of the report. A measurement in this process caches its progress in the
            subfolder CACHE_FOLDER, so that an interrupted run resumes. A measurement in an engine
            keeps the exported draft and the logs of the servers in the subfolder ENGINE_FOLDER.

    Returns:
        The report, which no gate has judged yet, and its records.
    """
    # Load the prompts, and refuse several processes if they cannot share this measurement.
    suite = load_suite(recipe.eval.suite, recipe.target.model)
    _, num_processes = init_process_group()
    if num_processes > 1:
        check_processes(recipe)

    # Measure in an inference engine, if the recipe names one.
    if recipe.eval.engine != "specdistill":
        return measure_in_engine(recipe, suite, folder / ENGINE_FOLDER)

    # Otherwise measure in this process, with each adapter in turn if the target has several.
    cache_folder = folder / CACHE_FOLDER
    if isinstance(recipe.target.adapter, list):
        loaded, suite, measurement = _measure_adapters(
            recipe, recipe.target.adapter, suite, cache_folder
        )
    else:
        loaded = load_recipe_draft(recipe, suite)
        measurement = _measure_loaded(recipe, loaded, suite, cache_folder)

    # The first process builds the report, and sends it to all others, so that all return it.
    result = None
    if is_first():
        report = build_draft_report(
            loaded.target,
            loaded.proposer,
            suite,
            measurement,
            describe_draft(loaded.draft, recipe.method),
        )

        # Score the answers, if the suite has references or names a metric.
        add_quality(
            report,
            measurement.records,
            suite,
            special_tokens=loaded.target.tokenizer.all_special_tokens,
        )

        # Each process has a GPU of its own.
        if loaded.target.device.type == "cuda":
            report["hardware"]["count"] = num_processes
        result = report, measurement.records
    result_of_first: tuple[Report, list[PromptRecord]] = all_gather_object(result)[0]
    return result_of_first


def _measure_adapters(
    recipe: Recipe, adapters: Sequence[str], suite: Suite, cache_folder: Path
) -> tuple[LoadedDraft, Suite, Measurement]:
    """Measure one draft with each of a target's adapters in turn.

    Args:
        recipe: the recipe.
        adapters: the adapters of its target.
        suite: the suite, which is measured with every adapter.
        cache_folder: the folder of the cache.

    Returns:
        The target with the last adapter and its draft; the suite, in which each row occurs once for
        each adapter; and the measurements of all adapters, merged into one.
    """
    weights: list[str] = []
    rows: list[SuiteRow] = []
    measurements: list[Measurement] = []
    loaded = None
    for adapted in split_adapters(recipe, adapters, suite):
        number = len(measurements) + 1
        logger.info(f"Measuring with adapter {number} of {len(adapters)}: {adapters[number - 1]}")

        # Drop the reference to the last target before the next one is loaded, so that only one of
        # them is in memory at a time.
        loaded = None
        loaded = load_recipe_draft(adapted.recipe, adapted.suite, adapted.made_for)

        measurements.append(_measure_loaded(adapted.recipe, loaded, adapted.suite, cache_folder))
        weights.append(loaded.target.identity.weights)
        rows += adapted.suite.rows

    # The report is about all adapters, so name the target after its base model and all of them.
    assert loaded is not None
    loaded.target.name = f"{recipe.target.model} + {', '.join(adapters)}"
    return (
        loaded,
        replace(suite, rows=tuple(rows)),
        merge_adapters(measurements, combine_hashes(weights)),
    )


def _measure_loaded(
    recipe: Recipe, loaded: LoadedDraft, suite: Suite, cache_folder: Path
) -> Measurement:
    """Measure a draft in every configuration that its recipe asks for.

    Args:
        recipe: the recipe.
        loaded: the target and the draft, whose weights are in memory.
        suite: the suite that is measured.
        cache_folder: the folder of the cache.
    """
    target = loaded.target
    proposer = loaded.proposer
    plans = plan_measurement(
        recipe.eval,
        suite,
        target.tokenizer,
        max_length=target.max_length,
        vocab_size=target.vocab_size,
    )

    # Before anything is measured, print how small a change these prompts can detect. Prompts of one
    # cluster, such as the turns of a conversation, are not independent, so they count as a single
    # prompt. A prompt without a cluster is a cluster of its own.
    if is_first():
        print_power_analysis([prompt.cluster or prompt.id for prompt in plans[0].prompts])

    # Fail if prompts are to be decoded in batches, but target or draft cannot do that.
    if any(plan.settings.batch_size > 1 for plan in plans):
        Decoder(target, proposer).check_batches()

    # Measure. Results of an interrupted run with the same draft and machine are taken from the
    # cache.
    identity = identify_draft(target, proposer, suite, method=recipe.method, draft=loaded.draft)
    (measurement,) = measure(
        target,
        [proposer],
        suite,
        plans,
        MeasurementCache(cache_folder, [identity]),
        num_draws=recipe.eval.sampling_draws,
    )
    return measurement


def measure(
    target: FrozenTarget,
    proposers: Sequence[Proposer],
    suite: Suite,
    plans: Sequence[MeasurementPlan],
    cache: MeasurementCache,
    *,
    num_draws: int | None,
) -> list[Measurement]:
    """Measure drafts in every configuration, all against the same runs of plain decoding.

    If several processes were launched, each calls this function and measures its share of the
    prompts.

    Args:
        target: the target that verifies.
        proposers: the drafts.
        suite: the suite that is measured.
        plans: the settings and prompts of each configuration, the main one first.
        cache: the cache of results, which may hold those of an interrupted measurement.
        num_draws: how many draws the sampling test takes. None: as many as suit the length of the
            measurement (see `run_sampling_test`).

    Returns:
        The measurement of each draft. Only the first process has the sampling test, the costs of
        rounds and the resources.
    """
    # Each process measures its share of the prompts.
    rank, num_processes = find_rank_and_world_size()
    main_plan = plans[0]
    own_plans = [plan.process_share(rank, num_processes) for plan in plans]

    # Measure every configuration, unless an interrupted measurement has finished it.
    own_results = []
    for number, plan in enumerate(own_plans, start=1):
        is_main = number == 1
        fingerprint = cache.compute_fingerprint(plan)
        result = cache.load_result(fingerprint)
        if result is None:
            if len(plans) > 1:
                logger.info(f"Measuring configuration {number} of {len(plans)}")
            result = measure_configuration(
                target, proposers, suite, plan, cache, is_main=is_main, num_draws=num_draws
            )
            cache.save_result(fingerprint, result)
        own_results.append(result)

    # Merge the results of all processes into one measurement for each draft. What follows is done
    # by the first process alone.
    results = merge_processes(plans, all_gather_object(own_results))
    measurements = []
    for number in range(len(proposers)):
        draft_results = [result.drafts[number] for result in results]
        measurements.append(Measurement(main_plan.draft_settings(number), draft_results))
    if not is_first():
        return measurements

    # In the main configuration, test whether sampling is lossless, and time rounds with fewer draft
    # tokens.
    tests = []
    costs = []
    with measure_resources(target.device) as resources:
        for proposer, measurement in zip(proposers, measurements, strict=True):
            settings = measurement.settings
            tests.append(
                run_sampling_test(
                    target,
                    proposer,
                    main_plan.prompts,
                    settings,
                    num_draws=num_draws,
                    num_tokens=settings.repeats * measurement.configurations[0].num_tokens,
                )
            )
            costs.append(measure_round_costs(target, proposer, main_plan.prompts, settings))

    # Add the tests and the times of rounds to the measurement of each draft, and to all of them the
    # time and memory that everything took together.
    all_resources = sum_resources([*(result.resources for result in results), resources])
    return [
        replace(measurement, sampling_test=test, costs=round_costs, resources=all_resources)
        for measurement, test, round_costs in zip(measurements, tests, costs, strict=True)
    ]


def measure_configuration(
    target: FrozenTarget,
    proposers: Sequence[Proposer],
    suite: Suite,
    plan: MeasurementPlan,
    cache: MeasurementCache,
    *,
    is_main: bool,
    num_draws: int | None,
) -> ConfigurationResult:
    """Measure drafts in one configuration: decode all prompts, and check that decoding is lossless.

    Args:
        target: the target that verifies.
        proposers: the drafts.
        suite: the suite that is measured.
        plan: the settings of the configuration and its prompts.
        cache: the cache, which has the batches that were decoded before an interruption.
        is_main: whether this is the main configuration. Greedy decoding is checked in it even if
            its settings sample tokens: the prompts are then decoded greedily as well.
        num_draws: how many draws the sampling test takes. The test is run later, so the number is
            only needed to estimate the remaining time. None if it depends on the length of the
            measurement.
    """
    with measure_resources(target.device) as resources:
        # Count the passes of the target in the checks after the main configuration, because the
        # estimate of the remaining time includes them.
        num_check_passes = 0
        if is_main:
            for number in range(len(proposers)):
                settings = plan.draft_settings(number)
                num_check_passes += count_check_passes(plan.prompts, settings, num_draws)

        # Decode all prompts.
        runs, cached_seconds = decode_prompts(
            target, proposers, plan, cache, num_check_passes=num_check_passes
        )

        # Check greedy decoding, by a reference that all drafts share (`generate`), and build the
        # records of each draft.
        generate = generate_greedily(target, plan.settings)
        drafts = []
        for number, proposer in enumerate(proposers):
            settings = plan.draft_settings(number)
            divergences: Divergences = []
            if is_main or settings.sampling.is_greedy:
                divergences = check_greedy(target, proposer, runs[number], settings, generate)
            records = build_prompt_records(
                suite.name, settings.configuration, target, proposer, runs[number]
            )
            drafts.append(DraftResult(records, divergences))

    # Add the time that it took to decode the cached batches before the interruption.
    resources["seconds"] += cached_seconds
    return ConfigurationResult(drafts, resources)


class Arm(NamedTuple):
    """One arm of the paired measurement: plain decoding, or decoding with one of the drafts."""

    decoder: Decoder
    settings: Settings


def build_arms(
    target: FrozenTarget, proposers: Sequence[Proposer], plan: MeasurementPlan
) -> list[Arm]:
    """Build the arms of a measurement, the ways of decoding that are compared.

    The first arm is plain decoding, without a draft. Each further arm decodes with one draft.
    """
    arms = [Arm(Decoder(target, compiled=plan.settings.compile), plan.settings)]
    for number, proposer in enumerate(proposers):
        settings = plan.draft_settings(number)
        arms.append(Arm(Decoder(target, proposer, compiled=settings.compile), settings))
    return arms


def decode_prompts(
    target: FrozenTarget,
    proposers: Sequence[Proposer],
    plan: MeasurementPlan,
    cache: MeasurementCache,
    *,
    num_check_passes: int = 0,
) -> tuple[list[list[PromptRuns]], float]:
    """Decode every prompt `repeats` times, without a draft and with each of the drafts.

    All drafts are compared with the same repetitions of plain decoding. Even sampled tokens are the
    same in each repetition, because a prompt has the same seed in all of them.

    Args:
        target: the target that verifies.
        proposers: the drafts.
        plan: the settings of the configuration and its prompts.
        cache: the cache of decoded batches.
        num_check_passes: about how many passes of the target the later checks take, for the
            estimate of the remaining time.

    Returns:
        The repetitions of each draft and prompt, [draft][prompt]; and how many seconds it took
        before an interruption to decode the batches that were read from the cache.
    """
    # Build the arms and the batches. transformers' `generate()` decodes some batches as well:
    # enough to hold MAX_HF_PROMPTS prompts.
    settings = plan.settings
    arms = build_arms(target, proposers, plan)
    batches = split_into_batches(plan.prompts, settings.batch_size)
    hf_batches = sample_batches(batches, math.ceil(MAX_HF_PROMPTS / settings.batch_size))
    runs = create_prompt_runs(batches, settings, len(proposers))

    # Read the batches that were decoded before an interruption, and count the runs that remain. A
    # run is one prompt in one repetition, in all arms. So a cached batch has as many runs as any of
    # its arms has completions. Extra repetitions of disturbed batches come after the requested
    # ones, and do not count yet.
    fingerprint = cache.compute_fingerprint(plan)
    cached_batches = deque(cache.load_batches(fingerprint))
    cached_seconds = sum_seconds(cached_batches)
    requested_batches = islice(cached_batches, settings.repeats * len(batches))
    num_cached_runs = sum(len(cached_arms[0]) for cached_arms in requested_batches)
    num_runs = settings.repeats * len(plan.prompts) - num_cached_runs

    # Warm up, and estimate how long the measurement takes.
    generations = _warm_up(target, arms, batches, settings)
    is_estimated = bool(generations)
    if is_estimated:
        log_estimate(generations, num_runs, num_check_passes)

    # Disturbed rounds are found by comparing repetitions, so a single repetition shows none.
    max_extra_repetitions = MAX_EXTRA_REPETITIONS if settings.repeats > 1 else 0
    title = f"Measuring {len(plan.prompts)} prompts, {settings.repeats} times each"
    with show_progress(title, num_runs, "runs") as advance, freeze_garbage_collector():
        for repetition in range(settings.repeats + max_extra_repetitions):
            # After the requested repetitions, decode only the disturbed batches again. The progress
            # bar then has as many more runs.
            is_extra = repetition >= settings.repeats
            due_batches = batches
            if is_extra:
                due_batches = [
                    batch for batch in batches if is_disturbed(runs, batch, settings.repeats)
                ]
                advance(0, more=sum(len(batch.prompts) for batch in due_batches))

            for number, batch in enumerate(due_batches):
                # Take the batch from the cache if it was decoded before an interruption.
                if cached_batches:
                    add_generations(runs, batch, cached_batches.popleft())
                    continue

                # Let lookups know the plain outputs of all earlier prompts. The runs of all drafts
                # share these outputs, so the runs of the first draft are enough.
                remember_outputs(proposers, runs[0][: batch.start])

                # Decode the batch in every arm. The arm that comes first rotates. If there was no
                # warm-up, the first batch gives the estimate of the remaining time.
                first_arm = (repetition + number) % len(arms)
                generations = _decode_in_arms(arms, batch, first_arm)
                if not is_estimated and not is_extra:
                    is_estimated = True
                    log_estimate(generations, num_runs, num_check_passes)

                # Decode some of the batches with transformers' `generate()`, too.
                if batch in hf_batches:
                    generations.append(
                        generate_with_transformers(target, batch, generations[0], settings)
                    )
                cache.append_batch(fingerprint, generations)
                add_generations(runs, batch, generations)
                advance(len(batch.prompts))

    # Forget the outputs, because the checks must not look anything up in them.
    remember_outputs(proposers, [])
    return runs, cached_seconds


def _warm_up(
    target: FrozenTarget,
    arms: Sequence[Arm],
    batches: Sequence[PromptBatch],
    settings: Settings,
) -> BatchGenerations:
    """Decode some batches before anything is timed, because the first ones are slower.

    For example, kernels are compiled when they are used for the first time.

    Args:
        target: the target model.
        arms: the arms of the measurement.
        batches: all batches of the measurement.
        settings: the settings of plain decoding, which say how many batches are decoded.

    Returns:
        The completions of the last batch, [arm][prompt], from whose times the time of the whole
        measurement is estimated. Empty if there is no warm-up.
    """
    generations: BatchGenerations = []
    with freeze_garbage_collector():
        for batch in sample_batches(batches, settings.warmup):
            generations = _decode_in_arms(arms, batch, first_arm=0)
            # This warms up transformers' `generate()`, so its result is not used.
            generate_with_transformers(target, batch, generations[0], settings)
    return generations


def _decode_in_arms(arms: Sequence[Arm], batch: PromptBatch, first_arm: int) -> BatchGenerations:
    """Decode a batch in every arm: without a draft, and with each of the drafts.

    Args:
        arms: the arms: plain decoding, then one for each draft.
        batch: the prompts.
        first_arm: the index of the arm that is run first; the others follow in turn.

    Returns:
        The completions, [arm][prompt], in the order of `arms`.
    """
    generations: BatchGenerations = [[] for _ in arms]
    for index in [*range(first_arm, len(arms)), *range(first_arm)]:
        arm = arms[index]
        generations[index] = decode_batch(arm.decoder, batch, arm.settings)
    return generations
