"""Reports that say something else than their records."""

import json
from dataclasses import replace
from typing import Any

import pytest

from specdistill.report.build import headline, result_rows
from specdistill.report.recomputed import contradictions, defects, recomputed
from specdistill.statistics.records import PromptRecord
from tests.simulated import SUITE, as_from_server, edited, simulate, simulated_report, simulated_sweep

RECORDS = simulate(12)
REPORT = json.loads(json.dumps(simulated_report(RECORDS)))  # as it is read, so that no two parts are one
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
    (said,) = contradictions(edited(REPORT, place, value), COMPUTED)
    assert str(place[-1]) in said.partition(" is ")[0] and f"is {value:g}" in said


def test_rows_and_numbers_that_no_record_shows() -> None:
    swept = simulated_sweep(REPORT, 4)
    assert next(contradictions(swept, COMPUTED)).startswith("results ")
    slower = {**REPORT["results"][0], "speedup_over_hf_generate": 9.0}
    (said,) = contradictions({**REPORT, "results": [slower, *REPORT["results"][1:]]}, COMPUTED)
    assert said.startswith("results[0].speedup_over_hf_generate ")
    without = {name: value for name, value in REPORT["results"][0].items() if name != "num_looping"}
    (said,) = contradictions({**REPORT, "results": [without, *REPORT["results"][1:]]}, COMPUTED)
    assert said.startswith("results[0].num_looping ")


def test_a_number_is_the_same_to_a_millionth() -> None:
    for share, number in ((1e-7, 0), (1e-5, 1)):
        other = edited(REPORT, ("results", 0, "speedup"), REPORT["results"][0]["speedup"] * (1 + share))
        assert len(list(contradictions(other, COMPUTED))) == number


@pytest.mark.parametrize("settings", [{"seed": 3}, {"interim_analyses": True}])
def test_intervals_are_computed_with_the_seed_and_the_confidence_of_the_run(settings: dict[str, Any]) -> None:
    """Each is another interval than the one that seed 0 and 95 % give."""
    report = {**REPORT, "settings": {**REPORT["settings"], **settings}}
    own, confidence = recomputed(report, RECORDS), 1 - 0.05 / 5 if "interim_analyses" in settings else 0.95
    rows = result_rows(RECORDS, SUITE, RECORDS[0].configuration, seed=settings.get("seed", 0), confidence=confidence)
    assert own["results"] == rows
    assert own["headline"] == headline(rows, RECORDS, confidence=confidence)
    assert any(said.startswith("results[0].speedup_ci95") for said in contradictions(REPORT, own))


def with_round(number: int, **changes: Any) -> PromptRecord:
    """The first record, with something else in one round."""
    rounds = list(RECORDS[0].rounds)
    rounds[number] = replace(rounds[number], **changes)
    return replace(RECORDS[0], rounds=tuple(rounds))


FULL, PART = (
    next(number for number, entry in enumerate(RECORDS[0].rounds) if test(len(entry.accepted)))
    for test in (lambda accepted: accepted == 4, lambda accepted: 0 < accepted < 4)
)
WHOLE, CUT = RECORDS[0].rounds[FULL], RECORDS[0].rounds[PART]
SERVED = as_from_server(RECORDS[0])


@pytest.mark.parametrize(
    ("record", "fact"),
    [
        (with_round(FULL, accepted=(*WHOLE.accepted[:-1], -1)), f"round {FULL + 1}"),
        (with_round(FULL, emitted=(-1, *WHOLE.emitted[1:])), f"round {FULL + 1}"),
        (with_round(FULL, emitted=(*WHOLE.emitted, 7), emitted_text=(*WHOLE.emitted_text, "x")), "K = 4"),
        (with_round(FULL, drafted=(*WHOLE.drafted, 7), drafted_text=(*WHOLE.drafted_text, "x")), "K = 4"),
        (
            with_round(PART, accepted=CUT.accepted[:-1], emitted=CUT.emitted[:-1]),
            f"round {PART + 1}",
        ),  # it rejects its own token
        (with_round(PART, drafted_text=CUT.drafted_text[1:]), f"round {PART + 1}"),
        (with_round(PART, emitted_text=CUT.emitted_text[1:]), f"round {PART + 1}"),
        (replace(RECORDS[0], speculative=replace(RECORDS[0].speculative, num_rounds=39)), "39 rounds"),
        (replace(RECORDS[0], speculative=replace(RECORDS[0].speculative, num_tokens=7)), "7 tokens"),
        (replace(RECORDS[0], baseline=replace(RECORDS[0].baseline, num_tokens=1025)), "1025 tokens"),
        (replace(RECORDS[0], baseline=replace(RECORDS[0].baseline, seconds=0.0)), "0.0 s"),
        (replace(SERVED, counts=replace(SERVED.counts, num_accepted_tokens=1)), "1 accepted tokens"),
    ],
)
def test_a_record_that_decoding_does_not_leave_is_named(record: PromptRecord, fact: str) -> None:
    settings = {**REPORT["settings"], "max_new_tokens": 1024}
    assert list(defects([RECORDS[0], replace(SERVED, id="served")], settings)) == []
    said = list(defects([record], settings))
    assert said and all(one.startswith(f"{record.id}: ") for one in said) and any(fact in one for one in said)


def test_a_prompt_is_there_once_for_each_configuration() -> None:
    settings = {**REPORT["settings"], "max_new_tokens": 1024}
    warm = replace(RECORDS[0], configuration=replace(RECORDS[0].configuration, temperature=1.0))
    assert list(defects([RECORDS[0], warm], settings)) == []
    (said,) = defects([RECORDS[0], warm, RECORDS[0]], settings)
    assert said.startswith(RECORDS[0].id)


def test_chains_have_no_other_branches_and_a_draft_behind_a_look_up_may() -> None:
    branched = with_round(0, num_off_path=2)
    alone = {**REPORT["settings"], "max_new_tokens": 1024}
    behind = {**alone, "drafting": {"lookup_first": [2, 5], "draft_tree": {"branching": [2, 2]}}}
    assert list(defects([RECORDS[0]], alone)) == list(defects([branched], behind)) == []
    (said,) = defects([branched], alone)
    assert "round 1 " in said
