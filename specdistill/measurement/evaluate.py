"""The whole evaluation of a draft, or of several at once: measure, check losslessness, put everything into a report, not yet judged."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdistill import __version__
from specdistill.decoding.proposer import Proposer
from specdistill.measurement.environment import begin, hardware, measurement, software
from specdistill.measurement.losslessness import sampling_test, together
from specdistill.measurement.measure import (
    Settings,
    measure_together,
    progress,
    round_costs,
)
from specdistill.measurement.sweep import MeasuredConfiguration, Plan, finish, folder_fingerprint, measure_configurations
from specdistill.methods.recognize import locate
from specdistill.project import git_revision
from specdistill.report.build import build_report
from specdistill.report.results import context_rows, headline, result_rows, theory
from specdistill.statistics.interim import corrected_confidence
from specdistill.statistics.records import PromptRecord
from specdistill.suites.suite import Prompt, Suite
from specdistill.targets.frozen import FrozenTarget


@dataclass(frozen=True)
class NamedDraft:
    """A proposer, and what a report calls it: its method, and the folder or Hub id it came from with that id's commit."""

    proposer: Proposer
    method: str
    model: str | None
    revision: str | None = None


def evaluate_draft(
    target: FrozenTarget,
    proposer: Proposer,
    suite: Suite,
    plans: Sequence[Plan],
    *,
    method: str,
    draft: str | None,
    sampling_draws: int,
    folder: Path,
) -> tuple[dict[str, Any], list[PromptRecord]]:
    """The report of a draft, without a gate's decision, and the records that go beside it.

    plans: the configurations to measure, the one that the report is about first. method and draft name the proposer in the report;
    `sampling_draws` 0 leaves the sampling test out. `folder` keeps finished configurations for a run that goes on after this one was killed.
    """
    named = NamedDraft(proposer, method, draft)
    identity = {
        "specdistill": [__version__, git_revision()],
        "target": [target.fingerprint(), target.dtype, target.config._attn_implementation],
        "draft": [
            method,
            draft and folder_fingerprint(locate(draft, key="eval.draft")),
            dict(proposer.settings),
            proposer.vocabulary is None,
        ],
        "suite": [suite.name, suite.version, suite.sha256],
        "machine": [hardware(target.device), software()],
    }
    configurations = measure_configurations(target, proposer, suite, plans, identity=identity, folder=folder)
    begun = begin(target.device)
    report, found = _report(target, named, suite, plans, configurations, sampling_draws)
    took = [*(configuration.took for configuration in configurations), measurement(target.device, begun)]
    whole = {
        "seconds": sum(part["seconds"] for part in took),
        "peak_memory_bytes": max(part["peak_memory_bytes"] for part in took),
    }
    return {**report, "measurement": whole}, found


def evaluate_drafts(
    target: FrozenTarget,
    drafts: Sequence[NamedDraft],
    suite: Suite,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    sampling_draws: int,
) -> list[tuple[dict[str, Any], list[PromptRecord]]]:
    """Reports of several drafts for one target, measured together: their times are paired, over one shared baseline."""
    plan, begun = Plan(settings, prompts), begin(target.device)
    runs = measure_together(target, [named.proposer for named in drafts], prompts, settings)
    configurations = [finish(target, named.proposer, suite, plan, own, begun) for named, own in zip(drafts, runs, strict=True)]
    results = [
        _report(target, named, suite, [plan], [configuration], sampling_draws)
        for named, configuration in zip(drafts, configurations, strict=True)
    ]
    took = measurement(target.device, begun)
    return [({**report, "measurement": took}, found) for report, found in results]


def _report(
    target: FrozenTarget,
    named: NamedDraft,
    suite: Suite,
    plans: Sequence[Plan],
    configurations: Sequence[MeasuredConfiguration],
    sampling_draws: int,
) -> tuple[dict[str, Any], list[PromptRecord]]:
    """The report and the records of a draft whose configurations are measured; what else it needs is decoded here."""
    proposer, settings, prompts = named.proposer, plans[0].settings, plans[0].prompts
    sampling = settings.sampling
    confidence = corrected_confidence(0.95) if plans[0].target_precision else 0.95
    rows_of_configurations = [
        result_rows(configuration.records, suite, plan.settings.configuration, seed=settings.seed, confidence=confidence)
        for plan, configuration in zip(plans, configurations, strict=True)
    ]
    lossless = together([configuration.lossless for configuration in configurations if configuration.lossless])
    sampled = _sampling_test(target, proposer, prompts, settings, sampling_draws)
    report = build_report(
        target={"model": target.name, "revision": target.revision, "dtype": target.dtype, "parameters": target.num_parameters},
        draft={
            "model": named.model,
            "revision": named.revision,
            "method": named.method,
            "parameters": proposer.num_parameters,
            "bytes": proposer.num_bytes,
        },
        hardware=hardware(target.device),
        software=software(),
        settings={
            "num_speculative_tokens": settings.num_speculative_tokens,
            **vars(sampling),
            "max_new_tokens": settings.max_new_tokens,
            "tree": settings.tree.settings if settings.tree else None,
            "draft_sampling": "probabilistic" if proposer.draws(sampling, settings.tree) else "greedy",
            "drafting": dict(proposer.settings),
            "batch_size": settings.batch_size,
            "seed": settings.seed,
            "warmup": settings.warmup,
            "repeats": settings.repeats,
            "target_precision": plans[0].target_precision,
        },
        suite=suite,
        results=[row for rows in rows_of_configurations for row in rows],
        context=context_rows(configurations[0].records),
        headline=headline(rows_of_configurations[0], configurations[0].records, confidence=confidence),
        theory=theory(rows_of_configurations[0][0], round_costs(target, proposer, prompts, settings), proposer.passes),
        lossless=lossless if isinstance(sampled, str) else {**lossless, "sampling_test": sampled},
        not_measured={"lossless.sampling_test": sampled} if isinstance(sampled, str) else {},
        git_revision=git_revision(),
    )
    return report, [record for configuration in configurations for record in configuration.records]


def _sampling_test(
    target: FrozenTarget, proposer: Proposer, prompts: Sequence[Prompt], settings: Settings, num_draws: int
) -> dict[str, Any] | str:
    """The test's result, or the reason why there is none."""
    if not num_draws:
        return "eval.sampling_draws is 0"
    with progress("sampling test", 3 * num_draws) as advance:
        return sampling_test(
            target,
            proposer,
            prompts,
            num_draws=num_draws,
            num_speculative_tokens=settings.num_speculative_tokens,
            tree=settings.tree,
            seed=settings.seed,
            advance=advance,
        )
