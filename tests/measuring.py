"""Measurements of prompts without a cache."""

from collections.abc import Sequence

from specdistill.decoding.proposer import Proposer
from specdistill.evaluation.measurement.cache import MeasurementCache
from specdistill.evaluation.measurement.configurations import MeasurementPlan, Settings
from specdistill.evaluation.measurement.prompt_runs import PromptRuns
from specdistill.evaluation.measurement.runner import decode_prompts
from specdistill.evaluation.suites.suite import Prompt
from specdistill.targets.frozen import FrozenTarget


def measure(
    target: FrozenTarget, proposer: Proposer, prompts: Sequence[Prompt], settings: Settings
) -> list[PromptRuns]:
    """Return the runs of one draft."""
    (runs,) = measure_drafts(target, [proposer], prompts, settings)
    return runs


def measure_drafts(
    target: FrozenTarget,
    proposers: Sequence[Proposer],
    prompts: Sequence[Prompt],
    settings: Settings,
) -> list[list[PromptRuns]]:
    """Return the runs of drafts that are measured together."""
    plan = MeasurementPlan(settings, prompts)
    runs, _ = decode_prompts(target, proposers, plan, MeasurementCache(None))
    return runs
