"""Hold the results of a measurement, merge them over processes and adapters, and build reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from specdistill.common.project import read_git_revision
from specdistill.decoding.proposer import Proposer
from specdistill.evaluation.measurement.configurations import MeasurementPlan, Settings
from specdistill.evaluation.measurement.hardware import describe_hardware, list_software
from specdistill.evaluation.measurement.losslessness import Divergences, summarize_greedy
from specdistill.evaluation.report.build import (
    build_context_rows,
    build_report,
    build_result_rows,
    build_theory,
    select_headline,
)
from specdistill.evaluation.report.phrases import Report
from specdistill.evaluation.report.schema import (
    MeasurementDocument,
    SamplingTestDocument,
)
from specdistill.evaluation.statistics.records import PromptRecord
from specdistill.evaluation.statistics.theory import RoundCost
from specdistill.evaluation.suites.suite import Suite
from specdistill.targets.frozen import FrozenTarget


@dataclass(frozen=True)
class DraftResult:
    """The result of one draft in one configuration.

    Attributes:
        records: the record of each prompt.
        divergences: the divergence of each prompt from the greedy reference (see `check_greedy`);
            empty if greedy decoding was not checked.
    """

    records: list[PromptRecord]
    divergences: Divergences

    @property
    def num_tokens(self) -> int:
        """The number of tokens that one repetition generates with the draft."""
        return sum(record.speculative.num_tokens for record in self.records)


@dataclass(frozen=True)
class ConfigurationResult:
    """The result of one configuration.

    Attributes:
        drafts: the result of each draft, in the order of the drafts that were measured together.
        resources: the seconds and memory of the measurement (see `measure_resources`).
    """

    drafts: list[DraftResult]
    resources: MeasurementDocument


@dataclass(frozen=True)
class Measurement:
    """The result of measuring one draft: the main configuration first, then the swept ones.

    Attributes:
        settings: the settings of the main configuration.
        configurations: the result of each configuration.
        sampling_test: the test of sampling in the main configuration, or the reason why there is
            none.
        costs: what a round costs with each number of draft tokens from 1 to K, in the main
            configuration.
        resources: the seconds and memory of the whole measurement (see `measure_resources`). Only
            the first process of a launch has resources, a sampling test and costs.
        weights: the sha256 of the weights of all targets, if the draft was measured with several
            adapters; None for one target.
    """

    settings: Settings
    configurations: Sequence[DraftResult]
    sampling_test: SamplingTestDocument | str = ""
    costs: Sequence[RoundCost] = ()
    resources: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None

    @property
    def records(self) -> list[PromptRecord]:
        """The records of all configurations."""
        return list(chain.from_iterable(result.records for result in self.configurations))


def sum_resources(parts: Sequence[Mapping[str, Any]]) -> MeasurementDocument:
    """Return the total time of the parts of a measurement, and their highest memory peak."""
    return {
        "seconds": sum(part["seconds"] for part in parts),
        "peak_memory_bytes": max(part["peak_memory_bytes"] for part in parts),
    }


def merge_processes(
    plans: Sequence[MeasurementPlan], results_by_process: Sequence[Sequence[ConfigurationResult]]
) -> list[ConfigurationResult]:
    """Merge the results of processes that each measured a share of the prompts on their own device.

    The merged results show acceptance and losslessness over all prompts. Times of different devices
    must not be mixed, so speedups come from the first process alone: the times of plain decoding
    (baseline) are removed from the records of other processes, and a record without a baseline
    counts in no speedup. The seconds and memory are those of the first process, too.

    Args:
        plans: the plan of each configuration, with the prompts of all processes.
        results_by_process: the results of each process: [process][configuration].

    Returns:
        The merged result of each configuration.
    """
    if len(results_by_process) == 1:
        return list(results_by_process[0])
    merged = []
    # `results` has the results of one configuration, one for each process.
    for plan, *results in zip(plans, *results_by_process, strict=True):
        first = results[0]
        drafts = []
        for number in range(len(first.drafts)):
            drafts.append(_merge_shares(plan, [result.drafts[number] for result in results]))
        merged.append(ConfigurationResult(drafts, first.resources))
    return merged


def _merge_shares(plan: MeasurementPlan, shares: Sequence[DraftResult]) -> DraftResult:
    """Merge the results of one draft in one configuration over all processes.

    Args:
        plan: the plan of the configuration, whose order of prompts the merged records have.
        shares: the result of each process, which has measured a share of the prompts.
    """
    index_of_prompt = {prompt.id: index for index, prompt in enumerate(plan.prompts)}
    records = list(shares[0].records)
    divergences = list(shares[0].divergences)
    for share in shares[1:]:
        # Times of different devices must not be mixed, so speedups come from the first process
        # alone. A record without the time of plain decoding (`baseline`) counts in no speedup. So
        # remove this time from the records of the other processes, and also the time of
        # transformers' `generate()`.
        for record in share.records:
            records.append(replace(record, baseline=None, hf_generate=None))
        divergences += share.divergences

    # The processes measured the prompts in another order than the plan has.
    records.sort(key=lambda record: index_of_prompt[record.id])
    return DraftResult(records, divergences)


def merge_adapters(measurements: Sequence[Measurement], weights: str) -> Measurement:
    """Merge the measurements of one draft, which was measured with several adapters of a target.

    The records and divergences of all adapters are joined. Only the sampling test with the lowest
    p-value is kept, because that is the strongest evidence against losslessness. If an adapter has
    no test, the reason is kept instead. The costs of a round are those of the last adapter: an
    adapter is merged into the target's weights, so a round takes as long with each of them.

    Args:
        measurements: the measurement with each adapter, all in the same configurations.
        weights: the sha256 of the weights of all adapted targets.
    """
    # Join the results of each configuration over the adapters.
    configurations = []
    for results in zip(*(entry.configurations for entry in measurements), strict=True):
        records = []
        for result in results:
            records.extend(result.records)
        divergences = []
        for result in results:
            divergences.extend(result.divergences)
        configurations.append(DraftResult(records, divergences))

    # Keep the sampling test with the lowest p-value, and add up the resources.
    sampling_tests = [entry.sampling_test for entry in measurements]
    return Measurement(
        settings=measurements[0].settings,
        configurations=configurations,
        sampling_test=min(sampling_tests, key=_rank_sampling_test),
        costs=measurements[-1].costs,
        resources=sum_resources([entry.resources for entry in measurements]),
        weights=weights,
    )


def _rank_sampling_test(test: SamplingTestDocument | str) -> float:
    """Return the p-value of a sampling test, or minus infinity if there was no test.

    Several tests are merged by keeping the one that is ranked lowest. Minus infinity is below every
    p-value, so a missing test is never hidden by a test that passed.

    Args:
        test: the test, or a string that says why there is none.
    """
    return float("-inf") if isinstance(test, str) else float(test["p_value"])


def build_draft_report(
    target: FrozenTarget,
    proposer: Proposer,
    suite: Suite,
    measurement: Measurement,
    draft: Mapping[str, object],
) -> Report:
    """Build the report (report.json) of a draft that was measured in this process.

    The headline of the report is about the main configuration. Its rows of results are about all
    configurations.

    Args:
        target: the target model.
        proposer: the draft.
        suite: the suite that was measured.
        measurement: the measurement of the draft.
        draft: the description of the draft (see `describe_draft`).
    """
    settings = measurement.settings

    # Build the rows of each configuration from its records.
    rows_by_configuration = []
    for result in measurement.configurations:
        rows_by_configuration.append(
            build_result_rows(
                result.records, suite, result.records[0].configuration, seed=settings.seed
            )
        )
    main_rows = rows_by_configuration[0]
    main_records = measurement.configurations[0].records

    # Summarize losslessness over all configurations, with the sampling test or why there is none.
    lossless = summarize_greedy(
        list(chain.from_iterable(result.divergences for result in measurement.configurations))
    )
    not_measured = {}
    if isinstance(measurement.sampling_test, str):
        not_measured["lossless.sampling_test"] = measurement.sampling_test
    else:
        lossless["sampling_test"] = measurement.sampling_test

    # Put the sections together. The context rows and the headline are about the main configuration.
    return build_report(
        target=_describe_target(target, measurement.weights),
        draft={**draft, "parameters": proposer.num_parameters, "bytes": proposer.num_bytes},
        hardware=describe_hardware(target.device),
        software=list_software(),
        settings=_describe_settings(settings, proposer),
        suite=suite,
        results=list(chain.from_iterable(rows_by_configuration)),
        context=build_context_rows(main_records),
        headline=select_headline(main_rows, main_records),
        theory=build_theory(
            main_rows[0],
            measurement.costs,
            proposer.count_passes,
            depends_on_width=proposer.depends_on_width,
        ),
        lossless=lossless,
        not_measured=not_measured,
        measurement=dict(measurement.resources),
        git_revision=read_git_revision(),
    )


def _describe_target(target: FrozenTarget, weights: str | None) -> dict[str, object]:
    """Return the section `target` of report.json: the name, revision, dtype and weights.

    Args:
        target: the target model.
        weights: the sha256 of the weights of several targets, if the draft was measured with
            several adapters; None for the weights of `target` alone.
    """
    description = {"model": target.name, "revision": target.revision, "dtype": target.dtype}

    # A target that was not loaded from files has no recorded hash of its weights.
    if weights is None and target.files:
        weights = target.identity.weights
    if weights:
        description["weights"] = weights
    if target.quantization:
        description["quantization"] = target.quantization
    return {**description, "parameters": target.num_parameters}


def _describe_settings(settings: Settings, proposer: Proposer) -> dict[str, object]:
    """Return the section `settings` of report.json, about the measurement and its draft."""
    # Draft tokens are either drawn from the draft's distribution, or its most probable tokens.
    is_drawn = proposer.has_drawn_candidates(settings.sampling, settings.tree)
    return {
        **settings.described,
        "compile": settings.compile,
        "draft_sampling": "probabilistic" if is_drawn else "greedy",
        "drafting": dict(proposer.settings),
    }
