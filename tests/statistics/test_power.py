import numpy as np
import pytest

from specdistill.statistics.intervals import interval
from specdistill.statistics.metrics import METRICS
from specdistill.statistics.power import ASSUMED_SPREAD, PriorRun, minimum_detectable_change, power_analysis, spread_of
from specdistill.statistics.prompt_sums import prompt_sums
from tests.simulated import simulate, simulated_report

LENGTH = METRICS["mean_acceptance_length"]


def test_the_formula_by_hand():
    assert minimum_detectable_change(0.16, 80) == pytest.approx((1.959964 + 0.841621) * 0.16 / np.sqrt(80), rel=1e-6)
    assert minimum_detectable_change(0.16, 320) == pytest.approx(minimum_detectable_change(0.16, 80) / 2)
    assert minimum_detectable_change(0.16, 80, power=0.5) == pytest.approx(1.959964 * 0.16 / np.sqrt(80), rel=1e-6)


def test_what_is_assumed_is_that_eighty_prompts_find_five_per_cent():
    assert minimum_detectable_change(ASSUMED_SPREAD, 80) == pytest.approx(0.05, abs=5e-4)


@pytest.mark.parametrize(("share", "found"), [(1.0, 0.8), (0.0, 0.05), (1.5, 0.988)])
def test_a_change_of_that_size_is_found_as_often_as_it_says(share, found):
    """Two-sided z-tests of paired relative changes with a known spread: power at the change, significance at none."""
    num_prompts, spread, num_runs = 80, 0.16, 4_000
    change = share * minimum_detectable_change(spread, num_prompts)
    drawn = np.random.default_rng(0).normal(change, spread, (num_runs, num_prompts)).mean(axis=1)
    detected = np.abs(drawn) > 1.959964 * spread / np.sqrt(num_prompts)
    assert detected.mean() == pytest.approx(found, abs=4 * np.sqrt(found * (1 - found) / num_runs))


@pytest.mark.parametrize("name", ["mean_acceptance_length", "speedup"])
def test_the_spread_gives_the_standard_error_that_the_bootstrap_gives(name):
    table = prompt_sums(simulate(96))
    low, high = interval(METRICS[name], table)
    value = METRICS[name].formula(*(table[column].sum() for column in METRICS[name].sums))
    assert 1.96 * spread_of(METRICS[name], table) / np.sqrt(96) == pytest.approx((high - low) / 2 / value, rel=0.1)


def test_without_two_prompts_there_is_no_spread():
    assert spread_of(LENGTH, prompt_sums(simulate(1))) is None


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
