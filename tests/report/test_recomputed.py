"""Reports that say something else than their records."""

import json
from dataclasses import replace
from typing import Any

import pytest

from specdistill.report.recomputed import contradictions, defects, recomputed
from tests.simulated import simulate, simulated_report, simulated_sweep

RECORDS = simulate(12)
REPORT = simulated_report(RECORDS)
COMPUTED = recomputed(REPORT, RECORDS)


def test_a_report_says_what_its_records_do() -> None:
    assert list(contradictions(REPORT, COMPUTED)) == []


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("results", 0, "speedup"), 2.0),
        (("results", 0, "speedup_ci95", 0), 1.5),
        (("results", 1, "mean_acceptance_length"), 4.0),
        (("results", 0, "num_prompts"), 480),
        (("headline", "speedup"), 2.0),
        (("headline", "micro", "mean_acceptance_length"), 4.0),
        (("context", 0, "mean_acceptance_length"), 4.0),
        (("theory", "predicted"), 3.0),
    ],
)
def test_a_number_that_was_edited_is_named(place: tuple[Any, ...], value: float) -> None:
    report: Any = json.loads(json.dumps(REPORT))
    part = report
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    (said,) = contradictions(report, COMPUTED)
    assert str(place[-1]) in said.partition(" is ")[0] and f"is {value:g}" in said


def test_rows_and_numbers_that_no_record_shows() -> None:
    swept = simulated_sweep(REPORT, 4)
    assert "results has" in next(contradictions(swept, COMPUTED))
    slower = {**REPORT["results"][0], "speedup_over_hf_generate": 9.0}
    (said,) = contradictions({**REPORT, "results": [slower, *REPORT["results"][1:]]}, COMPUTED)
    assert said == "results[0].speedup_over_hf_generate is more than its records show"
    without = {name: value for name, value in REPORT["results"][0].items() if name != "num_looping"}
    (said,) = contradictions({**REPORT, "results": [without, *REPORT["results"][1:]]}, COMPUTED)
    assert said == "results[0].num_looping is missing"


def test_chains_have_no_other_branches_and_a_draft_behind_a_look_up_may() -> None:
    record = RECORDS[0]
    branched = replace(record, rounds=[replace(entry, num_off_path=2) for entry in record.rounds])
    alone = REPORT["settings"]
    behind = {**alone, "drafting": {"lookup_first": [2, 5], "draft_tree": {"branching": [2, 2]}}}
    assert list(defects([record], alone)) == list(defects([branched], behind)) == []
    assert next(defects([branched], alone)).endswith("round 1 of a chain has other branches")
