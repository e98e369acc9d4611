"""eval/gate.py judges a report again."""

import json

import pytest

from specdistill.cli.command import run
from specdistill.common.errors import ExitCode
from specdistill.evaluation.report.files import compute_digest, write_report
from tests.refusals import refused_key
from tests.scripts import load_script
from tests.simulated import edited, simulate, simulated_report

eval_gate = load_script("eval/gate.py")


def run_gate(*arguments):
    return run(eval_gate.main, eval_gate.GateOptions, list(arguments))


def write_simulated_report(folder, records):
    report = simulated_report(records)
    write_report(folder, {**report, "digest": compute_digest(report, records)}, records)


@pytest.fixture
def folder(tmp_path):
    write_simulated_report(tmp_path / "report", simulate(24))
    return tmp_path / "report"


def test_a_report_that_passes_is_written_with_its_verdict(folder, capsys):
    assert json.loads((folder / "report.json").read_text())["gate"] == {
        "verdict": None,
        "passed": False,
        "rules": [],
    }
    assert run_gate(f"report={folder}/report.json", "gates=default") == ExitCode.DONE
    report = json.loads((folder / "default" / "report.json").read_text())
    assert report["gate"]["passed"]
    assert (folder / "default" / "report.md").read_text().startswith("# Passed")
    assert "Passed" in (folder / "default" / "report.html").read_text()
    assert capsys.readouterr().out.rstrip().endswith("Passed")


def test_json_prints_the_report(folder, capsys):
    assert run_gate(f"report={folder}", "--json") == ExitCode.DONE
    assert json.loads(capsys.readouterr().out) == json.loads(
        (folder / "default" / "report.json").read_text()
    )


def test_a_report_that_fails_ends_with_exit_code_one_and_is_kept(folder, tmp_path, capsys):
    gate = tmp_path / "gate.yaml"
    gate.write_text("- {metric: speedup, min: 5}\n")
    before = json.loads((folder / "report.json").read_text())
    assert run_gate(f"report={folder}", f"gates={gate}") == ExitCode.CHECK_FAILED
    assert json.loads((folder / "report.json").read_text()) == before
    after = json.loads((folder / "gate" / "report.json").read_text())
    assert not after["gate"]["passed"]
    assert {**after, "gate": None} == {**before, "gate": None}
    assert "failed  speedup" in capsys.readouterr().out


def test_a_regression_against_a_baseline_fails(folder, tmp_path):
    gate = tmp_path / "gate.yaml"
    gate.write_text("- {metric: mean_acceptance_length, max_regression: 0.05}\n")
    write_simulated_report(tmp_path / "before", simulate(24, conditional=(0.95, 0.9, 0.9, 0.9)))
    assert (
        run_gate(f"report={folder}", f"gates={gate}", f"baseline={tmp_path / 'before'}")
        == ExitCode.CHECK_FAILED
    )
    assert (
        run_gate(f"report={tmp_path / 'before'}", f"gates={gate}", f"baseline={folder}")
        == ExitCode.DONE
    )
    assert run_gate(f"report={folder}", f"gates={gate}") == ExitCode.CHECK_FAILED


def test_a_report_that_was_edited_fails(folder, capsys):
    text = (folder / "report.json").read_text()
    speedup = json.loads(text)["results"][0]["speedup"]
    (folder / "report.json").write_text(text.replace(f'"speedup": {speedup}', '"speedup": 9.99', 1))
    assert run_gate(f"report={folder}", "gates=default") == ExitCode.CHECK_FAILED
    assert "changed after they were measured" in capsys.readouterr().out
    assert (
        run_gate(f"report={folder}", "gates=release", f"baseline={folder}") == ExitCode.USER_ERROR
    )
    assert refused_key(capsys.readouterr().err) == "baseline"
    report = json.loads(text)
    del report["digest"]
    (folder / "report.json").write_text(json.dumps(report))
    assert run_gate(f"report={folder}", "gates=default") == ExitCode.USER_ERROR
    assert refused_key(capsys.readouterr().err) == "report"


def test_a_first_release_passes_with_baseline_none(folder, tmp_path, capsys):
    gate = tmp_path / "mine.yaml"
    gate.write_text(
        "- {metric: speedup, min: 1}\n- {metric: mean_acceptance_length, max_regression: 0.03}\n"
    )
    assert run_gate(f"report={folder}", f"gates={gate}") == ExitCode.CHECK_FAILED
    assert "baseline=none" in capsys.readouterr().out
    assert run_gate(f"report={folder}", f"gates={gate}", "baseline=none") == ExitCode.DONE
    assert "first release" in (folder / "mine" / "report.html").read_text()


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        (["report={folder}", "output_dir={folder}"], "output_dir"),
        # No rule of this gate compares with a baseline.
        (["report={folder}", "baseline={folder}"], "baseline"),
        (["gates=default"], "report"),
        (["report={folder}/nowhere"], "report"),
        (["report={folder}", "gates=nowhere"], "gates"),
        (["report={folder}", "gates=release", "baseline={folder}/nowhere"], "baseline"),
    ],
)
def test_bad_input_is_refused_by_its_key(folder, capsys, keys, key):
    assert run_gate(*(argument.format(folder=folder) for argument in keys)) == ExitCode.USER_ERROR
    assert refused_key(capsys.readouterr().err) == key


def test_a_baseline_that_cannot_be_compared_is_refused_with_the_difference(
    folder, tmp_path, capsys
):
    other = edited(json.loads((folder / "report.json").read_text()), ("suite", "sha256"), "f" * 64)
    write_report(
        tmp_path / "other", {**other, "digest": compute_digest(other, simulate(24))}, simulate(24)
    )
    (tmp_path / "gate.yaml").write_text("- {metric: speedup, max_regression: 0.05}\n")
    keys = [f"report={folder}", f"gates={tmp_path / 'gate.yaml'}", f"baseline={tmp_path / 'other'}"]
    assert run_gate(*keys) == ExitCode.USER_ERROR
    (message,) = capsys.readouterr().err.strip().splitlines()
    assert message.startswith("error: baseline: got") and "suite.sha256 ffff" in message
    assert not (folder / "gate").exists()


@pytest.mark.parametrize("number", ["NaN", "Infinity"])
def test_nan_and_infinity_in_the_report_are_refused(folder, capsys, number):
    path = folder / "report.json"
    speedup = json.loads(path.read_text())["results"][0]["speedup"]
    path.write_text(path.read_text().replace(str(speedup), number))
    assert run_gate(f"report={folder}") == ExitCode.USER_ERROR
    assert number in capsys.readouterr().err


def test_nan_in_the_samples_is_refused(folder, capsys):
    samples = folder / "samples.jsonl"
    row, *rest = samples.read_text().splitlines()
    timing = json.loads(row)["speculative"]["seconds"]
    samples.write_text("\n".join([row.replace(str(timing), "NaN"), *rest]))
    assert run_gate(f"report={folder}") == ExitCode.USER_ERROR
    assert "samples.jsonl" in (printed := capsys.readouterr().err) and "NaN" in printed
