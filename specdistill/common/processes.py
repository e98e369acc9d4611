"""Let the processes of one launch wait for one another, and check that they agree.

This is for the time before their first step. The collectives of a step give up on a late process
within minutes (`train.ddp_timeout`), but preparing takes hours. So this waits in a separate process
group over gloo, whose connections fail at once when a process has ended.
"""

import atexit
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from accelerate import PartialState
from torch import distributed

from specdistill.common.errors import ResourceError, UserError

GLOO_SECONDS = 0.5  # the time in which gloo's threads free the last tensors
COLLECTIVE_TIMEOUT = timedelta(days=2)  # how long to wait for a process that is alive
# Seconds to wait for the other processes after a step has failed.
FAILED_STEP_TIMEOUT_S = 5.0


def measure_peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this process has held at once, in bytes.

    On CUDA this is device memory, elsewhere all memory of the process.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # getrusage counts in bytes on macOS and in KiB elsewhere.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def init_process_group() -> tuple[int, int]:
    """Join the process group of a launch, and return this process's rank and the world size.

    A command may be launched in several processes, one for each GPU. They leave the group when the
    command ends.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not distributed.is_initialized():
        PartialState(cpu=not torch.cuda.is_available())
        atexit.register(leave_process_group)
    return find_rank_and_world_size()


def leave_process_group() -> None:
    """Leave the process group before the interpreter shuts down.

    gloo's threads may still hold tensors of the last collectives. A thread that frees them while
    the interpreter shuts down aborts the process after its work is done (pytorch/pytorch issue
    190489). There is no way to know when they are freed, so this waits for GLOO_SECONDS.
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()
    if not torch.cuda.is_available():
        time.sleep(GLOO_SECONDS)


def find_rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the world size; 0 and 1 without a process group."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def is_first() -> bool:
    """Return whether this is the first process of the launch.

    The first process writes and prints what all processes have in common.
    """
    return find_rank_and_world_size()[0] == 0


def check_ranks_agree(facts: Mapping[str, str], *, otherwise: str = "") -> None:
    """Check that all processes of the launch hold the same facts.

    Args:
        facts: this process's facts, by name.
        otherwise: appended to the error, what to do about a difference.

    Raises:
        UserError: naming the first difference, its process and its machine.
    """
    (first, expected), *remaining_ranks = all_gather_object((socket.gethostname(), dict(facts)))
    for rank, (machine, rank_facts) in enumerate(remaining_ranks, 1):
        for name in {**expected, **rank_facts}:
            if rank_facts.get(name) != expected.get(name):
                raise UserError(
                    name,
                    got=f"{rank_facts.get(name, 'nothing')} in process {rank} on {machine}",
                    expected=(
                        f"{expected.get(name, 'nothing')}, as in process 0 on {first}{otherwise}"
                    ),
                )


@contextmanager
def report_failed_collectives(next_step: str) -> Iterator[None]:
    """Turn the failure of a collective into an error that says what to do.

    Args:
        next_step: what to do.

    Raises:
        ResourceError: if a collective fails because another process has ended, hangs or is late.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
            raise
        raise ResourceError(
            "another process of this launch has ended or hangs"
            f" ({_describe_missing_processes(error)})",
            next_step=next_step,
        ) from error


def _describe_missing_processes(error: RuntimeError) -> str:
    """Return torch's message about the processes that are missing.

    In the first process it names their ranks, in the others it refers to the first process.
    """
    try:
        distributed.monitored_barrier(
            _group(), timeout=timedelta(seconds=FAILED_STEP_TIMEOUT_S), wait_all_ranks=True
        )
    except RuntimeError as named:
        error = named
    return str(error).splitlines()[0][:200]


def all_gather_object(local_object: object) -> list[Any]:
    """Gather an object from every process; each process waits until all have called this.

    Args:
        local_object: the object of this process.

    Returns:
        The objects of all processes, by rank.

    Raises:
        ResourceError: if a process has ended or cannot be reached.
    """
    _, count = find_rank_and_world_size()
    if count == 1:
        return [local_object]
    objects = [None] * count
    try:
        distributed.all_gather_object(objects, local_object, group=_group())
    except RuntimeError as error:  # A connection was closed, or could not be made.
        raise ResourceError(
            (
                "another process of this launch has ended or cannot be reached"
                f" ({str(error).splitlines()[0][:200]})"
            ),
            next_step=(
                "its own output says why; between machines with several networks,"
                " GLOO_SOCKET_IFNAME selects one"
            ),
        ) from error
    return objects


@cache
def _group() -> distributed.ProcessGroup:
    """Return the process group over gloo, in which processes wait for each other."""
    group: distributed.ProcessGroup = distributed.new_group(
        backend="gloo", timeout=COLLECTIVE_TIMEOUT
    )
    return group


def check_devices(num_processes: int, key: str) -> None:
    """Raise UserError, naming `key`, for more processes than this machine has GPUs.

    Without a GPU the processes share the cores, so any number is accepted.
    """
    devices = torch.cuda.device_count()
    if 0 < devices < num_processes:
        raise UserError(
            key,
            got=f"{num_processes} processes on a machine with {devices} GPU{'s' * (devices > 1)}",
            expected=f"at most {devices} on each machine",
        )
