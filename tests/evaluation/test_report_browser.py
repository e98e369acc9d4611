"""The page in a real browser: no errors in its console, and the token view works."""

import shutil
import subprocess

import pytest

from specdistill.evaluation.gate import Evidence, decide, load_gate
from specdistill.evaluation.report.files import write_report
from tests.evaluation.simulated import simulate, simulated_report

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))), None
)
WATCH = """<script>
window.problems = [];
window.addEventListener("error", event => problems.push(String(event.message)));
window.addEventListener("securitypolicyviolation", event => problems.push(event.blockedURI));
</script>"""
PROBE = """<script>
const at2 = id => document.getElementById(id);
at2("sample").value = 1;
at2("sample").onchange({target: at2("sample")});
at2("slider").value = 2;
at2("slider").oninput({target: at2("slider")});
document.title = JSON.stringify({
  problems,
  tokens: document.querySelectorAll("#text .t").length,
  now: document.querySelectorAll("#text .now").length,
  later: document.querySelectorAll("#text .later").length,
  chips: document.querySelectorAll("#chips .chip").length,
  says: at2("says").textContent,
  overflow: document.documentElement.scrollWidth > document.documentElement.clientWidth,
});
</script>"""


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")
def test_the_page_works_in_a_browser(tmp_path):
    import json
    import re

    records = simulate(8)
    report = simulated_report(records)
    report["gate"] = decide(load_gate("pico"), Evidence(report, records))
    write_report(tmp_path, report, records)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    probed = page.replace("<style>", WATCH + "<style>", 1).replace("</body>", PROBE + "</body>")
    (tmp_path / "probed.html").write_text(probed, encoding="utf-8")
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=500,900", "--virtual-time-budget=3000", "--dump-dom"]
    result = subprocess.run(
        [*command, (tmp_path / "probed.html").as_uri()], capture_output=True, text=True, timeout=120, check=False
    )
    assert ":CONSOLE" not in result.stderr, result.stderr
    found = json.loads(
        re.search(r"<title>(.*?)</title>", result.stdout, re.DOTALL)[1].replace("&amp;", "&").replace("&gt;", ">")
    )
    sample = records[1]  # the second of the view, which is in the records' order
    assert found["problems"] == []
    assert found["overflow"] is False
    assert found["tokens"] == 1 + sum(len(entry.emitted) for entry in sample.rounds)
    assert found["now"] == len(sample.rounds[1].emitted)
    assert found["later"] == sum(len(entry.emitted) for entry in sample.rounds[2:])
    assert found["chips"] == len(sample.rounds[1].drafted) + 1
    assert found["says"].startswith(f"Round 2 of 40: 4 drafted, {len(sample.rounds[1].accepted)} accepted")
