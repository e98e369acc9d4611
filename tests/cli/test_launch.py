"""`specdistill train launch=…` starts processes with accelerate and returns their exit code.

A launch that could not start is refused in one line.
"""

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command
from accelerate.utils.other import get_free_port

from specdistill.cli.launch import LaunchOptions, launch
from specdistill.cli.main import main
from specdistill.common.errors import run_and_report
from specdistill.common.project import LAUNCHES, ROOT, find_yaml
from specdistill.recipe.load import load_recipe
from tests.processes import fork

# The script of the launched processes: it leaves a file with its rank, then ends as it is told to.
PROCESS = """
import os, signal, sys, time
folder, end = sys.argv[1:]
rank = os.environ.get("RANK", "0")
def leave(number, frame):
    with open(f"{folder}/{rank}-signal-{number}", "a") as file:
        file.write("x")
    time.sleep(end == "terminal")  # is there another?
    sys.exit(0)
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, leave)
open(f"{folder}/{rank}-of-{os.environ.get('WORLD_SIZE', '1')}", "w").close()
if end == "code" and rank == "1":
    sys.exit(3)
if end == "killed" and rank == "0":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


def run_launch(folder: Path, end: str, *keys: str) -> int:
    """Launch PROCESS and return the exit code that `specdistill train` ends with."""
    (folder / "process.py").write_text(PROCESS, encoding="utf-8")
    warnings.simplefilter("ignore")  # libraries warn about launched processes
    handler = signal.getsignal(signal.SIGTERM)
    code = run_and_report(
        lambda: launch(folder / "process.py", [str(folder), end], load_recipe(LaunchOptions, keys))
    )
    # A handler that stays would keep the pools of datasets from ending their processes.
    assert signal.getsignal(signal.SIGTERM) == handler
    return code


def start_launch(folder: Path, *arguments: str) -> BaseProcess:
    """Start a launch without a terminal; its messages go to the file `said`."""

    def run() -> None:
        os.setsid()
        os.dup2(os.open(folder / "said", os.O_CREAT | os.O_WRONLY), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False, buffering=1)
        os._exit(run_launch(folder, *arguments))

    return fork(run)


def wait_for_markers(names: set[str], folder: Path) -> None:
    while not list_markers(folder) >= names:
        time.sleep(0.01)


def list_markers(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("[0-9]-*")}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("end", "keys", "message"),
    [
        ("code", ["launch=ddp", "num_processes=2"], ""),
        (
            "killed",
            ["launch=cpu"],
            "error: the process was killed by SIGKILL; the same command resumes",
        ),
    ],
)
def test_the_exit_code_is_that_of_the_process_that_failed(
    end: str, keys: list[str], message: str, tmp_path: Path
) -> None:
    run = start_launch(tmp_path, end, *keys)
    run.join()
    assert run.exitcode == 3
    found = (tmp_path / "said").read_text()
    assert message in found if message else "error" not in found
    assert end == "killed" or {"0-of-2", "1-of-2"} <= list_markers(tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("keys", [["launch=cpu"], ["launch=ddp", "num_processes=2"]])
def test_a_signal_reaches_every_process(keys: list[str], number: int, tmp_path: Path) -> None:
    run = start_launch(tmp_path, "signal", *keys)
    started = {"0-of-1"} if len(keys) == 1 else {"0-of-2", "1-of-2"}
    wait_for_markers(started, tmp_path)
    assert run.pid is not None
    os.kill(run.pid, number)
    run.join()
    assert run.exitcode == (0 if len(keys) == 1 else 128 + number)
    assert list_markers(tmp_path) - started == {f"{name[0]}-signal-{number}" for name in started}


@pytest.mark.distributed
def test_a_terminal_interrupts_a_single_process_once(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about a fork while threads run
        process, terminal = pty.fork()
    if process == 0:
        os._exit(run_launch(tmp_path, "terminal", "launch=cpu"))
    wait_for_markers({"0-of-1"}, tmp_path)
    os.write(terminal, b"\x03")
    os.waitpid(process, 0)
    os.close(terminal)
    assert (tmp_path / "0-signal-2").read_text(encoding="utf-8") == "x"


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


TWO = ["launch=ddp_multinode", "num_processes=2"]
FIRST = [*TWO, "machine_rank=0", "main_process_ip=127.0.0.1"]


def read_error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line of an error, which may follow the command of a launch."""
    (line,) = (line for line in capsys.readouterr().err.splitlines() if not line.startswith("$ "))
    return line


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        (["launch=zero"], "launch: got 'zero', "),
        (["num_processes=2"], "num_processes: only used with launch=NAME. Remove num_processes=2."),
        (["launch=ddp", "num_processes=0"], "num_processes: got 0, "),
        (
            ["launch=ddp", "machine_rank=1"],
            "machine_rank: only used with several machines. Remove machine_rank=1, ",
        ),
        (["launch=ddp_multinode", "num_processes=3"], "num_processes: got 3 on 2 machines, "),
        (TWO, "machine_rank is required with 2 machines: "),
        ([*TWO, "machine_rank=1"], "main_process_ip is required with 2 machines: "),
        ([*TWO, "machine_rank=2", "main_process_ip=a"], "machine_rank: got 2, "),
        (
            [*FIRST, "main_process_port={used}"],
            "launch: Tried to launch distributed communication on port `{used}`, but another",
        ),
    ],
)
def test_keys_that_cannot_start_are_refused_in_one_line(
    keys: list[str], refused: str, used_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "recipe=pico/eagle3", *(key.format(used=used_port) for key in keys)]) == 2
    assert read_error_line(capsys).startswith("error: " + refused.format(used=used_port))


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        (b"distributed_type: [", "launch: got {yaml}: "),
        (b"- 2", "launch: got {yaml}, which holds no keys, "),
        (b"\xff", "launch: got {yaml}: "),
        (b"distributed_type: MULTI_GPU\nprocesses: 2", "launch: got {yaml}: "),
        (b"distributed_type: MULTI_GPU", "{yaml} does not set num_processes. "),
        (b"distributed_type: MULTI_GPU\nnum_processes: 0", "{yaml}: num_processes: got 0, "),
    ],
)
def test_a_configuration_that_cannot_start_is_refused_in_one_line(
    text: bytes, refused: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(text)
    assert main(["train", "recipe=pico/eagle3", f"launch={file}"]) == 2
    assert read_error_line(capsys).startswith("error: " + refused.format(yaml=file))


ONE_MACHINE = {
    "distributed_type": "MULTI_GPU",
    "num_processes": 2,
    "machine_rank": 0,
    "num_machines": 1,
}
TWO_MACHINES = ONE_MACHINE | {"num_machines": 2, "machine_rank": 1, "main_process_ip": "10.0.0.1"}


@pytest.mark.parametrize(
    ("settings", "keys", "understood"),
    [
        (ONE_MACHINE, [], (0, None, 0)),
        (ONE_MACHINE | {"main_process_port": 0}, [], (0, None, 0)),
        (ONE_MACHINE | {"main_process_port": 29411}, ["main_process_port=29412"], (0, None, 29412)),
        (TWO_MACHINES, [], (1, "10.0.0.1", 29500)),
        (
            TWO_MACHINES | {"main_process_port": 29411},
            ["main_process_ip=10.0.0.2"],
            (1, "10.0.0.2", 29411),
        ),
    ],
)
def test_accelerate_gets_the_settings_of_a_configuration(
    settings: dict[str, Any],
    keys: list[str],
    understood: tuple[Any, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Accelerate itself reads the file and the further keys; a port of 0 is any that is free."""
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    started = []
    monkeypatch.setattr(
        "accelerate.commands.launch.launch_command",
        lambda arguments: started.append(_validate_launch_command(arguments)[0]),
    )
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert main(["train", "recipe=pico/eagle3", f"launch={tmp_path / 'mine.yaml'}", *keys]) == 0
    (arguments,) = started
    assert (
        arguments.machine_rank,
        arguments.main_process_ip,
        arguments.main_process_port,
    ) == understood


@pytest.mark.parametrize(
    ("inside", "environment"),
    [
        ("exec specdistill", {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "HEAD": "node0"}),
        (
            "TrainJob",
            {
                "PET_NNODES": "2",
                "PET_NODE_RANK": "1",
                "PET_MASTER_ADDR": "node0",
                "PET_MASTER_PORT": "29400",
            },
        ),
    ],
)
def test_the_examples_of_schedulers_start_this_machine(
    inside: str, environment: dict[str, str], tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    (example,) = [
        block
        for block in re.findall(r"```(?:bash|yaml)\n(.*?)```", page, re.DOTALL)
        if inside in block
    ]
    if inside == "TrainJob":
        trainer = yaml.safe_load(example)["spec"]["trainer"]
        assert trainer["command"] == ["bash", "-c"]
        (example,) = trainer["args"]
    (tmp_path / "specdistill").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    (tmp_path / "specdistill").chmod(0o755)
    environment = {**environment, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-c", example]
    verb, _, *keys = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    options = load_recipe(LaunchOptions, keys)
    assert (
        verb == "train"
        and find_yaml(options.launch, LAUNCHES, "launch").name == "ddp_multinode.yaml"
    )
    assert (
        options.num_machines,
        options.num_processes,
        options.machine_rank,
        options.main_process_ip,
    ) == (2, 16, 1, "node0")


@pytest.mark.long  # two launches of whole commands
@pytest.mark.distributed
def test_machines_with_different_recipes_are_refused(tmp_path: Path) -> None:
    """Recipes are compared before the data is prepared.

    The two machines are on the loopback, in the environment that a Kubernetes pod has.
    """
    port = get_free_port()
    running = []
    for rank in (0, 1):
        machine = [
            *TWO,
            f"machine_rank={rank}",
            "main_process_ip=127.0.0.1",
            f"main_process_port={port}",
        ]
        keys = [*machine, f"train.max_steps={2 + rank}", f"train.output_dir={tmp_path / str(rank)}"]
        pod = {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": "127.0.0.1",
        }
        line = [sys.executable, "-m", "specdistill", "train", "recipe=pico/eagle3", *keys]
        environment = {**os.environ, **pod, "PET_MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
        running.append(
            subprocess.Popen(
                line, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
    for run in running:
        _, said = run.communicate(timeout=120)
        assert run.returncode == 2, said
        (line,) = re.findall("error: .*", said)
        assert (
            line.startswith("error: train.max_steps: got 3 in process 1 on ")
            and ", expected 2, as in process 0 on " in line
        )
