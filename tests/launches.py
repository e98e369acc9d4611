"""Scripts in the processes of `accelerate launch`, as a user starts them without a GPU."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from specdistill.common.project import ROOT
from tests.tiny import SMALL, write_inputs

CONFIGS = ROOT / "accelerate_configs"
TWO_PROCESSES = ("--num_processes=2", "--main_process_port=0")


def tiny_files(folder: Path) -> list[str]:
    """Write a tiny target and a text file, and return the keys of a run that name them.

    The run has twelve steps over three epochs.
    """
    noise = "loss.noise=0.1"  # of the processes' random numbers
    return [
        *write_inputs(folder),
        "method=eagle",
        noise,
        "draft.ttt_steps=2",
        *SMALL,
        "train.max_steps=12",
    ]


def start(
    script: Path,
    *arguments: str,
    config: str = "ddp",
    options: Sequence[str] = TWO_PROCESSES,
    folder: Path = ROOT,
) -> subprocess.Popen[str]:
    """Start `accelerate launch` in a process group that a test may kill.

    config: a configuration that ships, or a path without its ending. options: of accelerate.
    folder: where it runs.
    """
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        f"--config_file={CONFIGS / config}.yaml",
        *options,
    ]
    return subprocess.Popen(
        [*command, str(script), *arguments],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def environment() -> dict[str, str]:
    """Return the environment of a launch on a CPU.

    The environment's own tools come first, as DeepSpeed looks ninja up by name.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": path,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def finish(process: subprocess.Popen[str]) -> str:
    """Return what a process printed, after killing what is left of its group."""
    output, _ = process.communicate(timeout=900)  # DeepSpeed may compile first
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return output


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, finish(process)
        time.sleep(0.01)
