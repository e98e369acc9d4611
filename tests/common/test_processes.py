"""Processes of a launch wait for each other, and notice at once when one of them has ended."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm.std import TqdmDefaultWriteLock, tqdm

from specdistill.common import processes
from specdistill.common.errors import ResourceError, UserError, run_and_report
from specdistill.common.processes import (
    all_gather_object,
    check_ranks_agree,
    report_failed_collectives,
)
from tests.processes import fork, run_processes


@pytest.mark.distributed
def test_processes_wait_for_longer_than_a_step_may_take(tmp_path: Path) -> None:
    def arrive_late(rank: int) -> None:
        if rank == 2:
            time.sleep(0.5)
            (tmp_path / "done").touch()
        print(all_gather_object(rank), (tmp_path / "done").exists())
        print(
            processes._open_gloo_group()._get_backend(torch.device("cpu")).options._timeout
            >= timedelta(hours=24)
        )

    results = run_processes(tmp_path, arrive_late, 0, 1, 0)
    assert [process.code for process in results] == [0, 0, 0], results[1].err
    assert [process.out for process in results] == ["[0, 1, 2] True\nTrue\n"] * 3


def report_error(error: Exception) -> int:
    def raise_error() -> int:
        raise error

    return run_and_report(raise_error)


@pytest.mark.distributed
def test_the_end_of_a_process_ends_the_others(tmp_path: Path) -> None:
    def end_one_process(rank: int) -> None:
        all_gather_object(None)
        try:
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            all_gather_object(None)
        except ResourceError as error:
            os.environ["LOCAL_RANK"] = "0"  # that of another waits for a launcher to end it
            os._exit(report_error(error))

    results = run_processes(tmp_path, end_one_process, 0, 1, 0)
    assert [process.code for process in results] == [3, 3, -9]
    assert all(
        "\nerror: another process of this launch has ended" in "\n" + process.err
        for process in results[:2]
    )


@pytest.mark.distributed
def test_a_difference_is_named_with_its_process(tmp_path: Path) -> None:
    def compare_values(rank: int) -> None:
        try:
            check_ranks_agree({"a": "1", "b": "2" if rank < 2 else "3"}, otherwise=": do this")
        except UserError as error:
            print(
                error.key,
                error.got,
                str(error).endswith(": do this"),
                ", expected 2, as in process 0 on " in str(error),
            )

    for process in run_processes(tmp_path, compare_values, 0, 1, 0):
        assert process.out.startswith("b 3 in process 2 on ") and process.out.endswith(
            "True True\n"
        ), process.err


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize("dies", [True, False])
def test_a_process_that_does_not_come_to_a_step_ends_the_others(tmp_path: Path, dies: bool) -> None:
    """The process is dead, or it is later than the timeout of the collective operation.

    In the second case the message of rank 0 names it.
    """

    def run_step(rank: int) -> None:
        processes.FAILED_STEP_TIMEOUT_S = 0.5
        all_gather_object(None)
        try:
            with report_failed_collectives("repeat it"):
                if rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL) if dies else time.sleep(9)
                torch.distributed.all_reduce(torch.zeros(1))
        except ResourceError as error:
            os.environ["LOCAL_RANK"] = "0"  # that of another waits for a launcher to end it
            os._exit(report_error(error))

    first, second, _ = run_processes(tmp_path, run_step, 0, 1, 0, timeout=timedelta(seconds=4))
    assert first.code == second.code == 3
    for process in (first, second):
        assert process.err.count("error: another process of this launch has ended or hangs (") == 1
        assert process.err.endswith("; repeat it\n")
    assert dies or "[Rank 0]: Ranks 2 failed to pass" in first.err


def test_other_failures_are_not_blamed_on_another_process() -> None:
    with pytest.raises(RuntimeError, match="shapes"), report_failed_collectives("repeat it"):
        raise RuntimeError("shapes do not fit")


class OwnLock(tqdm):
    """A progress bar with a lock object of its own, as libraries have them."""

    _lock = TqdmDefaultWriteLock()


@pytest.mark.parametrize("progress_bar", [tqdm, OwnLock])
def test_a_killed_fork_leaves_no_lock_of_progress_bars(progress_bar: type[Any]) -> None:
    def hold_lock() -> None:
        progress_bar.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    process = fork(hold_lock)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    lock = TqdmDefaultWriteLock.mp_lock  # the semaphore, which all forks share
    assert lock.acquire(True, 1)  # blocking, seconds
    lock.release()
