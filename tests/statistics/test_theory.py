import pytest

from specdistill.statistics.theory import (
    RoundCost,
    alpha_from_acceptance_length,
    best_point,
    conditional_rates,
    expected_acceptance_length,
    predicted_speedup,
    speedup_curve,
)


def test_predicted_speedup_by_hand():
    assert predicted_speedup(1, 1, 0) == 1
    assert predicted_speedup(3.0, 1.2, 4 * 0.1) == pytest.approx(3 / 1.6)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("k", [1, 4, 7])
def test_alpha_and_acceptance_length_are_inverse(alpha, k):
    length = expected_acceptance_length(alpha, k)
    assert length == pytest.approx(k + 1 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha))
    assert alpha_from_acceptance_length(length, k) == pytest.approx(alpha, abs=1e-9)


def test_conditional_rates_are_ratios_of_neighbours():
    assert conditional_rates([0.8, 0.4, 0.0, 0.0]) == [0.8, 0.5, 0.0, None]


STEP = 10.0  # ms of a plain step


def test_the_curve_cuts_the_same_rates_shorter():
    timed = [RoundCost(2, 2.4, 0.6), RoundCost(1, 2.2, 0.3)]
    curve = speedup_curve([0.5, 0.25], STEP, RoundCost(2, 12, 2), timed)
    assert [point["k"] for point in curve] == [0, 1, 2]
    assert [point["mean_acceptance_length"] for point in curve] == [1.0, 1.5, 1.75]
    assert [point["verify_ms"] for point in curve] == pytest.approx([10, 11, 12])
    assert [point["draft_ms"] for point in curve] == pytest.approx([0, 1, 2])
    assert [point["predicted_speedup"] for point in curve] == pytest.approx(
        [1.0, 1.5 / (1.1 + 0.1), 1.75 / (1.2 + 2 * 0.1)]
    )


def test_a_block_that_is_drafted_in_one_pass_costs_the_same_at_every_length():
    timed = [RoundCost(k, 12, 3) for k in (1, 2, 3, 4)]
    curve = speedup_curve([0.8, 0.7, 0.6, 0.5], STEP, RoundCost(4, 12, 3), timed)
    assert [point["draft_ms"] for point in curve] == [0, 3, 3, 3, 3]
    assert [point["predicted_speedup"] for point in curve[1:]] == pytest.approx(
        [AL / 1.5 for AL in (1.8, 2.5, 3.1, 3.6)]
    )
    assert best_point(curve)["k"] == 4  # at 4 · 3 ms it would be 1
    assert (
        best_point(speedup_curve([0.05], STEP, RoundCost(1, 12, 2), []))["k"] == 0
    )  # plain decoding


def test_lengths_that_were_not_timed_are_left_out():
    def lengths(*timed):
        return [
            point["k"] for point in speedup_curve([0.5, 0.3, 0.1], STEP, RoundCost(3, 12, 3), timed)
        ]

    assert lengths() == lengths(RoundCost(1, 1, 1)) == [0, 3]
    assert lengths(RoundCost(1, 1, 1), RoundCost(3, 2, 2)) == [0, 1, 3]
