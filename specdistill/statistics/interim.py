"""Interim analyses: measuring more prompts until the intervals reach a target precision.

A run that may stop at any of several analyses has an interval that misses more often than its confidence says. So a run has at most
NUM_INTERIM_ANALYSES, after numbers of prompts fixed beforehand, and makes every interval at confidence 1 - (1 - c) / NUM_INTERIM_ANALYSES:
by Bonferroni's inequality all of them together miss with probability 1 - c at most, whatever made the run stop. Conservative, and about
a third wider than without interim analyses; `tests/statistics/test_interim.py` simulates the coverage.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from specdistill.statistics.intervals import interval
from specdistill.statistics.metrics import METRICS, value
from specdistill.statistics.prompt_sums import prompt_sums
from specdistill.statistics.records import PromptRecord

NUM_INTERIM_ANALYSES = 5
FIRST_ANALYSIS = 24  # prompts; a bootstrap over fewer says little
PRECISION_METRICS = ("mean_acceptance_length", "speedup")


def corrected_confidence(confidence: float) -> float:
    """The confidence of each interim analysis's interval, so that the run's has `confidence`."""
    return 1 - (1 - confidence) / NUM_INTERIM_ANALYSES


def interim_sizes(num_prompts: int) -> list[int]:
    """Numbers of prompts at the interim analyses, growing by a constant factor up to all of them."""
    sizes = np.geomspace(min(FIRST_ANALYSIS, num_prompts), num_prompts, NUM_INTERIM_ANALYSES)
    return [int(size) for size in np.unique(sizes.round())]


def spread_out(categories: Sequence[str], seed: int) -> list[int]:
    """A shuffled order of prompts of which every prefix is as even over the categories as possible."""
    num_before: Counter[str] = Counter()
    ranked = []
    for index in np.random.default_rng(seed).permutation(len(categories)):
        ranked.append((num_before[categories[index]], int(index)))
        num_before[categories[index]] += 1
    return [index for _, index in sorted(ranked, key=lambda pair: pair[0])]


def half_width(name: str, records: Sequence[PromptRecord], seed: int) -> float | None:
    """Half the width of a metric's corrected 95 % interval, as a share of the metric; None without an interval."""
    sums = prompt_sums(records)
    point = value(METRICS[name], sums)
    bounds = interval(METRICS[name], sums, confidence=corrected_confidence(0.95), seed=seed)
    return None if point is None or bounds is None else (bounds[1] - bounds[0]) / 2 / point


def reached_precision(records: Sequence[PromptRecord], target_precision: float, seed: int) -> bool:
    """Whether acceptance length and speedup are known to ± `target_precision`, a share of them."""
    widths = [half_width(name, records, seed) for name in PRECISION_METRICS]
    return all(width is not None and width <= target_precision for width in widths)
