"""make gpu ends each part at its time limit, names the parts that fail and runs the next ones.

No GPU is needed: the parts here are stand-ins that take no time; the last test runs the real ones,
at tiny shapes.
"""

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench import gpu, gpu_parts, gpu_wheels
from specdistill.common.errors import ExitCode, ResourceError
from tests.documented import read_page

# What a stand-in does after it has written {"first": 1}. `results` is its file.
BEHAVIOURS = {
    "works": "results.write('{\"second\": 2}\\n')",
    "fails": "print('a line'); sys.exit('error: no such kernel')",
    "crashes": "print('before', flush=True); os.abort()",
    "hangs": (
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True); print(child.pid,"
        " flush=True); time.sleep(600)"
    ),
    "is slow": "time.sleep(1.2); results.write('{\"second\": 2}\\n')",
    "says NaN": 'results.write(\'{"loss": NaN}\\n{"cut o\')',
}
SCRIPT = (
    "import json, os, subprocess, sys, time; results = open({path!r}, 'a', 1);"
    " results.write('{{\"first\": 1}}\\n'); {behaviour}"
)
# bench/gpu_parts.py with one part replaced by a function that measures something, then breaks.
BROKEN_PART = """
import sys, time
from bench import gpu_parts
def broken(shape):
    yield {{"first": 1}}
    {behaviour}
gpu_parts.PARTS[{name!r}] = broken
sys.exit(gpu_parts.run(gpu_parts.main, gpu_parts.Options))
"""
NAMES = tuple(gpu.PARTS)
WHAT_FAILS = {
    "fails": "exit code 1: error: no such kernel",
    "crashes": "exit code -6: before",
    "hangs": "ended at its time limit of 1 s",
}


def run_stand_ins(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *behaviours: str, **keys: Any
) -> tuple[ExitCode, dict[str, Any]]:
    """Run stand-ins with these behaviours under the names of the first parts.

    Returns the exit code and the results by behaviour.
    """
    names = dict(zip(NAMES, behaviours, strict=False))

    def build_stand_in_command(name: str, options: Any, path: Path) -> list[str]:
        return [
            sys.executable,
            "-S",
            "-c",
            SCRIPT.format(path=str(path), behaviour=BEHAVIOURS[names[name]]),
        ]

    monkeypatch.setattr(gpu, "build_part_command", build_stand_in_command)
    monkeypatch.setattr(gpu, "PARTS", {name: gpu.Part("", 1, 1) for name in names})
    code = gpu.main(gpu.Options(small=True, output_dir=str(folder), **keys))
    (path,) = folder.glob("*.json")
    results = json.loads(path.read_text(), parse_constant=pytest.fail)
    return code, {names[name]: numbers for name, numbers in results.items()}


@pytest.mark.parametrize("behaviour", WHAT_FAILS)
def test_a_part_that_fails_is_named_and_the_next_one_runs(
    behaviour: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    code, results = run_stand_ins(monkeypatch, tmp_path, behaviour, "works")
    assert code == ExitCode.CHECK_FAILED
    assert WHAT_FAILS[behaviour] in results[behaviour]["failed"]
    assert results["works"]["second"] == 2 and "failed" not in results["works"]
    assert WHAT_FAILS[behaviour] in capfd.readouterr().out.rpartition("outcome")[2]
    assert results[behaviour]["first"] == 1
    if behaviour == "fails":
        assert results[behaviour]["output"] == ["a line", "error: no such kernel"]
    if behaviour == "hangs":
        child = int(results[behaviour]["output"][-1])
        assert (
            not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
        )


def test_parts_that_work_end_with_0_and_leave_valid_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, results = run_stand_ins(monkeypatch, tmp_path, "works", "says NaN")
    assert code == ExitCode.DONE
    assert results["says NaN"].items() >= {"first": 1, "loss": "NaN"}.items()


def test_each_part_is_written_before_the_next_one_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reads = f"print('read', json.dumps(json.load(open({str(tmp_path / 'cpu.json')!r}))))"
    monkeypatch.setitem(BEHAVIOURS, "reads", reads)
    run_stand_ins(monkeypatch, tmp_path, "works", "reads")
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("read ")]
    assert json.loads(line.removeprefix("read "))["ceilings"]["second"] == 2


