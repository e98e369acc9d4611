"""Measuring until the answer is sharp enough: more prompts at each look, until the intervals are as narrow as was asked.

Who looks several times and stops at will has an interval that is wrong more often than it says. So a run has at most NUM_INTERIM_ANALYSES looks, at
numbers of prompts fixed beforehand, and every interval of it is made at confidence 1 - (1 - c) / NUM_INTERIM_ANALYSES: by Bonferroni's inequality
all of its looks together miss with probability 1 - c at most, so the one at which it stops does too, whatever made it stop.
Conservative, and about a third wider than a single look's; `tests/evaluation/test_stopping.py` simulates the coverage.
"""

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
    """The confidence at which a look's interval is made, so that the run's has `confidence`."""
    return 1 - (1 - confidence) / NUM_INTERIM_ANALYSES


def interim_sizes(num_prompts: int) -> list[int]:
    """Numbers of prompts after which a run looks, growing by a constant factor up to all of them."""
    sizes = np.geomspace(min(FIRST_ANALYSIS, num_prompts), num_prompts, NUM_INTERIM_ANALYSES)
    return [int(size) for size in np.unique(sizes.round())]


def spread_out(categories: Sequence[str], seed: int) -> list[int]:
    """The order in which prompts are measured: shuffled, and any beginning of it as even over the categories as can be."""
    shuffled = np.random.default_rng(seed).permutation(len(categories))
    seen: dict[str, int] = {}
    turns = []
    for index in shuffled:
        turn = seen[categories[index]] = seen.get(categories[index], 0) + 1
        turns.append((turn, int(index)))
    return [index for _, index in sorted(turns, key=lambda entry: entry[0])]


def half_width(name: str, records: Sequence[PromptRecord], seed: int) -> float | None:
    """Half the width of a metric's corrected 95 % interval, as a share of the metric; None where there is none."""
    table = prompt_sums(records)
    point, ends = value(METRICS[name], table), interval(METRICS[name], table, confidence=corrected_confidence(0.95), seed=seed)
    return None if point is None or ends is None else (ends[1] - ends[0]) / 2 / point


def reached_precision(records: Sequence[PromptRecord], target_precision: float, seed: int) -> bool:
    """Whether the intervals of the acceptance length and of the speedup are within `target_precision` of them to either side."""
    widths = [half_width(name, records, seed) for name in PRECISION_METRICS]
    return all(width is not None and width <= target_precision for width in widths)
