"""How many prompts: what a run of n prompts can detect, stated before it runs, and when a run has measured enough of them.

Power analysis. A change is detected when the interval of metric / baseline's metric - 1 excludes 0. By the normal approximation, n
prompts detect a change of

    (z(1 - significance / 2) + z(power)) · spread / √n

with that power, two-sided, where `spread` is the standard deviation over prompts of their influence on the relative change. It is taken
from a prior run of the same suite, or else assumed.

Interim analyses: measuring more prompts until the intervals reach a target precision. A run that may stop at any of several analyses
has an interval that misses more often than its confidence says. So a run has at most NUM_INTERIM_ANALYSES, after numbers of prompts fixed
beforehand, and makes every interval at confidence 1 - (1 - c) / NUM_INTERIM_ANALYSES: by Bonferroni's inequality all of them together
miss with probability 1 - c at most, whatever made the run stop. Conservative, and about a third wider than without interim analyses;
`tests/statistics/test_sample_size.py` simulates the coverage.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from specdistill.statistics.intervals import estimates, standard_error
from specdistill.statistics.metrics import METRICS, Metric, PromptSums, measured, prompt_sums, value
from specdistill.statistics.records import PromptRecord, records_of

POWER, SIGNIFICANCE = 0.8, 0.05
# Of the acceptance length, without a prior run: with it 80 prompts detect a change of 5 %, the prompts and tolerance of vLLM's own
# acceptance test.
ASSUMED_SPREAD = 0.16
ANALYZED_METRICS = {"mean_acceptance_length": "acceptance length", "speedup": "speedup"}
NUM_INTERIM_ANALYSES = 5
FIRST_ANALYSIS = 24  # prompts; a bootstrap over fewer says little


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


def corrected_confidence(confidence: float) -> float:
    """The confidence of each interim analysis's interval, so that the run's has `confidence`."""
    return 1 - (1 - confidence) / NUM_INTERIM_ANALYSES


def interim_sizes(num_prompts: int, first: int = FIRST_ANALYSIS) -> list[int]:
    """Numbers of prompts at the interim analyses, growing from `first` by a constant factor up to all of them."""
    sizes = np.geomspace(min(first, num_prompts), num_prompts, NUM_INTERIM_ANALYSES)
    return [int(size) for size in np.unique(sizes.round())]


def spread_out(categories: Sequence[str], seed: int) -> list[int]:
    """A shuffled order of prompts of which every prefix is as even over the categories as possible."""
    shuffled: list[int] = np.random.default_rng(seed).permutation(len(categories)).tolist()
    places = {category: itertools.count() for category in categories}  # of a category's prompts among themselves
    return sorted(shuffled, key=lambda index: next(places[categories[index]]))


def half_width(numbers: Mapping[str, Any], name: str) -> float:
    """Half the width of a metric's interval, as a share of the metric, from `estimates` or a report's row; infinite without one."""
    low, high = numbers.get(f"{name}_ci95", (-math.inf, math.inf))
    return float((high - low) / 2 / numbers.get(name, 1.0))


def reached_precision(records: Sequence[PromptRecord], target_precision: float, seed: int) -> bool:
    """Whether acceptance length and speedup are known to ± `target_precision`, a share of them."""
    found = estimates([*ANALYZED_METRICS], prompt_sums(records), seed, corrected_confidence(0.95))
    return all(half_width(found, name) <= target_precision for name in ANALYZED_METRICS)
