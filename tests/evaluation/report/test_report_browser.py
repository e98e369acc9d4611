"""The report's page in a real browser: no errors in its console, and the token view works."""

from dataclasses import replace

import pytest

from specdistill.evaluation.gate.decide import Evidence, judge
from specdistill.evaluation.gate.rules import load_gate
from specdistill.evaluation.report.files import to_html
from tests.browser import look, opening
from tests.simulated import simulate, simulated_report, simulated_sweep, with_text

pytestmark = [pytest.mark.browser, pytest.mark.long]  # Chromium

WALK = """
at("after").click();
at("slider").value = 2;
at("slider").dispatchEvent(new Event("input"));
const count = chosen => document.querySelectorAll(chosen).length;
found({
  prompt: at("sample").selectedOptions[0].text,
  prompts: at("sample").options.length,
  tokens: count("#text .t"),
  now: count("#text .now"),
  later: count("#text .later"),
  chips: count("#chips .chip"),
  rejected: count("#chips .rejected"),
  explanation: at("explanation").textContent,
  chip_row: at("chips").textContent,
  scrolls: [...document.querySelectorAll(".scroll")]
    .filter(table => table.scrollWidth > table.clientWidth).length,
  lines_of_date: document.querySelector("time").getClientRects().length,
  empty_beside_plots: [...document.querySelectorAll(".plots")].map(plots => Math.round(
    plots.getBoundingClientRect().right - plots.lastElementChild.getBoundingClientRect().right)),
});
"""
PLAY = """
at("slider").value = 38;
at("slider").dispatchEvent(new Event("input"));
at("play").click();
const playing = at("play").textContent;
setTimeout(() => found({
  playing, stopped: at("play").textContent, round: at("slider").value,
}), 2500);
"""
HOSTILE = (
    '</script><script>window.hacked = 1</script><img src="https://example.org/x"'
    ' onerror="window.hacked = 2"><b>&amp;'
)
UNTOUCHED = """
found({
  hacked: window.hacked || 0,
  elements: document.querySelectorAll("img, b b, script[src], link[href^=http]").length,
  text: at("text").textContent,
  option: at("sample").options[0].text,
  chips: at("chips").textContent,
});
"""


def render_judged_page(records):
    """Return a page with all that it can hold: a sweep, and the changes since a baseline."""
    before = simulate(
        len(records), conditional=(0.7, 0.7, 0.6, 0.6), num_rounds=len(records[0].rounds)
    )
    report = simulated_sweep(simulated_report(records), num_prompts=8)
    return to_html(
        judge(
            load_gate("pico"), Evidence(report, records), Evidence(simulated_report(before), before)
        ),
        records,
    )


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_works_in_a_browser(tmp_path, width, dark):
    records = simulate(8)
    found = look(render_judged_page(records), WALK, tmp_path, width=width, dark=dark)
    sample = next(record for record in records if found["prompt"].startswith(record.id))
    entry = sample.rounds[1]
    accepted = len(entry.accepted)
    assert (found["overflow"], found["clipped"], found["scrolls"]) == (False, [], 0)
    assert found["paper"] == ("rgb(19, 21, 24)" if dark else "rgb(255, 255, 255)")
    assert (found["lines_of_date"], set(found["empty_beside_plots"])) == (1, {0})
    assert found["prompts"] == 8
    assert sample.id != records[0].id
    assert found["tokens"] == 1 + sum(len(entry.emitted) for entry in sample.rounds)
    assert found["now"] == len(entry.emitted)
    assert found["later"] == sum(len(entry.emitted) for entry in sample.rounds[2:])
    assert (found["chips"], found["rejected"]) == (
        len(entry.drafted) + 1,
        len(entry.drafted) - accepted,
    )
    assert found["explanation"].startswith("Round 2 of 40: 4 drafted, ")
    assert f"{accepted or 'none'} accepted" in found["explanation"]


def test_a_round_of_a_tree_says_what_else_was_drafted(tmp_path):
    records = simulate(2)
    entry = replace(records[0].rounds[0], num_off_path=12)
    records = [replace(record, rounds=(entry,)) for record in records]
    found = look(render_judged_page(records), WALK, tmp_path)
    assert found["explanation"].startswith(
        f"Round 1 of 1: {len(entry.drafted) + 12} drafted in a tree, "
    )
    assert found["chip_row"].count("and 12 in other branches") == 1


def test_playing_goes_through_the_rounds_and_stops_at_the_last(tmp_path):
    found = look(render_judged_page(simulate(8)), PLAY, tmp_path)
    assert (found["playing"], found["stopped"], found["round"]) == ("❚❚ pause", "▶ play", "40")


def test_a_prompt_full_of_markup_stays_text(tmp_path):
    found = look(
        render_judged_page([with_text(record, HOSTILE) for record in simulate(2)]),
        UNTOUCHED,
        tmp_path,
    )
    assert (found["hacked"], found["elements"]) == (0, 0)
    assert found["text"].startswith(HOSTILE * 2)
    assert found["option"].startswith(HOSTILE)
    assert HOSTILE.replace(" ", "·") in found["chips"]


def test_a_page_of_five_hundred_prompts_opens_within_a_second(tmp_path):
    records = simulate(500, num_rounds=46)
    assert 120 < sum(record.speculative.num_tokens for record in records) / len(records) < 140
    page = render_judged_page(records)
    assert len(page.encode()) < 5_000_000
    openings = [opening(page, tmp_path) for _ in range(3)]
    assert [found["requests"] for found in openings] == [0, 0, 0]
    # Other work on the machine may slow one of them.
    assert min(found["seconds"] for found in openings) < 1.0
