"""Drafts compared: ranking, parts and their paired differences, the sentences about them, and the
pages."""

import copy
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from specdistill.evaluation.comparison.compare import (
    PARTS,
    Measured,
    compare,
    explain_differences,
    is_separable,
)
from specdistill.evaluation.comparison.pages import (
    format_headline,
    print_comparison,
    render_comparison_html,
    render_comparison_markdown,
)
from specdistill.evaluation.report.phrases import format_duration
from specdistill.evaluation.statistics.records import PromptRecord, RoundRecord, Timing
from tests import rendered
from tests.rendered import Page, renamed
from tests.simulated import DRAFT_STEP, VERIFY_STEP, edited, simulated_candidate

HOSTILE = '<script>alert("1")</script>|`'
TRAINING = {"seconds": 141.2, "steps": 400, "curve": [[200, 1.6], [400, 1.9]]}
GOOD, POOR = (0.75, 0.72, 0.68, 0.65), (0.6, 0.6, 0.6, 0.6)


@pytest.fixture(scope="module")
def candidates() -> list[Measured]:
    """Three drafts: one that accepts less than the best, the best, and one that accepts as much as
    the best but whose draft step costs three times as much."""
    return [
        simulated_candidate("poor", conditional=POOR),
        simulated_candidate("best", conditional=GOOD, training=TRAINING),
        simulated_candidate(
            "dear", conditional=GOOD, draft_step=3 * DRAFT_STEP, parameters=1_230_000
        ),
    ]


@pytest.fixture(scope="module")
def comparison(candidates: list[Measured]) -> dict[str, Any]:
    return compare(candidates)


def find_entry(comparison: dict[str, Any], name: str) -> dict[str, Any]:
    return next(entry for entry in comparison["ranking"] if entry["name"] == name)


def list_sentences(comparison: dict[str, Any], topic: str) -> list[str]:
    return [reason["message"] for reason in comparison["why"] if reason["name"] == topic]


# The document


def test_the_fastest_comes_first_and_the_order_of_the_candidates_stays(
    comparison: dict[str, Any],
) -> None:
    assert [candidate["name"] for candidate in comparison["candidates"]] == ["poor", "best", "dear"]
    assert [(entry["rank"], entry["name"]) for entry in comparison["ranking"]] == [
        (1, "best"),
        (2, "poor"),
        (3, "dear"),
    ]
    speedups = [entry["speedup"] for entry in comparison["ranking"]]
    assert speedups == sorted(speedups, reverse=True)
    assert [entry["separable_from_best"] for entry in comparison["ranking"]] == [None, True, True]
    assert comparison["ranking"][0]["difference_to_best"] is None


def test_a_draft_that_changes_the_text_is_last_however_fast(candidates: list[Measured]) -> None:
    wrong = simulated_candidate("wrong", conditional=(0.99,) * 4, unexplained=3)
    comparison = compare([wrong, *candidates[:2]])
    assert [entry["name"] for entry in comparison["ranking"]] == ["best", "poor", "wrong"]
    assert [entry["lossless"] for entry in comparison["ranking"]] == [True, True, False]
    assert comparison["ranking"][2]["speedup"] > comparison["ranking"][0]["speedup"]
    (sentence,) = list_sentences(comparison, "lossless")
    assert sentence.startswith("wrong ") and "3 of 48" in sentence
    assert " faster than best" in list_sentences(comparison, "gap")[1]


def test_two_measurements_of_one_draft_are_not_separable(candidates: list[Measured]) -> None:
    again = simulated_candidate("again", conditional=GOOD, timing_seed=5)
    comparison = compare([candidates[1], again])
    second = comparison["ranking"][1]
    low, high = second["difference_to_best"]["speedup"]["ci95"]
    assert second["separable_from_best"] is False
    assert low < 0 < high
    assert "not separable" in list_sentences(comparison, "gap")[0]
    assert second["name"] in comparison["why"][0]["message"]


def test_one_prompt_separates_nothing() -> None:
    pair = [
        simulated_candidate(name, conditional=rates, num_prompts=1)
        for name, rates in (("a", GOOD), ("b", POOR))
    ]
    second = compare(pair)["ranking"][1]
    assert second["difference_to_best"]["speedup"]["ci95"] is None
    assert second["separable_from_best"] is False


