from dataclasses import replace

import numpy as np
import pytest

from specdistill.statistics.interim import (
    FIRST_ANALYSIS,
    NUM_INTERIM_ANALYSES,
    corrected_confidence,
    half_width,
    interim_sizes,
    reached_precision,
    spread_out,
)
from specdistill.statistics.intervals import interval
from specdistill.statistics.metrics import METRICS
from tests.simulated import simulate

LENGTH = METRICS["mean_acceptance_length"]
TRUE_LENGTH = 1 + 4 * 6 / 9


def test_interim_analyses_are_few_and_end_with_every_prompt():
    assert interim_sizes(480) == [24, 51, 107, 227, 480]
    assert interim_sizes(24) == [24]
    assert interim_sizes(5) == [5]
    for number in range(1, 300):
        found = interim_sizes(number)
        assert found == sorted(set(found))
        assert (found[0], found[-1]) == (min(FIRST_ANALYSIS, number), number)
        assert len(found) <= NUM_INTERIM_ANALYSES


def test_every_prefix_of_the_order_is_even_over_the_categories():
    categories = ["a"] * 12 + ["b"] * 12 + ["c"] * 3
    order = spread_out(categories, seed=0)
    assert sorted(order) == list(range(27))
    for upto in range(1, 28):
        counts = [sum(categories[index] == group for index in order[:upto]) for group in "ab"]
        assert abs(counts[0] - counts[1]) <= 1
    assert {categories[index] for index in order[:3]} == {"a", "b", "c"}
    assert order[:12] != sorted(order[:12])
    assert order == spread_out(categories, seed=0) != spread_out(categories, seed=1)


def test_the_confidence_of_all_interim_analyses_together():
    assert 1 - NUM_INTERIM_ANALYSES * (1 - corrected_confidence(0.95)) == pytest.approx(0.95)
    records = simulate(48)
    widths = half_width("mean_acceptance_length", records, 0), half_width("speedup", records, 0)
    assert reached_precision(records, max(widths), 0)
    assert not reached_precision(records, max(widths) * 0.99, 0)
    assert not reached_precision(simulate(1), 1.0, 0)


def test_nothing_drafted_never_reaches_a_precision():
    silent = [replace(record, rounds=()) for record in simulate(24)]
    assert not reached_precision(silent, 1.0, 0)


def prompts(rng, number):
    """Prompts that differ in how much is drafted and how much of it is accepted; over all of them the length is TRUE_LENGTH."""
    rates, drafts = rng.beta(6, 3, number), rng.integers(10, 60, number)
    accepted = [rng.binomial(4, rate, count).sum() for rate, count in zip(rates, drafts, strict=True)]
    return {"num_accepted_tokens": np.array(accepted, float), "num_drafts": drafts.astype(float)}


def covered(seed, target_precision, at, confidence):
    """Whether the interval at which a run stops holds the truth."""
    table = prompts(np.random.default_rng(seed), at[-1])
    for number in at:
        seen = {name: column[:number] for name, column in table.items()}
        low, high = interval(LENGTH, seen, confidence=confidence)
        if (high - low) / (high + low) <= target_precision:
            break
    return low <= TRUE_LENGTH <= high


@pytest.mark.slow
@pytest.mark.parametrize("target_precision", [0.08, 0.05])
def test_the_interval_at_which_a_run_stops_holds_the_truth_as_often_as_it_says(target_precision):
    """Simulated runs. Without the correction, and with an analysis after every fourth prompt, the same intervals do not."""
    assert (
        np.mean([covered(seed, target_precision, interim_sizes(200), corrected_confidence(0.95)) for seed in range(400)])
        >= 0.95
    )
    assert np.mean([covered(seed, target_precision, range(4, 201, 4), 0.95) for seed in range(150)]) < 0.92
