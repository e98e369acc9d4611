"""The same suite, measured twice."""

import json

import pytest

from tests.scripts import evaluate as command

COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "accepted_per_position", "num_new_tokens", "num_rounds")


@pytest.mark.slow
def test_counts_are_the_same_and_speedups_within_each_others_intervals(tmp_path):
    """pico with n-gram look-up, greedy: text and acceptance are functions of the input, and only the clock may differ."""
    gate = tmp_path / "gate.yaml"
    gate.write_text("- {metric: lossless.greedy_identical, equals: true}\n")
    reports = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        command(
            "target=pico",
            "method=ngram",
            "suite=pico-edit",
            f"output_dir={folder}",
            f"gate={gate}",
            "eval.num_prompts=12",
            "eval.max_new_tokens=48",
            "eval.sampling_draws=0",
        )
        reports.append(json.loads((folder / "report.json").read_text()))
    first, second = (report["results"] for report in reports)
    assert [[row[name] for name in COUNTS] for row in first] == [[row[name] for name in COUNTS] for row in second]
    assert first[0]["num_accepted_tokens"] > 50
    for one, other in ((first[0], second[0]), (second[0], first[0])):
        low, high = other["speedup_ci95"]
        assert low <= one["speedup"] <= high
