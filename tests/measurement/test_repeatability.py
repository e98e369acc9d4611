"""The same suite, measured twice."""

import json

import pytest

from specdistill.statistics.intervals import interval
from specdistill.statistics.metrics import METRICS, prompt_sums, value
from tests.scripts import evaluate
from tests.simulated import VERIFY_STEP, simulate

COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "accepted_per_position", "num_new_tokens", "num_rounds")


@pytest.mark.long
def test_counts_are_the_same(tmp_path):
    """pico with n-gram look-up, greedy: sequences and acceptance are functions of the prompts."""
    gate = tmp_path / "gate.yaml"
    gate.write_text("- {metric: lossless.greedy_identical, equals: true}\n")
    reports = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        evaluate(
            "target=pico",
            "method=ngram",
            "suite=pico-edit",
            f"output_dir={folder}",
            f"gate={gate}",
            "eval.num_prompts=4",
            "eval.max_new_tokens=48",
            "eval.repeats=1",
            "eval.warmup=0",
            "eval.sampling_draws=0",
        )
        reports.append(json.loads((folder / "report.json").read_text()))
    first, second = (report["results"] for report in reports)
    assert [[row[name] for name in COUNTS] for row in first] == [[row[name] for name in COUNTS] for row in second]
    assert first[0]["num_accepted_tokens"] > 50


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
