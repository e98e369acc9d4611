"""A server that specdistill starts: no process of it is left, whichever side ends or is killed.

A server that fails shows the reason.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from specdistill.common.errors import ResourceError
from specdistill.common.project import ROOT
from specdistill.serving.engines import start
from specdistill.serving.engines.guard import build_environment
from specdistill.serving.engines.server import Server
from specdistill.serving.engines.start import start_server
from specdistill.serving.engines.vllm import Version

pytestmark = pytest.mark.timeout(120)  # the limit for a process that does not end
PROGRAM = Path(__file__).with_name("engine_program.py")
SIDE = """
import sys, time
from pathlib import Path
from specdistill.serving.engines import start
start.GRACE_SECONDS = float(sys.argv[2])
with start.start_server(sys.argv[3:], Path(sys.argv[1]), key="eval.engine_command"):
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(start, "GRACE_SECONDS", 0.1)


def start_engine(model, *options):
    return start_server(build_command(model, *options), model / "log", key="eval.engine_command")


def build_command(model, *options):
    return [sys.executable, str(PROGRAM), "vllm", str(model), *options]


def list_processes(model):
    """Return the engine, its child and the guard: all have the model among their arguments."""
    running = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if str(model) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            running.append(process)
    return running


def find_engine(model):
    return next(
        process for process in list_processes(model) if process.cmdline()[1] == str(PROGRAM)
    )


def wait_until_gone(model):
    """Wait until no process is left; the time-out of the test ends a wait that takes for ever."""
    while list_processes(model):
        time.sleep(0.02)


def test_a_started_engine_answers_and_is_gone_afterwards(tmp_path):
    with start_engine(tmp_path) as address:
        assert Server(address, key="", timeout=5).json("/version", Version).version == "0.32.0"
        assert len(list_processes(tmp_path)) == 3  # the guard, the engine and its child
    wait_until_gone(tmp_path)


@pytest.mark.long  # starts one more process
@pytest.mark.parametrize(("number", "grace"), [(signal.SIGKILL, 0.1), (signal.SIGINT, 8.0)])
def test_a_signal_to_specdistill_leaves_no_process(tmp_path, number, grace):
    """An interrupted command does not wait for an engine that takes its time to end."""
    script = [
        sys.executable,
        "-c",
        SIDE,
        str(tmp_path / "log"),
        str(grace),
        *build_command(tmp_path),
    ]
    with subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as side:
        assert side.stdout.readline() == b"ready\n"
        side.send_signal(number)
        side.wait(5)
        assert side.returncode == -number
    wait_until_gone(tmp_path)


@pytest.mark.long  # each case starts three processes
@pytest.mark.parametrize("killed", ["engine", "guard"])
def test_sigkill_of_the_engine_or_its_guard_leaves_no_process(tmp_path, killed):
    with start_engine(tmp_path):
        engine = find_engine(tmp_path)
        if killed == "engine":
            engine.kill()
            wait_until_gone(tmp_path)
        else:
            engine.parent().kill()
    wait_until_gone(tmp_path)


def test_an_engine_that_dies_later_shows_its_last_lines(tmp_path, caplog):
    log = tmp_path / "log"

    def die(address):
        find_engine(tmp_path).kill()
        # The guard must have written the line before it is ended, too.
        while "ended with status" not in log.read_text():
            time.sleep(0.01)
        Server(address, key="", timeout=5).json("/version", Version)

    with pytest.raises(ResourceError), start_engine(tmp_path) as address:
        die(address)
    shown = caplog.messages[0].splitlines()
    assert shown[0] == f"The last lines of {log}:"
    assert "the engine ended with status -9" in shown


def test_an_engine_that_never_answers_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "START_SECONDS", 0.0)
    with (
        pytest.raises(ResourceError, match=" 0 s"),
        start_server(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            tmp_path / "log",
            key="eval.engine_command",
        ),
    ):
        pytest.fail("it answered")


def test_the_engine_sees_its_own_python_only(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    environment = build_environment("/opt/vllm/bin/vllm")
    assert "PYTHONPATH" not in environment
    assert environment["PATH"].startswith(f"/opt/vllm/bin{os.pathsep}")
