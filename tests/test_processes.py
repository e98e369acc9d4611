"""Processes of a launch wait for the first on their machine, for longer than a step may take, and notice at once that one has ended."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from specdistill import processes
from specdistill.errors import ResourceError, UserError, explain
from specdistill.processes import agree, first_on_each_machine
from tests.processes import run_processes


@pytest.mark.distributed
def test_the_others_wait_for_longer_than_a_step_may_take(tmp_path: Path) -> None:
    """The last is the first of another machine: it works while this machine's first does."""
    elsewhere, done = tmp_path / "elsewhere", tmp_path / "done"

    def in_turn(rank: int) -> None:
        with first_on_each_machine("working"):
            print(done.exists())
            if rank == 2:
                elsewhere.touch()
            if rank == 0:
                while not elsewhere.exists():
                    time.sleep(0.01)
                done.touch()
        agree({"a": "1", "b": "2"})
        print(processes._group()._get_backend(torch.device("cpu")).options._timeout >= timedelta(hours=24))

    first, waiting, last = ended = run_processes(tmp_path, in_turn, 0, 1, 0)
    assert [process.code for process in ended] == [0, 0, 0], waiting.err
    assert [process.out for process in ended] == ["False\nTrue\n", "True\nTrue\n", "False\nTrue\n"]
    assert waiting.err.endswith("the first process is working, the others wait for it\n")
    assert first.err == last.err == ""


@pytest.mark.distributed
def test_the_end_of_a_process_ends_the_others(tmp_path: Path) -> None:
    def ends(rank: int) -> None:
        try:
            with first_on_each_machine("working"):
                if rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
        except ResourceError as error:
            os.environ["LOCAL_RANK"] = "0"  # that of another waits for a launcher to end it
            os._exit(explain(error))

    ended = run_processes(tmp_path, ends, 0, 1, 0)
    assert [process.code for process in ended] == [3, 3, -9]
    assert all("\nerror: another process of this launch has ended" in "\n" + process.err for process in ended[:2])


@pytest.mark.distributed
def test_what_differs_is_named_with_its_process(tmp_path: Path) -> None:
    def differ(rank: int) -> None:
        try:
            agree({"a": "1", "b": "2" if rank < 2 else "3"}, otherwise=": do this")
        except UserError as error:
            print(error.key, error.got, str(error).endswith(": do this"), ", expected 2, as in process 0 on " in str(error))

    for process in run_processes(tmp_path, differ, 0, 1, 0):
        assert process.out.startswith("b 3 in process 2 on ") and process.out.endswith("True True\n"), process.err
