"""What a run of n prompts can tell, said before it runs.

A change is found when the interval of metric / baseline's metric - 1 excludes 0. By the normal approximation, n prompts find a change
of

    (z(1 - significance / 2) + z(power)) · spread / √n

with that power, two-sided, where `spread` is the standard deviation over prompts of what each contributes to the relative change.
It is taken from an earlier measurement of the same suite, or else assumed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

from specdistill.statistics.intervals import standard_error
from specdistill.statistics.metrics import METRICS, Metric, measured, value
from specdistill.statistics.prompt_sums import PromptSums, prompt_sums
from specdistill.statistics.records import PromptRecord, records_of

POWER, SIGNIFICANCE = 0.8, 0.05
# Of the acceptance length, where nothing was measured yet: with it 80 prompts find a change of 5 %, which are the prompts and the band
# of vLLM's own acceptance test.
ASSUMED_SPREAD = 0.16
ANALYZED_METRICS = {"mean_acceptance_length": "acceptance length", "speedup": "speedup"}


@dataclass(frozen=True)
class PriorRun:
    """A measurement made before, and where it stands."""

    report: Mapping[str, Any]
    records: Sequence[PromptRecord]
    place: str


def minimum_detectable_change(
    spread: float, num_prompts: int, *, power: float = POWER, significance: float = SIGNIFICANCE
) -> float:
    """The smallest relative change that a comparison over so many prompts finds with this power."""
    z: float = stats.norm.ppf(1 - significance / 2) + stats.norm.ppf(power)
    return z * spread / math.sqrt(num_prompts)


def spread_of(metric: Metric, table: PromptSums) -> float | None:
    """Standard deviation over prompts of each one's influence on the metric, as a share of it: √n times the relative standard error.

    None where fewer than two prompts or no number was measured.
    """
    point, error = value(metric, table), standard_error(metric, table)
    alone = {name: column for name, column in table.items() if name != "batch"}  # n prompts, in however many batches
    return None if point is None or error is None else error * math.sqrt(measured(metric, alone)[0].size) / point


def power_analysis(num_prompts: int, suite: str, prior: PriorRun | None) -> str:
    """One sentence: the changes that so many prompts of a suite can tell.

    prior: a measurement of the same suite, if there is one. Its spread is taken twice over, for both sides of a comparison, so that
    pairing the prompts can only make the changes smaller.
    """
    found = {}
    if prior is not None and prior.report["results"][0]["suite"] == suite:
        table = prompt_sums(records_of(prior.report["results"][0], prior.records))
        spreads = {name: spread_of(METRICS[name], table) for name in ANALYZED_METRICS}
        found = {name: math.sqrt(2) * spread for name, spread in spreads.items() if spread is not None}
    changes = [
        f"{minimum_detectable_change(spread, num_prompts):.1%} of the {ANALYZED_METRICS[name]}"
        for name, spread in (found or {"mean_acceptance_length": ASSUMED_SPREAD}).items()
    ]
    source = f"an assumed spread of {ASSUMED_SPREAD:.0%} a prompt"
    if found and prior:
        source = f"the spread of the prompts in {prior.place}, without what pairing gains"
    return (
        f"{num_prompts} prompts can tell a change of {' and of '.join(changes)}: power {POWER:.0%}, two-sided {SIGNIFICANCE:.0%}, "
        f"by {source}."
    )
