"""What bench/noise.py counts as undisturbed, and when it stops a run."""

import itertools
from typing import Any

import pytest

from tests.scripts import load_script

noise: Any = load_script("bench/noise.py")
QUIET = {"verdict": "passed", "speedup": 1.6}


@pytest.mark.parametrize(
    ("verdict", "speedup", "undisturbed"),
    [("passed", 1.67, True), ("passed", 1.69, False), ("failed", 1.6, False), ("inconclusive", 2.2, True)],
)
def test_the_same_verdict_and_nearly_the_same_speedup(verdict: str, speedup: float, undisturbed: bool) -> None:
    assert noise.is_undisturbed({"verdict": verdict, "speedup": speedup}, QUIET) == undisturbed


def test_each_stop_comes_after_the_one_before_it() -> None:
    moments = noise.moments(100.0, seed=3)
    assert len(moments) == noise.NUM_STOPS and moments != noise.moments(100.0, seed=4)
    assert all(later - earlier >= noise.STOP_SECONDS for earlier, later in itertools.pairwise(moments))
    assert moments[0] >= 0 and moments[-1] <= 100.0 + noise.NUM_STOPS * noise.STOP_SECONDS
