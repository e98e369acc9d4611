"""Simulated releases with a known change, made of measurements on pico, and the gate's verdicts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specdistill.evaluation.gate.decide import Evidence, decide
from specdistill.evaluation.gate.rules import load_gate
from specdistill.evaluation.statistics.metrics import METRICS, collect_prompt_sums, compute_value
from specdistill.evaluation.statistics.records import PromptRecord, RoundRecord
from tests.rounds import with_rounds
from tests.scripts import load_script
from tests.simulated import simulate, simulated_report

bench: Any = load_script("bench/gate.py")
POPULATIONS = {population.name: population for population in bench.load(bench.MEASUREMENTS_FILE)}
RULES = {rule.metric: rule for rule in load_gate("release") if rule.requirement == "max_regression"}


@pytest.mark.long  # 450 releases
@pytest.mark.parametrize(
    ("name", "margin", "num_prompts"),
    [
        ("eagle3 to eagle3-again", 0.03, 128),
        ("eagle3 to eagle", 0.03, 384),
        ("one draft, timed twice", 0.05, 192),
    ],
)
def test_a_true_drop_by_the_margin_fails_and_no_change_passes(
    name: str, margin: float, num_prompts: int
) -> None:
    """The numbers of prompts are those that docs/gate.md states."""
    population = POPULATIONS[name]
    rule = RULES[population.metric]
    assert rule.threshold == margin and f"**{num_prompts}" in bench.PAGE.read_text(encoding="utf-8")
    assert (
        bench.simulate_releases(population, rule, -margin, num_prompts, trials=150)["failed"]
        >= 0.95
    )
    assert bench.simulate_releases(population, rule, 0.0, num_prompts, trials=150)["passed"] >= 0.99


@pytest.mark.parametrize("change", [-0.06, -0.03, 0.0, 0.02])
@pytest.mark.parametrize("name", POPULATIONS)
def test_a_simulated_release_has_the_change_that_it_says(name: str, change: float) -> None:
    population, generator = POPULATIONS[name], np.random.default_rng(0)
    after, before = population.release(change, 50_000, generator)
    metric = METRICS[population.metric]
    assert compute_value(metric, after) / compute_value(metric, before) - 1 == pytest.approx(
        change, abs=0.004
    )
    assert all((column >= 0).all() for column in after.values())


def test_the_gate_reaches_the_verdicts_of_the_script() -> None:
    """The script decides from columns; the gate decides from reports of the same releases."""
    population, rule = POPULATIONS["eagle3 to eagle"], RULES["mean_acceptance_length"]
    report = simulated_report(simulate(2))
    for true_change in (0.0, -0.2):
        after, before = population.release(true_change, 40, np.random.default_rng(3))
        sides = [
            Evidence(report, [build_record(table, index) for index in range(40)])
            for table in (after, before)
        ]
        (result,) = decide([rule], *sides)["rules"]
        change, ends = bench.compute_relative_change(
            METRICS[rule.metric], after, before, confidence=rule.confidence, seed=0
        )
        assert (result["value"], *result["ci95"]) == pytest.approx((change, *ends))
        assert (
            result["verdict"] == bench.compare_with_threshold(rule, bench.Estimate(change, ends))[0]
        )


def build_record(table: dict[str, np.ndarray], index: int) -> PromptRecord:
    """Return a prompt with these numbers of rounds and accepted tokens; each round drafts four."""
    drafts = int(table["num_rounds"][index])
    accepted = int(table["num_tokens"][index]) - 1 - drafts
    counts = [accepted // drafts + (number < accepted % drafts) for number in range(drafts)]
    rounds = [
        RoundRecord((1,) * 4, ("x",) * 4, (1,) * count, (1,) * (count + 1), ("x",) * (count + 1))
        for count in counts
    ]
    record = replace(with_rounds(PROMPT, rounds), id=f"prompt-{index}")
    assert collect_prompt_sums([record])["num_accepted_tokens"] == accepted
    return record


PROMPT = simulate(1)[0]


def test_rounds_move_by_one_and_none_is_lost() -> None:
    rounds_PA = np.array([[10, 0, 0], [0, 10, 0], [0, 0, 10]])
    drawn, generator = np.arange(3), np.random.default_rng(0)
    fewer, more = (
        bench.shift_rounds(rounds_PA, wanted, drawn, generator) for wanted in (-2 / 3, 2 / 3)
    )
    assert fewer.tolist() == [[10, 0, 0], [10, 0, 0], [0, 10, 0]]
    assert more.tolist() == [[0, 10, 0], [0, 0, 10], [0, 0, 10]]
