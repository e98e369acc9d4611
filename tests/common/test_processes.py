"""Processes of a launch wait for one another, for longer than a step may take, and notice at once
that one has ended."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from specdistill.common import processes
from specdistill.common.errors import ResourceError, UserError, run_and_report
from specdistill.common.processes import (
    all_gather_object,
    check_ranks_agree,
    report_failed_collectives,
)
from tests.processes import run_processes


@pytest.mark.distributed
def test_the_others_wait_for_longer_than_a_step_may_take(tmp_path: Path) -> None:
    def late(rank: int) -> None:
        if rank == 2:
            time.sleep(0.5)
            (tmp_path / "done").touch()
        print(all_gather_object(rank), (tmp_path / "done").exists())
        print(
            processes._open_gloo_group()._get_backend(torch.device("cpu")).options._timeout
            >= timedelta(hours=24)
        )

    ended = run_processes(tmp_path, late, 0, 1, 0)
    assert [process.code for process in ended] == [0, 0, 0], ended[1].err
    assert [process.out for process in ended] == ["[0, 1, 2] True\nTrue\n"] * 3


def told(error: Exception) -> int:
    def fails() -> int:
        raise error

    return run_and_report(fails)


@pytest.mark.distributed
def test_the_end_of_a_process_ends_the_others(tmp_path: Path) -> None:
    def ends(rank: int) -> None:
        all_gather_object(None)
        try:
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            all_gather_object(None)
        except ResourceError as error:
            os.environ["LOCAL_RANK"] = "0"  # that of another waits for a launcher to end it
            os._exit(told(error))

    ended = run_processes(tmp_path, ends, 0, 1, 0)
    assert [process.code for process in ended] == [3, 3, -9]
    assert all(
        "\nerror: another process of this launch has ended" in "\n" + process.err
        for process in ended[:2]
    )


@pytest.mark.distributed
def test_what_differs_is_named_with_its_process(tmp_path: Path) -> None:
    def differ(rank: int) -> None:
        try:
            check_ranks_agree({"a": "1", "b": "2" if rank < 2 else "3"}, otherwise=": do this")
        except UserError as error:
            print(
                error.key,
                error.got,
                str(error).endswith(": do this"),
                ", expected 2, as in process 0 on " in str(error),
            )

    for process in run_processes(tmp_path, differ, 0, 1, 0):
        assert process.out.startswith("b 3 in process 2 on ") and process.out.endswith(
            "True True\n"
        ), process.err


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize("dies", [True, False])
def test_a_process_that_does_not_come_to_a_step_ends_the_others(tmp_path: Path, dies: bool) -> None:
    """Dead, which its launcher says of it, or later than the step's collective operation waits:
    then the first names it."""

    def step(rank: int) -> None:
        processes.FAILED_STEP_TIMEOUT_S = 0.5
        all_gather_object(None)
        try:
            with report_failed_collectives("repeat it"):
                if rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL) if dies else time.sleep(9)
                torch.distributed.all_reduce(torch.zeros(1))
        except ResourceError as error:
            os.environ["LOCAL_RANK"] = "0"  # that of another waits for a launcher to end it
            os._exit(told(error))

    first, second, _ = run_processes(tmp_path, step, 0, 1, 0, timeout=timedelta(seconds=4))
    assert first.code == second.code == 3
    for process in (first, second):
        assert process.err.count("error: another process of this launch has ended or hangs (") == 1
        assert process.err.endswith("; repeat it\n")
    assert dies or "[Rank 0]: Ranks 2 failed to pass" in first.err


def test_other_failures_are_no_other_process_s_fault() -> None:
    with pytest.raises(RuntimeError, match="shapes"), report_failed_collectives("repeat it"):
        raise RuntimeError("shapes do not fit")
