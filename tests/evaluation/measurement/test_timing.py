"""A stall in any round of any repetition, against the times without it."""

import random

import pytest

from specdistill.decoding.sequence import Generation, Round
from specdistill.evaluation.measurement.prompt_runs import compute_timing, count_disturbed_rounds

STALL = 5.0  # seconds


def make_generation(seconds: list[tuple[float, float]], prefill: float = 0.02) -> Generation:
    """Return a completion of one token a round; `seconds` holds the draft and verify times."""
    rounds = tuple(Round((7,), 0, (8,), draft, verify) for draft, verify in seconds)
    total = prefill + sum(map(sum, seconds))
    return Generation((1, 2), (8,) * (1 + len(rounds)), rounds, prefill, total, stopped=False)


def make_repetitions(
    count: int, *, spread: float = 0.05, num_rounds: int = 40, seed: int = 0
) -> list[Generation]:
    draw = random.Random(seed)
    times = [
        [
            (0.001 * draw.uniform(1, 1 + spread), 0.005 * draw.uniform(1, 1 + spread))
            for _ in range(num_rounds)
        ]
        for _ in range(count)
    ]
    return [make_generation(one) for one in times]


def add_stall(one: Generation, at: int) -> Generation:
    return make_generation(
        [
            (d, v + STALL * (index == at))
            for index, (d, v) in enumerate((r.draft_seconds, r.verify_seconds) for r in one.rounds)
        ]
    )


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_stall_changes_no_time(count: int):
    quiet = make_repetitions(count)
    # Each repetition but the last has a stall, and every stall is in another round.
    disturbed = [add_stall(one, at=7 * index) for index, one in enumerate(quiet[:-1])] + quiet[-1:]
    before, after = compute_timing(quiet), compute_timing(disturbed)
    assert after.seconds == pytest.approx(before.seconds, rel=0.01)
    assert after.verify_seconds == pytest.approx(before.verify_seconds, rel=0.01)
    assert (before.num_disturbed_rounds, after.num_disturbed_rounds) == (0, count - 1)


def test_the_disturbed_repetition_is_found():
    quiet = make_repetitions(3)
    assert count_disturbed_rounds([quiet[0], add_stall(quiet[1], 4), quiet[2]]) == [0, 1, 0]
    slow_prefill = make_generation(
        [(r.draft_seconds, r.verify_seconds) for r in quiet[2].rounds], prefill=3.0
    )
    assert count_disturbed_rounds([*quiet[:2], slow_prefill]) == [0, 0, 1]


def test_a_machine_that_is_slow_throughout_is_not_disturbed():
    """A repetition that is twice as slow throughout, and jitter of a millisecond, are ordinary."""
    quiet = make_repetitions(2)
    slow = make_generation(
        [(2 * r.draft_seconds, 2 * r.verify_seconds + 0.001) for r in quiet[1].rounds]
    )
    assert count_disturbed_rounds([quiet[0], slow]) == [0, 0]
    assert count_disturbed_rounds(quiet[:1]) == [0]


def test_each_part_of_a_round_has_the_lower_median_of_its_own():
    one, other, third = (
        make_generation([(1.0, 9.0)], prefill=4.0),
        make_generation([(3.0, 5.0)], prefill=2.0),
        make_generation([(2.0, 6.0)]),
    )
    timing = compute_timing([one, other])
    assert (
        timing.prefill_seconds,
        timing.draft_seconds,
        timing.verify_seconds,
        timing.seconds,
    ) == (2, 1, 5, 8)
    timing = compute_timing([one, other, third])
    assert (timing.prefill_seconds, timing.draft_seconds, timing.verify_seconds) == (2, 2, 6)


def test_repetitions_with_other_rounds_are_left_out():
    first, other = make_repetitions(1)[0], make_repetitions(1, num_rounds=9)[0]
    assert compute_timing([first, other, other]).seconds == pytest.approx(first.seconds)
