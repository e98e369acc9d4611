"""From the measured configurations of a draft to its report, before a gate has judged it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdistill.decoding.proposer import Proposer
from specdistill.measurement.configurations import Plan
from specdistill.measurement.finished import MeasuredConfiguration
from specdistill.measurement.hardware import hardware, software
from specdistill.measurement.losslessness import together
from specdistill.project import git_revision
from specdistill.report.build import build_report
from specdistill.report.results import context_rows, headline, result_rows, theory
from specdistill.statistics.sample_size import corrected_confidence
from specdistill.statistics.theory import RoundCost
from specdistill.suites.suite import Suite
from specdistill.targets.frozen import FrozenTarget


@dataclass(frozen=True)
class NamedDraft:
    """A proposer, its method, and the folder or Hub id it was loaded from, with that id's commit."""

    proposer: Proposer
    method: str
    model: str | None
    revision: str | None = None


def draft_report(
    target: FrozenTarget,
    draft: NamedDraft,
    suite: Suite,
    plans: Sequence[Plan],
    measured: Sequence[MeasuredConfiguration],
    *,
    sampling_test: Mapping[str, Any] | str,
    costs: Sequence[RoundCost],
    took: Mapping[str, Any],
) -> dict[str, Any]:
    """The report of the first configuration, with rows for the others.

    sampling_test: its result, or the reason why there is none. costs: of rounds at every K' up to K. took: see `resources_used`.
    """
    proposer, settings, precision = draft.proposer, plans[0].settings, plans[0].target_precision
    confidence = corrected_confidence(0.95) if precision else 0.95
    rows = [
        result_rows(entry.records, suite, plan.settings.configuration, seed=settings.seed, confidence=confidence)
        for plan, entry in zip(plans, measured, strict=True)
    ]
    tested = not isinstance(sampling_test, str)
    report = build_report(
        target={"model": target.name, "revision": target.revision, "dtype": target.dtype, "parameters": target.num_parameters},
        draft={
            "model": draft.model,
            "revision": draft.revision,
            "method": draft.method,
            "parameters": proposer.num_parameters,
            "bytes": proposer.num_bytes,
        },
        hardware=hardware(target.device),
        software=software(),
        settings={
            "num_speculative_tokens": settings.num_speculative_tokens,
            **vars(settings.sampling),
            "max_new_tokens": settings.max_new_tokens,
            "tree": settings.tree.settings if settings.tree else None,
            "draft_sampling": "probabilistic" if proposer.draws(settings.sampling, settings.tree) else "greedy",
            "drafting": dict(proposer.settings),
            "batch_size": settings.batch_size,
            "seed": settings.seed,
            "warmup": settings.warmup,
            "repeats": settings.repeats,
            "target_precision": precision,
        },
        suite=suite,
        results=[row for of_configuration in rows for row in of_configuration],
        context=context_rows(measured[0].records),
        headline=headline(rows[0], measured[0].records, confidence=confidence),
        theory=theory(rows[0][0], costs, proposer.passes),
        lossless={
            **together([entry.lossless for entry in measured if entry.lossless]),
            **({"sampling_test": sampling_test} if tested else {}),
        },
        not_measured={} if tested else {"lossless.sampling_test": str(sampling_test)},
        git_revision=git_revision(),
    )
    return {**report, "measurement": dict(took)}
