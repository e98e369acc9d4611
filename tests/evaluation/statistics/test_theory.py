import pytest

from specdistill.evaluation.statistics.theory import (
    RoundCost,
    alpha_from_acceptance_length,
    compute_deviation_from_rising,
    compute_speedup_curve,
    expected_acceptance_length,
    predicted_speedup,
    select_best_point,
)


def test_predicted_speedup_matches_a_hand_calculation():
    assert predicted_speedup(1, 1, 0) == 1
    assert predicted_speedup(3.0, 1.2, 4 * 0.1) == pytest.approx(3 / 1.6)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("k", [1, 4, 7])
def test_alpha_and_acceptance_length_are_inverse(alpha, k):
    length = expected_acceptance_length(alpha, k)
    assert length == pytest.approx(k + 1 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha))
    assert alpha_from_acceptance_length(length, k) == pytest.approx(alpha, abs=1e-9)


STEP = 10.0  # ms of a plain step


def test_shorter_drafts_keep_the_acceptance_rates_of_their_positions():
    timed = [RoundCost(2, 2.4, 0.6), RoundCost(1, 2.2, 0.3)]
    curve = compute_speedup_curve([8, 4, 2], 8, STEP, RoundCost(2, 12, 2), timed)
    assert [point["k"] for point in curve] == [0, 1, 2]
    assert [point["mean_acceptance_length"] for point in curve] == [1.0, 1.5, 1.75]
    assert [point["verify_ms"] for point in curve] == pytest.approx([10, 11, 12])
    assert [point["draft_ms"] for point in curve] == pytest.approx([0, 1, 2])
    assert [point["predicted_speedup"] for point in curve] == pytest.approx(
        [1.0, 1.5 / (1.1 + 0.1), 1.75 / (1.2 + 2 * 0.1)]
    )


def test_a_block_that_is_drafted_in_one_pass_costs_the_same_at_every_length():
    timed = [RoundCost(k, 12, 3) for k in (1, 2, 3, 4)]
    curve = compute_speedup_curve([10, 8, 7, 6, 5], 10, STEP, RoundCost(4, 12, 3), timed)
    assert [point["draft_ms"] for point in curve] == pytest.approx([0, 3, 3, 3, 3])
    assert [point["predicted_speedup"] for point in curve[1:]] == pytest.approx(
        [AL / 1.5 for AL in (1.8, 2.5, 3.1, 3.6)]
    )
    assert select_best_point(curve)["k"] == 4  # it would be 1 if the passes added up to 4 · 3 ms
    # K = 0 is plain decoding
    assert (
        select_best_point(compute_speedup_curve([20, 1], 20, STEP, RoundCost(1, 12, 2), []))["k"]
        == 0
    )


def test_rounds_without_a_match_of_the_lookup_take_plain_steps_at_every_length():
    """Four of the eight rounds draft.

    With K = 2 they cost 14 ms each and emit 9 tokens in all; with K = 1 they cost 7 ms and emit 7.
    """
    timed = [RoundCost(1, 7, 1), RoundCost(2, 14, 2)]
    curve = compute_speedup_curve([8, 3, 2], 4, STEP, RoundCost(2, 12, 1), timed)
    drafts = 9 / (7 / 4)
    assert [point["mean_acceptance_length"] for point in curve] == pytest.approx(
        [1, 13 / (4 + drafts), 13 / 8]
    )
    assert [point["verify_ms"] for point in curve] == pytest.approx(
        [10, (4 * 10 + drafts * 7) / (4 + drafts), 12]
    )
    assert [point["draft_ms"] for point in curve] == pytest.approx(
        [0, drafts * 1 / (4 + drafts), 1]
    )


def test_costs_that_fall_with_the_draft_length_give_a_deviation():
    """A pass over more tokens should not cost less: 617 ms, followed by 437 ms, deviate from their
    mean of 527 ms."""
    timed = [RoundCost(k, verify_ms, 10 * k) for k, verify_ms in ((2, 617), (1, 514), (3, 437))]
    assert compute_deviation_from_rising(timed) == pytest.approx(617 / 527 - 1)
    rising = [RoundCost(k, 400 + k, k) for k in (1, 2, 3)]
    assert compute_deviation_from_rising(rising) == compute_deviation_from_rising([]) == 0.0


def test_lengths_that_were_not_timed_are_left_out():
    def list_lengths(*timed):
        return [
            point["k"]
            for point in compute_speedup_curve([10, 5, 3, 1], 10, STEP, RoundCost(3, 12, 3), timed)
        ]

    assert list_lengths() == list_lengths(RoundCost(1, 1, 1)) == [0, 3]
    assert list_lengths(RoundCost(1, 1, 1), RoundCost(3, 2, 2)) == [0, 1, 3]