def test_an_interval_is_separable_when_it_leaves_out_zero() -> None:
    intervals = [[-0.2, -0.1], [0.1, 0.2], [-0.1, 0.1], [0.0, 0.2], None]
    assert [is_separable({"change": 0.1, "ci95": ends}) for ends in intervals] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert not is_separable(None)


# Parts and differences


def build_record() -> PromptRecord:
    """Return a record of three rounds whose costs are round numbers.

    The first round drafts two tokens and accepts both, the second drafts three and accepts one, and
    the third drafts nothing.
    """

    def make_round(drafted: int, accepted: int) -> RoundRecord:
        tokens = tuple(range(drafted))
        emitted = tuple(range(accepted + 1))
        return RoundRecord(
            tokens, ("x",) * drafted, tokens[:accepted], emitted, ("x",) * len(emitted)
        )

    record = simulated_candidate("x", num_prompts=1).records[0]
    return replace(
        record,
        rounds=(make_round(2, 2), make_round(3, 1), make_round(0, 0)),
        # num_tokens, num_rounds, seconds, prefill, draft, verify: 7 tokens, the first from the
        # prefill
        speculative=Timing(7, 3, 1.0, 0.1, 0.2, 0.6),
        baseline=Timing(7, 6, 1.0, 0.1, 0.0, 0.6),
    )


def test_the_parts_of_three_rounds_match_a_hand_calculation() -> None:
    measured = simulated_candidate("x", num_prompts=2)
    record = build_record()
    pair = [
        replace(measured, name=name, records=[record, replace(record, id="other")]) for name in "ab"
    ]
    parts = compare(pair)["ranking"][0]["parts"]
    assert parts == pytest.approx(
        {
            "mean_acceptance_length": 1 + 3 / 3,
            "round_cost": (0.2 + 0.6) / 3 / 0.1,  # a plain step takes 0.6 / 6
            "acceptance_rate": 3 / 5,
            "drafted_per_round": 5 / 3,
            "first_position_rate": 2 / 2,
            "later_position_rate": 1 / 2,  # each draft reached its second position, no one a third
            "draft_step": 0.2 / 5 / 0.1,
            "verification": 0.6 / 3 / 0.1,
            "draft_share": 0.2 / 0.8,
        }
    )
    assert list(parts) == list(PARTS)


def test_a_difference_is_the_ratio_of_the_true_rates_and_its_interval_covers_it() -> None:
    """With K = 1 and acceptance rates of 0.8 and 0.6, a round emits 1.8 and 1.6 tokens."""
    high = simulated_candidate("high", conditional=(0.8,), num_rounds=100)
    low = simulated_candidate("low", conditional=(0.6,), num_rounds=100)
    differences = compare([high, low])["ranking"][1]["difference_to_best"]
    expected = {
        "mean_acceptance_length": 1.6 / 1.8 - 1,
        "acceptance_rate": 0.6 / 0.8 - 1,
        "first_position_rate": 0.6 / 0.8 - 1,
        "speedup": 1.6 / 1.8 - 1,
    }
    for name, change in expected.items():
        found = differences[name]
        assert found["change"] == pytest.approx(change, abs=0.03), name
        assert found["ci95"][0] < change < found["ci95"][1], name
        assert found["ci95"][1] - found["ci95"][0] < 0.06, name
    assert differences["round_cost"]["change"] == pytest.approx(0, abs=1e-3)
    assert differences["later_position_rate"] is None  # no draft has a second position
    assert set(differences) == {"speedup", *PARTS}


# Why they differ


def join_sentences(others: Sequence[Measured], topic: str, best: Measured) -> str:
    """Return the sentences on a topic in a comparison of the best with slower candidates."""
    return " ".join(list_sentences(compare([best, *others]), topic))


def test_less_acceptance_is_named_as_the_cause(
    candidates: list[Measured], comparison: dict[str, Any]
) -> None:
    gap, cause = list_sentences(comparison, "gap")[0], list_sentences(comparison, "cause")[0]
    assert (
        gap.startswith("poor is ")
        and "from acceptance" in gap
        and "fewer tokens" in gap
        and "costs" not in gap
    )
    assert "accepts less" in cause and "first position" in cause and "draft token" not in cause
    assert "short drafts 2.0 tokens" in join_sentences(
        [simulated_candidate("short", conditional=GOOD[:2])], "cause", candidates[1]
    )


