"""The whole evaluation of a draft, or of several at once: measure, check losslessness, put everything into a report, not yet judged."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdistill.decoding.proposers import Proposer
from specdistill.evaluation.environment import begin, hardware, measurement, software
from specdistill.evaluation.losslessness import compare_greedy, sampling_test
from specdistill.evaluation.measure import (
    Runs,
    Settings,
    draft_sampling,
    draft_settings,
    greedy_pairs,
    measure_together,
    progress,
    records,
    shorter_drafts,
)
from specdistill.evaluation.records import PromptRecord
from specdistill.evaluation.report.build import build_report
from specdistill.evaluation.results import context_rows, headline, result_rows, theory
from specdistill.evaluation.suites import Prompt, Suite
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.run_directory import git_revision


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
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    method: str,
    draft: str | None,
    sampling_draws: int,
) -> tuple[dict[str, Any], list[PromptRecord]]:
    """The report of a draft, without a gate's decision, and the records that go beside it.

    method and draft name the proposer in the report; `sampling_draws` 0 leaves the sampling test out.
    """
    named = NamedDraft(proposer, method, draft)
    (result,) = evaluate_drafts(target, [named], suite, prompts, settings, sampling_draws=sampling_draws)
    return result


def evaluate_drafts(
    target: FrozenTarget,
    drafts: Sequence[NamedDraft],
    suite: Suite,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    sampling_draws: int,
) -> list[tuple[dict[str, Any], list[PromptRecord]]]:
    """`evaluate_draft` of several drafts for one target, measured together: their times are paired, over one shared baseline."""
    begun = begin(target.device)
    together = measure_together(target, [named.proposer for named in drafts], prompts, settings)
    results = [
        _evaluate(target, named, suite, prompts, settings, runs, sampling_draws)
        for named, runs in zip(drafts, together, strict=True)
    ]
    took = measurement(target.device, begun)
    return [({**report, "measurement": took}, found) for report, found in results]


def _evaluate(
    target: FrozenTarget,
    named: NamedDraft,
    suite: Suite,
    prompts: Sequence[Prompt],
    settings: Settings,
    runs: Sequence[Runs],
    sampling_draws: int,
) -> tuple[dict[str, Any], list[PromptRecord]]:
    """The report and the records of a draft whose runs are there; what else it needs is decoded here."""
    proposer, sampling, k = named.proposer, settings.sampling, settings.num_speculative_tokens
    measured = records(suite.name, target, proposer, runs)
    rows = result_rows(measured, suite, temperature=sampling.temperature, k=k, seed=settings.seed)
    lossless = compare_greedy(target, greedy_pairs(target, proposer, runs, settings))
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
            "num_speculative_tokens": k,
            **vars(sampling),
            "max_new_tokens": settings.max_new_tokens,
            "tree": None,
            "draft_sampling": draft_sampling(proposer, sampling),
            **draft_settings(proposer),
            "batch_size": 1,
            "seed": settings.seed,
            "warmup": settings.warmup,
            "repeats": settings.repeats,
        },
        suite=suite,
        results=rows,
        context=context_rows(measured),
        headline=headline(rows),
        theory=theory(rows[0], shorter_drafts(target, proposer, prompts, settings)),
        lossless=lossless if isinstance(sampled, str) else {**lossless, "sampling_test": sampled},
        not_measured={"lossless.sampling_test": sampled} if isinstance(sampled, str) else {},
        git_revision=git_revision(),
    )
    return report, measured


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
            seed=settings.seed,
            advance=advance,
        )
