"""A function in several processes of one group, as launchers on several machines start them."""

import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils.other import get_free_port
from torch import distributed
from tqdm.std import tqdm

# Once its engine has run, which it did in tests before.
needs_gradients_in_forks = pytest.mark.skipif(
    torch.version.cuda is not None,
    reason="torch's CUDA build computes no gradients in a forked process",
)


class EndedProcess(NamedTuple):
    code: int | None
    out: str
    err: str


def fork(work: Callable[..., object], *arguments: object) -> BaseProcess:
    """Start a child of this process, which has the libraries loaded.

    Imports would take longer than what is tested.
    """
    process = multiprocessing.get_context("fork").Process(
        target=_run_forked, args=(work, *arguments)
    )
    with warnings.catch_warnings():
        # Python warns about a fork next to threads; pytest-xdist has one, which only waits.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process


def _run_forked(work: Callable[..., object], *arguments: object) -> None:
    # torch replaces its pool of threads in a forked process, at the next call that asks for one,
    # without a lock: two threads that load weights at once may find none ("Invalid thread pool").
    torch.set_num_threads(torch.get_num_threads())
    _replace_locks_of_progress_bars()
    work(*arguments)


def _replace_locks_of_progress_bars() -> None:
    """Give tqdm a lock that no other process shares.

    tqdm's own lock is a semaphore that a process shares with its forks. A fork that is killed while
    it holds the semaphore never releases it, and then all others wait for ever.
    """
    lock = threading.RLock()
    classes = [tqdm]
    # The list grows while it is read: subclasses may have locks of their own.
    for progress_bar in classes:
        progress_bar.set_lock(lock)
        classes += progress_bar.__subclasses__()


def run_processes(
    folder: Path,
    work: Callable[[int], None],
    *local_ranks: int,
    timeout: timedelta = timedelta(minutes=5),
) -> list[EndedProcess]:
    """Run `work(rank)` for each local rank, at once.

    timeout: of a collective operation.
    """
    own = {
        "WORLD_SIZE": str(len(local_ranks)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(get_free_port()),
    }
    machines = [local_ranks[: rank + 1].count(0) for rank in range(len(local_ranks))]
    started = []
    for rank, (local_rank, machine) in enumerate(zip(local_ranks, machines, strict=True)):
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(machines.count(machine)),
        }
        started.append(fork(_joined, folder, work, rank, timeout, own | place))
    for process in started:
        process.join()
    return [
        EndedProcess(
            process.exitcode,
            *((folder / f"{rank}.{name}").read_text(encoding="utf-8") for name in ("out", "err")),
        )
        for rank, process in enumerate(started)
    ]


def _joined(
    folder: Path,
    work: Callable[[int], None],
    rank: int,
    timeout: timedelta,
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_CREAT | os.O_WRONLY), number)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", closefd=False, buffering=1) for number in (1, 2)
    )
    for state in (AcceleratorState, PartialState):  # of the parent, which is alone
        state._reset_state()
    warnings.simplefilter("ignore")  # libraries warn about launched processes
    distributed.init_process_group("gloo", timeout=timeout)
    work(rank)
    sys.stdout.flush()
    os._exit(0)  # without the end of the interpreter, which gloo's threads may abort