def test_a_costlier_step_is_named_as_the_cause(comparison: dict[str, Any]) -> None:
    gap, cause = list_sentences(comparison, "gap")[1], list_sentences(comparison, "cause")[1]
    assert (
        gap.startswith("dear is ")
        and "from cost" in gap
        and "tokens" not in gap
        and "accepts" not in cause
    )
    assert "0.360 plain steps against 0.120" in cause and "Size" not in cause


@pytest.mark.parametrize(
    ("rates", "step", "source"),
    [
        (POOR, 1.2, "acceptance"),
        ((0.7, 0.7, 0.66, 0.64), 3, "cost"),
        (POOR, 2, "both acceptance and cost"),
        ((0.8, 0.8, 0.75, 0.7), 4, "cost"),  # it accepts more
    ],
)
def test_both_causes_are_weighed(
    candidates: list[Measured], rates: tuple[float, ...], step: float, source: str
) -> None:
    other = simulated_candidate("other", conditional=rates, draft_step=step * DRAFT_STEP)
    gap = join_sentences([other], "gap", candidates[1])
    assert f" mainly from {source}: " in gap and "tokens" in gap and "costs" in gap
    assert ("accepts more" in join_sentences([other], "cause", candidates[1])) == (rates > GOOD)


@pytest.mark.parametrize(
    ("parameters", "surprises"),
    [(0, True), (99_000, True), (2_340_000_000, False), (410_000, False)],
)
def test_a_costly_step_of_a_small_draft_is_not_explained_by_size(
    candidates: list[Measured], parameters: int, surprises: bool
) -> None:
    other = simulated_candidate("other", draft_step=3 * DRAFT_STEP, parameters=parameters)
    expected = f"Size is not the reason: {parameters:,} parameters against 410,000."
    assert (expected in join_sentences([other], "cause", candidates[1])) == surprises


def test_more_tokens_at_an_equally_higher_cost_are_said_to_offset() -> None:
    """One draft emits as many more tokens as its rounds cost more, so that speeds do not differ."""
    short, long = (
        simulated_candidate("x", conditional=(rate,) * 4, noise=0.0) for rate in (0.5, 0.8)
    )
    tokens = [one.report["results"][0]["mean_acceptance_length"] for one in (short, long)]
    even = (tokens[1] / tokens[0] * (VERIFY_STEP + 4 * DRAFT_STEP) - VERIFY_STEP) / 4
    long = simulated_candidate("long", conditional=(0.8,) * 4, draft_step=even, noise=0.0)
    gap = join_sentences([long], "gap", short)
    assert "not separable" in gap and "offset each other" in gap


def test_a_difference_that_does_not_show_in_the_speed_is_described() -> None:
    differences = {name: {"change": 0.0, "ci95": [-0.01, 0.01]} for name in ("speedup", *PARTS)}
    differences["speedup"] = {"change": -0.02, "ci95": [-0.05, 0.01]}
    document = compare([simulated_candidate(name, num_prompts=8) for name in ("best", "other")])
    ranking = copy.deepcopy(document["ranking"])
    ranking[1].update(name="other", separable_from_best=False, difference_to_best=differences)
    ranking[0]["name"] = "best"

    def describe_gap() -> str:
        return dict(explain_differences(document["candidates"], ranking))["gap"]

    assert all(
        fact in describe_gap() for fact in ("not separable", "2.0% slower", "(−5.0% to +1.0%)")
    )
    assert "tokens" not in describe_gap()
    differences["mean_acceptance_length"] = {"change": -0.03, "ci95": [-0.04, -0.02]}
    assert "3.0% fewer tokens" in describe_gap() and "does not show in the speed" in describe_gap()
    # The difference is certain, but too small to mention.
    differences["mean_acceptance_length"] = {"change": -0.003, "ci95": [-0.004, -0.002]}
    assert "tokens" not in describe_gap()
    differences["speedup"] = {"change": -0.02, "ci95": [-0.03, -0.01]}
    ranking[1]["separable_from_best"] = True
    assert (
        "2.0% slower than best (−3.0% to −1.0%)" in describe_gap() and "Neither" in describe_gap()
    )


# The pages


