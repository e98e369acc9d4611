"""The same suite, measured twice."""

from specdistill.statistics.intervals import interval
from specdistill.statistics.metrics import METRICS, prompt_sums, value
from tests.simulated import VERIFY_STEP, simulate

Speedup = tuple[float, tuple[float, float]]  # and its interval


def measured(timing_seed: int, verify_step: float = VERIFY_STEP) -> Speedup:
    """A simulated run: the times of its prompts spread by 5 %, everything else is the same in every run."""
    sums = prompt_sums(simulate(48, noise=0.05, timing_seed=timing_seed, verify_step=verify_step))
    found = interval(METRICS["speedup"], sums)
    assert found is not None
    return value(METRICS["speedup"], sums), found


def is_within(one: Speedup, other: Speedup) -> bool:
    low, high = other[1]
    return low <= one[0] <= high


def test_speedups_are_within_each_others_intervals():
    runs = [measured(timing_seed) for timing_seed in range(6)]
    assert len({speedup for speedup, _ in runs}) == 6
    assert all(is_within(one, other) for one in runs for other in runs)
    slower = measured(6, verify_step=1.1 * VERIFY_STEP)
    assert not any(is_within(slower, run) or is_within(run, slower) for run in runs)
