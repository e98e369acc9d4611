"""eval/gate.py: the same report, judged again."""

import copy
import json

import pytest

from specdistill.command import run
from specdistill.errors import ExitCode
from specdistill.evaluation.report.files import write_report
from tests.eval.test_run_script import script
from tests.evaluation.simulated import simulate, simulated_report

eval_gate = script("gate")


def command(*arguments):
    return run(eval_gate.main, eval_gate.GateOptions, list(arguments))


@pytest.fixture
def folder(tmp_path):
    records = simulate(24)
    write_report(tmp_path / "report", simulated_report(records), records)
    return tmp_path / "report"


def test_a_report_that_passes(folder, capsys):
    assert json.loads((folder / "report.json").read_text())["gate"] == {"passed": False, "rules": []}
    assert command(f"report={folder}/report.json", "gates=default") == ExitCode.DONE
    report = json.loads((folder / "report.json").read_text())
    assert report["gate"]["passed"]
    assert (folder / "report.md").read_text().startswith("# Passed")
    assert "Passed" in (folder / "report.html").read_text()
    assert capsys.readouterr().out.rstrip().endswith("Passed")


def test_a_report_that_fails(folder, tmp_path, capsys):
    gate = tmp_path / "gate.yaml"
    gate.write_text("- {metric: speedup, min: 5}\n")
    before = json.loads((folder / "report.json").read_text())
    assert command(f"report={folder}", f"gates={gate}") == ExitCode.CHECK_FAILED
    after = json.loads((folder / "report.json").read_text())
    assert not after["gate"]["passed"]
    assert {**after, "gate": None} == {**before, "gate": None}
    assert "failed  speedup" in capsys.readouterr().out


def test_a_regression_against_a_baseline(folder, tmp_path, capsys):
    gate = tmp_path / "gate.yaml"
    gate.write_text("- {metric: mean_acceptance_length, max_regression: 0.05}\n")
    better = simulate(24, conditional=(0.95, 0.9, 0.9, 0.9))
    write_report(tmp_path / "before", simulated_report(better), better)
    assert command(f"report={folder}", f"gates={gate}", f"baseline={tmp_path / 'before'}") == ExitCode.CHECK_FAILED
    assert command(f"report={tmp_path / 'before'}", f"gates={gate}", f"baseline={folder}") == ExitCode.DONE
    assert command(f"report={folder}", f"gates={gate}") == ExitCode.CHECK_FAILED
    assert "no baseline report was given" in capsys.readouterr().out


def test_bad_input(folder, tmp_path, capsys):
    assert command("gates=default") == ExitCode.USER_ERROR
    assert "report: got nothing" in capsys.readouterr().err
    assert command(f"report={tmp_path}/nowhere") == ExitCode.USER_ERROR
    assert command(f"report={folder}", "gates=nowhere") == ExitCode.USER_ERROR
    assert command(f"report={folder}", f"baseline={tmp_path}/nowhere") == ExitCode.USER_ERROR
    assert "error: baseline: got" in capsys.readouterr().err
    other = copy.deepcopy(json.loads((folder / "report.json").read_text()))
    other["results"][0]["suite_version"] = "2"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "report.json").write_text(json.dumps(other))
    (tmp_path / "other" / "samples.jsonl").write_text((folder / "samples.jsonl").read_text())
    gate = tmp_path / "gate.yaml"
    gate.write_text("- {metric: speedup, max_regression: 0.05}\n")
    assert command(f"report={folder}", f"gates={gate}", f"baseline={tmp_path / 'other'}") == ExitCode.USER_ERROR
    assert "suite_version" in capsys.readouterr().err
