"""What a run of n prompts can detect, stated before it runs.

A change is detected when the interval of metric / baseline's metric - 1 excludes 0. By the normal approximation, n
prompts detect a change of

    (z(1 - significance / 2) + z(power)) · spread / √n

with that power, two-sided, where `spread` is the standard deviation over prompts of their influence on the relative change. It is taken
from a prior run of the same suite, or else assumed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

from specdistill.statistics.intervals import standard_error
from specdistill.statistics.metrics import METRICS, Metric, PromptSums, measured, prompt_sums, value
from specdistill.statistics.records import PromptRecord, records_of

POWER, SIGNIFICANCE = 0.8, 0.05
# Of the acceptance length, without a prior run: with it 80 prompts detect a change of 5 %, the prompts and tolerance of vLLM's own
# acceptance test.
ASSUMED_SPREAD = 0.16
ANALYZED_METRICS = {"mean_acceptance_length": "acceptance length", "speedup": "speedup"}


@dataclass(frozen=True)
class PriorRun:
    """An earlier measurement; place: its folder, file or Hub id."""

    report: Mapping[str, Any]
    records: Sequence[PromptRecord]
    place: str


def minimum_detectable_change(spread: float, num_prompts: int) -> float:
    """The smallest relative change that a comparison over `num_prompts` detects with POWER."""
    z: float = stats.norm.ppf(1 - SIGNIFICANCE / 2) + stats.norm.ppf(POWER)
    return z * spread / math.sqrt(num_prompts)


def spread_of(metric: Metric, sums: PromptSums) -> float | None:
    """Standard deviation over prompts of their influence on the metric, as a share of it: √n times the relative standard error.

    None with fewer than two prompts or without a number.
    """
    point, error = value(metric, sums), standard_error(metric, sums)
    by_prompt = {name: column for name, column in sums.items() if name != "batch"}  # n counts prompts, in however many batches
    return None if point is None or error is None else error * math.sqrt(measured(metric, by_prompt)[0].size) / point


def power_analysis(num_prompts: int, suite: str, prior: PriorRun | None) -> str:
    """One sentence: the changes that `num_prompts` of a suite can detect.

    prior: its spread counts if it is of the same suite, √2 times for the two sides of a comparison; pairing the prompts can only make
    the changes smaller.
    """
    spreads, source = {"mean_acceptance_length": ASSUMED_SPREAD}, f"an assumed spread of {ASSUMED_SPREAD:.0%} a prompt"
    if prior is not None and prior.report["results"][0]["suite"] == suite:
        sums = prompt_sums(records_of(prior.report["results"][0], prior.records))
        known = {name: spread_of(METRICS[name], sums) for name in ANALYZED_METRICS}
        if measured_spreads := {name: math.sqrt(2) * spread for name, spread in known.items() if spread is not None}:
            spreads, source = measured_spreads, f"the spread of the prompts in {prior.place}, without what pairing gains"
    changes = [
        f"{minimum_detectable_change(spread, num_prompts):.1%} of the {ANALYZED_METRICS[name]}"
        for name, spread in spreads.items()
    ]
    return (
        f"{num_prompts} prompts can detect a change of {' and of '.join(changes)}: power {POWER:.0%}, two-sided {SIGNIFICANCE:.0%}, "
        f"by {source}."
    )
