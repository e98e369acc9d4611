import numpy as np
import pytest

from specdistill.statistics.intervals import interval
from specdistill.statistics.metrics import METRICS, prompt_sums
from specdistill.statistics.sample_size import PriorRun, minimum_detectable_change, power_analysis, spread_of
from tests.simulated import in_batches, simulate, simulated_report

LENGTH = METRICS["mean_acceptance_length"]


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
