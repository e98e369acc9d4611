import pytest

from specdistill.evaluation.gate.decide import Evidence, build_changes, decide, judge
from specdistill.evaluation.gate.rules import read_rule
from specdistill.evaluation.report import tables
from specdistill.evaluation.report.files import validate_report
from specdistill.evaluation.report.phrases import (
    describe_baseline,
    describe_failed_rules,
    find_direction,
    format_settings,
)
from tests.simulated import DRAFT_STEP, edited, simulate, simulated_report


@pytest.fixture(scope="module")
def evidence():
    records = simulate(24)
    return Evidence(simulated_report(records), records)


@pytest.fixture(scope="module")
def slower_evidence():
    """Evidence with the same acceptance, from drafts that cost twice as much."""
    records = simulate(24, draft_step=2 * DRAFT_STEP, timing_seed=2)
    return Evidence(simulated_report(records), records)


def index_by_metric(section):
    return {entry["metric"]: entry for entry in section["changes"] if entry["category"] == "all"}


def test_a_change_shows_the_old_value_the_new_one_and_the_paired_change(evidence, slower_evidence):
    section = build_changes(slower_evidence, evidence)
    validate_report({**slower_evidence.report, "baseline": section})
    changes = index_by_metric(section)
    draft = changes["draft_ms"]
    assert (draft["old"], draft["new"]) == tuple(
        side.report["results"][0]["draft_ms"] for side in (evidence, slower_evidence)
    )
    assert draft["change"] == pytest.approx(1.0, abs=0.02)
    low, high = draft["ci95"]
    assert low < draft["change"] < high
    assert find_direction(draft) == "worse"  # more milliseconds
    assert find_direction(changes["speedup"]) == "worse"
    assert (
        find_direction(index_by_metric(build_changes(evidence, slower_evidence))["speedup"])
        == "better"
    )


def test_equal_texts_are_no_change_of_acceptance(evidence, slower_evidence):
    section = build_changes(slower_evidence, evidence)
    lengths = [entry for entry in section["changes"] if entry["metric"] == "mean_acceptance_length"]
    assert [entry["category"] for entry in lengths] == [
        "all",
        "function",
        "docstring",
        "chat",
        "long_context",
    ]
    assert all(
        (entry["change"], entry["ci95"], find_direction(entry)) == (0.0, [0.0, 0.0], "open")
        for entry in lengths
    )


def test_a_metric_that_cannot_be_compared_says_why(evidence, slower_evidence):
    old = edited(evidence.report, ("hardware", "name"), "another")
    del old["results"][0]["acceptance_rate"]
    section = build_changes(slower_evidence, Evidence(old, evidence.records))
    validate_report({**slower_evidence.report, "baseline": section})
    changes = index_by_metric(section)
    assert "change" not in changes["speedup"]
    assert "another" in changes["speedup"]["reason"]
    assert changes["acceptance_rate"]["reason"] == "not measured in the baseline: it is absent"
    assert "old" not in changes["acceptance_rate"]
    (cells,) = (
        row
        for row in tables.tabulate_changes({"baseline": section}).rows
        if row[0] == ("acceptance rate",)
    )
    assert cells[1] == ("–",) and cells[2] != ("–",)
    assert cells[3] == ("–", "not measured in the baseline: it is absent")


def test_a_baseline_of_another_suite_is_named_and_not_compared(evidence, slower_evidence):
    old = {
        **evidence.report,
        "results": [{**row, "suite_version": "0"} for row in evidence.report["results"]],
    }
    section = build_changes(slower_evidence, Evidence(old, evidence.records))
    validate_report({**slower_evidence.report, "baseline": section})
    assert section["changes"] == []
    assert "suite_version 0" in describe_baseline({"baseline": section})


def test_a_quick_look_cannot_pass_a_gate(evidence):
    rule = read_rule("gate", {"metric": "mean_acceptance_length", "min": 1.0})
    assert decide([rule], evidence)["verdict"] == "passed"
    quick = Evidence(edited(evidence.report, ("settings", "quick"), True), evidence.records)
    judged = judge([rule], quick)
    validate_report(judged)
    assert judged["gate"]["verdict"] == judged["gate"]["rules"][0]["verdict"] == "inconclusive"
    assert "without quick=true" in describe_failed_rules(judged)
    assert format_settings(judged).startswith("quick look · ")

    # A few prompts are enough to show that a draft is not lossless.
    diverged = edited(quick.report, ("lossless", "unexplained_divergences"), 1)
    exact = read_rule("gate", {"metric": "lossless.unexplained_divergences", "equals": 0})
    assert decide([rule, exact], Evidence(diverged, evidence.records))["verdict"] == "failed"
