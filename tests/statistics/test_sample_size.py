from dataclasses import replace

import numpy as np
import pytest

from specdistill.statistics.intervals import estimates, interval
from specdistill.statistics.metrics import METRICS, prompt_sums
from specdistill.statistics.sample_size import (
    FIRST_ANALYSIS,
    NUM_INTERIM_ANALYSES,
    PriorRun,
    corrected_confidence,
    half_width,
    interim_sizes,
    minimum_detectable_change,
    power_analysis,
    reached_precision,
    spread_of,
    spread_out,
)
from tests.simulated import in_batches, simulate, simulated_report

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
    found = estimates(("mean_acceptance_length", "speedup"), prompt_sums(records), 0, corrected_confidence(0.95))
    widths = half_width(found, "mean_acceptance_length"), half_width(found, "speedup")
    assert reached_precision(records, max(widths), 0)
    assert not reached_precision(records, max(widths) * 0.99, 0)
    assert not reached_precision(simulate(1), 1.0, 0)
    assert not reached_precision([replace(record, rounds=()) for record in records], 1.0, 0)  # nothing drafted


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


@pytest.mark.long  # 550 runs, each with up to fifty intervals
@pytest.mark.parametrize("target_precision", [0.08, 0.05])
def test_the_interval_at_which_a_run_stops_holds_the_truth_as_often_as_it_says(target_precision):
    """Simulated runs. Without the correction, and with an analysis after every fourth prompt, the same intervals do not."""
    assert (
        np.mean([covered(seed, target_precision, interim_sizes(200), corrected_confidence(0.95)) for seed in range(400)])
        >= 0.95
    )
    assert np.mean([covered(seed, target_precision, range(4, 201, 4), 0.95) for seed in range(150)]) < 0.92


def test_the_formula_by_hand():
    assert minimum_detectable_change(0.16, 80) == pytest.approx((1.959964 + 0.841621) * 0.16 / np.sqrt(80), rel=1e-6)
    assert minimum_detectable_change(0.16, 320) == pytest.approx(minimum_detectable_change(0.16, 80) / 2)


@pytest.mark.parametrize("name", ["mean_acceptance_length", "speedup"])
def test_the_spread_gives_the_standard_error_that_the_bootstrap_gives(name):
    table = prompt_sums(simulate(96))
    low, high = interval(METRICS[name], table)
    value = METRICS[name].formula(*(table[column].sum() for column in METRICS[name].sums))
    assert spread_of(METRICS[name], prompt_sums(simulate(1))) is None
    assert 1.96 * spread_of(METRICS[name], table) / np.sqrt(96) == pytest.approx((high - low) / 2 / value, rel=0.1)


def test_what_a_suite_can_tell_is_said_of_prompts():
    """Times shared by fours spread as widely over prompts as before: it takes as many prompts to tell the same change."""
    alone = simulate(192, noise=0.2)
    spreads = [spread_of(METRICS["speedup"], prompt_sums(found)) for found in (alone, in_batches(alone, 4))]
    assert spreads[1] == pytest.approx(spreads[0], rel=0.2)


def test_the_sentence_says_what_it_stands_on():
    records = simulate(48)
    earlier = PriorRun(simulated_report(records), records, "runs/before")
    assumed = power_analysis(80, "simulated", None)
    assert assumed == power_analysis(80, "another", earlier)
    for fact in ("80 prompts", "5.0% of the acceptance length", "power 80%", "two-sided 5%", "assumed spread of 16%"):
        assert fact in assumed
    known = power_analysis(48, "simulated", earlier)
    change = minimum_detectable_change(np.sqrt(2) * spread_of(LENGTH, prompt_sums(records)), 48)
    for fact in ("48 prompts", f"{change:.1%} of the acceptance length", "of the speedup", "power 80%", "runs/before"):
        assert fact in known
    assert "assumed" not in known
