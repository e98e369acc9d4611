"""The report's page in a real browser: no errors in its console, and the token view works."""

import pytest

from specdistill.evaluation.gate import Evidence, decide, load_gate
from specdistill.evaluation.report.html import to_html
from tests.evaluation.browser import look
from tests.evaluation.simulated import simulate, simulated_report

PROBE = """
const at2 = id => document.getElementById(id);
at2("sample").value = 1;
at2("sample").onchange({target: at2("sample")});
at2("slider").value = 2;
at2("slider").oninput({target: at2("slider")});
found({
  tokens: document.querySelectorAll("#text .t").length,
  now: document.querySelectorAll("#text .now").length,
  later: document.querySelectorAll("#text .later").length,
  chips: document.querySelectorAll("#chips .chip").length,
  says: at2("says").textContent,
});
"""


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_works_in_a_browser(tmp_path, width):
    records = simulate(8)
    report = simulated_report(records)
    report["gate"] = decide(load_gate("pico"), Evidence(report, records))
    found = look(to_html(report, records), PROBE, tmp_path, width=width)
    sample = records[1]  # the second of the view, which is in the records' order
    assert found["problems"] == []
    assert found["overflow"] is False
    assert found["tokens"] == 1 + sum(len(entry.emitted) for entry in sample.rounds)
    assert found["now"] == len(sample.rounds[1].emitted)
    assert found["later"] == sum(len(entry.emitted) for entry in sample.rounds[2:])
    assert found["chips"] == len(sample.rounds[1].drafted) + 1
    assert found["says"].startswith(f"Round 2 of 40: 4 drafted, {len(sample.rounds[1].accepted)} accepted")
