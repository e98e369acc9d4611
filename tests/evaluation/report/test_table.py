"""`specdistill table` as a user runs it."""

import json
from pathlib import Path

import pytest

from specdistill.common.errors import ExitCode
from specdistill.evaluation.gate.decide import Evidence, decide
from specdistill.evaluation.gate.rules import load_gate
from specdistill.evaluation.report.files import compute_digest, write_report
from tests.refusals import refused_key
from tests.scripts import specdistill
from tests.simulated import simulate, simulated_report


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs: one judged, of a draft with a hard name, and one whose server had no baseline."""
    records = simulate(12)
    judged = simulated_report(records)
    judged["draft"]["model"] = "org/a_draft|50%&"
    judged["draft"]["revision"] = "v1"
    judged["gate"] = decide(load_gate("default"), Evidence(judged, records))
    judged["digest"] = compute_digest(judged, records)
    unjudged = simulated_report(records, lossless={"prompts_checked": 0})
    for name in ("speedup", "speedup_ci95"):
        del unjudged["results"][0][name]
    for name, report in (("a", judged), ("b", unjudged)):
        write_report(tmp_path / "runs" / name / "report", report, records)
    return tmp_path / "runs"


def test_the_table_has_a_row_for_each_report(runs: Path) -> None:
    row = json.loads((runs / "a/report/report.json").read_text(encoding="utf-8"))["results"][0]
    low, high = row["speedup_ci95"]
    shown = specdistill("table", str(runs / "a/report"), str(runs / "b"))
    assert shown.returncode == 0, shown.stderr
    head, _, first, second = shown.stdout.splitlines()
    assert (
        head == "| method | draft | target | suite | K | acceptance length | speedup | lossless |"
        " verdict |"
    )
    assert (
        f"| {row['speedup']:.2f}× ({low:.2f} to {high:.2f}) | yes | passed |" in first
        and r"a_draft\|50%\&" in first
    )
    assert second.endswith("| – | – | – |")

    listed = specdistill("table", f"reports={runs / 'a/report/report.json'},{runs / 'b'}", "--json")
    rows = json.loads(listed.stdout)
    assert (rows[0]["draft"], rows[0]["speedup_low"], rows[0]["verdict"]) == (
        "org/a_draft|50%&@v1",
        low,
        "passed",
    )
    assert (rows[1]["speedup"], rows[1]["lossless"], rows[1]["K"]) == (None, None, 4)

    rows_of_folder = json.loads(specdistill("table", str(runs / "a"), "--json").stdout)
    assert (
        rows_of_folder[0]["acceptance_length"] == row["mean_acceptance_length"]
        and rows_of_folder[0]["lossless"] is True
    )


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ([], "reports"),
        (["nowhere"], "reports"),
        (["reports=."], "reports"),
        (["x", "format=csv"], "format"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_key(
    arguments: list[str], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = specdistill("table", *arguments)
    assert (refused.returncode, refused.stdout) == (ExitCode.USER_ERROR, "") and key in refused_key(
        refused.stderr
    )