def test_named_parts_are_added_to_the_results_and_all_parts_replace_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, results = run_stand_ins(monkeypatch, tmp_path, "works", "says NaN")
    _, added = run_stand_ins(monkeypatch, tmp_path, "works", "says NaN", parts=["ceilings"])
    assert added["says NaN"] == results["says NaN"]
    _, new_results = run_stand_ins(monkeypatch, tmp_path, "works")
    assert list(new_results) == ["works"]


def test_no_part_starts_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "SHORT_BUDGET_S", 0)
    code, results = run_stand_ins(monkeypatch, tmp_path, "works", short=True)
    assert code == ExitCode.CHECK_FAILED and "not started" in results["works"]["failed"]


def test_the_last_part_gets_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, results = run_stand_ins(monkeypatch, tmp_path, "works", "is slow", short=True)
    assert (
        code == ExitCode.DONE and results["is slow"]["second"] == 2
    )  # its own limit is one second


def test_the_short_form_fits_nine_minutes() -> None:
    limits = gpu.choose_limits(gpu.Options(short=True))
    assert list(limits) == ["ceilings", "tests", "train", "decoding", "compiled"]
    assert sum(limits.values()) <= gpu.SHORT_BUDGET_S
    # The last part may take as long to be killed, and its output to be read.
    assert gpu_wheels.INSTALL_LIMIT_S + gpu.SHORT_BUDGET_S + 2 * gpu.KILL_GRACE_S <= 9 * 60
    assert list(gpu.choose_limits(gpu.Options())) == list(gpu.PARTS) == list(gpu_parts.PARTS)


def test_a_machine_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('Found no NVIDIA driver')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ResourceError, match="Found no NVIDIA driver"):
        gpu.main(gpu.Options(output_dir=str(tmp_path / "results")))
    assert not (tmp_path / "results").exists()


def test_a_part_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.run(gpu.main, gpu.Options, ["parts=[trian]"]) == ExitCode.USER_ERROR
    assert "trian" in capsys.readouterr().err


def test_the_page_states_the_plan_and_the_size_of_the_wheels() -> None:
    text = read_page(gpu.PAGE)
    assert gpu.format_plan(gpu.choose_limits(gpu.Options(short=True))) in text
    carried = gpu_wheels.read_list()["carried"]
    assert f"{len(carried)} wheels, {gpu_wheels.format_size(sum(carried.values()))}" in text


@pytest.mark.extended  # test_gpu_parts.py runs each part of the training and the decoding
@pytest.mark.long  # processes that import torch, one of which compiles
def test_the_short_form_runs_at_tiny_shapes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All parts of the short form run in their processes; one of them fails and one hangs."""
    build_real_command = gpu.build_part_command
    broken = {"ceilings": "raise RuntimeError('no such kernel')", "decoding": "time.sleep(600)"}

    def build_broken_command(name: str, options: Any, path: Path) -> list[str]:
        command = build_real_command(name, options, path)
        if name not in broken:
            return command
        return [
            sys.executable,
            "-c",
            BROKEN_PART.format(name=name, behaviour=broken[name]),
            *command[3:],
        ]

    monkeypatch.setattr(gpu, "build_part_command", build_broken_command)
    # A busy machine may take longer than a GPU machine does; the part that hangs has time to import
    # torch.
    for name in gpu.choose_limits(gpu.Options(short=True)):
        limit_s = 30 if name == "decoding" else 600
        monkeypatch.setitem(gpu.PARTS, name, gpu.Part("", limit_s, limit_s))
    monkeypatch.setattr(gpu, "SHORT_BUDGET_S", 1200)
    code = gpu.main(gpu.Options(short=True, small=True, output_dir=str(tmp_path)))
    assert code == ExitCode.CHECK_FAILED
    results = json.loads((tmp_path / "cpu-short.json").read_text())
    assert list(results) == ["ceilings", "tests", "train", "decoding", "compiled"]
    assert "RuntimeError: no such kernel" in results["ceilings"]["failed"]
    assert (
        results["decoding"]["failed"] == "ended at its time limit of 30 s"
        and results["decoding"]["first"] == 1
    )
    assert "skipped" in results["tests"]["summary"] and not results["tests"]["failures"]
    assert results["train"]["tokens_per_second"] > 0 and results["train"]["peak_memory_gib"] > 0
    assert len(results["train"]["kernels"]) == 10
    assert results["compiled"]["16 tokens, chain"]["verify_ms"] > 0
    assert [name for name in results if "failed" in results[name]] == ["ceilings", "decoding"]