def test_the_table_says_what_training_took(candidates, comparison) -> None:
    resumed = replace(candidates[0], training={"seconds": None, "steps": 1200, "curve": []})
    ranked = render_comparison_markdown(compare([resumed, *candidates[1:]])).partition("## Why")[2]
    rows = [line.strip("| ").split(" | ") for line in ranked.splitlines() if "|" in line]
    assert rows[0][-1] == "training"
    assert [row[-1] for row in rows[2:]] == ["2 min 21 s (400 steps)", "– (1,200 steps)", "–"]
    assert re.search(
        r">2 min 21 s(</span>)?<small>400 steps</small>", render_comparison_html(comparison)
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.42, "0.4 s"), (9.96, "10 s"), (59.6, "1 min 0 s"), (141.2, "2 min 21 s"),
        (3599.7, "1 h 0 min")],
)  # fmt: skip
def test_a_duration_has_at_most_two_units(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_chart_has_one_k_and_a_table_eight_columns_at_most() -> None:
    drafts = [
        simulated_candidate(name, num_prompts=8, conditional=(0.7,) * k)
        for name, k in (("four", 4), ("two", 2))
    ]
    page = render_comparison_html(compare(drafts))
    for k, name, other_name in ((4, "four", "two"), (2, "two", "four")):
        for chart in re.findall(rf"<h3>[^<]*, K = {k}</h3>.*?</figure>", page, re.DOTALL):
            assert name in chart and other_name not in chart
    assert page.count(", K = 4</h3>") == page.count(", K = 2</h3>") == 1
    for head in re.findall("<thead>.*?</thead>", page, re.DOTALL):
        assert 2 < head.count('<th scope="col"') == head.count("<th") - 1 <= 8


def test_a_tie_has_no_winner(candidates, comparison) -> None:
    assert format_headline(
        comparison
    ) == "best is the fastest" and ">best is the fastest<" in render_comparison_html(comparison)
    tied = edited(comparison, ("ranking", 1, "separable_from_best"), False)
    for page in (render_comparison_html(tied), render_comparison_markdown(tied)):
        assert "No clear winner" in page
    assert format_headline(edited(tied, ("ranking", 1, "lossless"), False)) == "best is the fastest"
    assert (
        format_headline(edited(comparison, ("ranking", 0, "lossless"), False))
        == "No lossless draft"
    )


@pytest.mark.parametrize(
    ("bounds", "expected", "sentence"),
    [
        (
            [0.5, 0.8],
            "Plain decoding is the fastest",
            "Plain decoding is faster than every draft: best, the fastest of them",
        ),
        (
            [0.8, 1.1],
            "No draft is clearly faster than plain decoding",
            "which is not separable from plain decoding",
        ),
        ([1.1, 1.3], "best is the fastest", "best is the fastest: "),
    ],
)
def test_a_headline_names_only_a_draft_that_beats_plain_decoding(
    comparison, bounds: list[float], expected: str, sentence: str
) -> None:
    number = next(
        number
        for number, candidate in enumerate(comparison["candidates"])
        if candidate["name"] == "best"
    )
    changed = edited(
        comparison, ("candidates", number, "report", "results", 0, "speedup_ci95"), bounds
    )
    assert format_headline(changed) == expected
    assert (
        sentence in dict(explain_differences(changed["candidates"], changed["ranking"]))["fastest"]
    )


def test_names_cannot_become_markup(candidates: list[Measured]) -> None:
    hostile = replace(simulated_candidate("hostile", training=TRAINING), name=HOSTILE)
    hostile.report["target"]["model"] = HOSTILE
    comparison = compare([hostile, candidates[0]])
    page, markdown = render_comparison_html(comparison), render_comparison_markdown(comparison)
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(&#34;1&#34;)") >= 5
    assert 'href="%3Cscript%3E' in page
    assert "http" not in page and "url(" not in page and "@import" not in page
    friendly, hostile = (
        Page(render_comparison_markdown(renamed(comparison, name)))
        for name in ("name", rendered.HOSTILE)
    )
    assert (
        Page(markdown).elements == hostile.elements == friendly.elements
        and hostile.references == []
    )


def test_the_terminal_shows_whole_names(candidates, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "a-name-that-is-longer-than-a-column-is"
    print_comparison(compare([candidates[0], replace(candidates[1], name=name)]), tmp_path)
    printed = capsys.readouterr().out
    lines = printed[: printed.index(f"{name} is the fastest")].splitlines()
    assert max(map(len, lines)) <= 80
    column = next(line.index("speedup") for line in lines if "speedup" in line)
    assert name in "".join(line[:column].strip() for line in lines)
    assert f"comparison: {tmp_path / 'comparison.html'}" in printed
