"""Let the processes of one launch wait for each other, and check that they agree.

These functions are for the time before the first training step. In a step, a collective of
torch.distributed gives up on a late process after `train.ddp_timeout`, that is after minutes.
Preparing data may take hours. So processes that prepare wait for each other in a separate process
group over gloo with a longer timeout. Its connections fail at once when a process ends.
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

# How long to wait at the end for gloo's threads, which free the last tensors (see
# `leave_process_group`). Longer is safer, and delays every launch on CPUs.
GLOO_SECONDS = 0.5
# How long to wait for a process that is alive. Generating data may take this long.
COLLECTIVE_TIMEOUT = timedelta(days=2)
# How long to wait for answers of the other processes after a step has failed. Processes that still
# run answer at once.
FAILED_STEP_TIMEOUT_S = 5.0


def measure_peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this process has used at any time so far, in bytes.

    On a CUDA device this is the GPU memory that torch allocated for tensors. On other devices it is
    the main memory of the whole process.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # getrusage counts in bytes on macOS and in KiB elsewhere.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def init_process_group() -> tuple[int, int]:
    """Join the process group of a launch, and return this process's rank and the world size.

    A launch runs the same command in several processes, one for each GPU. Each process leaves the
    group when it ends. Without a launch, the rank is 0 and the world size is 1.
    """
    # The launcher sets WORLD_SIZE. accelerate's PartialState creates the process group.
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not distributed.is_initialized():
        PartialState(cpu=not torch.cuda.is_available())
        atexit.register(leave_process_group)
    return find_rank_and_world_size()


def leave_process_group() -> None:
    """Leave the process group before the interpreter shuts down.

    The threads of gloo may still hold tensors of the last collectives. If a thread frees a tensor
    while the interpreter shuts down, the process aborts, although its work is done
    (pytorch/pytorch issue 190489). torch does not say when the tensors are freed, so this function
    waits a fixed time, GLOO_SECONDS. Processes on GPUs, which train with NCCL, do not wait.
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()
    if not torch.cuda.is_available():
        time.sleep(GLOO_SECONDS)


def find_rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the number of processes; 0 and 1 without a process group."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def is_first() -> bool:
    """Return whether this is the first process of the launch (rank 0).

    The first process writes files and prints results for all processes.
    """
    return find_rank_and_world_size()[0] == 0


def check_ranks_agree(facts: Mapping[str, str], *, otherwise: str = "") -> None:
    """Check that all processes of the launch have the same values, for example the same weights.

    Args:
        facts: the values of this process: name -> value. The error shows a name and its values.
        otherwise: text at the end of the error that says what to do if values differ.

    Raises:
        UserError: naming the first difference, its process and its machine.
    """
    # Compare each process with process 0. Host names are gathered too, for the error.
    gathered = all_gather_object((socket.gethostname(), dict(facts)))
    first_machine, expected = gathered[0]
    for rank, (machine, rank_facts) in enumerate(gathered[1:], 1):
        # A name may also be missing in one of the two processes.
        for name in {**expected, **rank_facts}:
            if rank_facts.get(name) != expected.get(name):
                raise UserError(
                    name,
                    got=f"{rank_facts.get(name, 'nothing')} in process {rank} on {machine}",
                    expected=(
                        f"{expected.get(name, 'nothing')}, as in process 0 on"
                        f" {first_machine}{otherwise}"
                    ),
                )


@contextmanager
def report_failed_collectives(next_step: str) -> Iterator[None]:
    """Turn the failure of a collective in a `with` block into an error that says what to do.

    A collective of torch.distributed, such as all_reduce, fails if another process has ended or
    hangs.

    Args:
        next_step: what the user can do; the error ends with it.

    Raises:
        ResourceError: if a collective fails. The error names the processes that do not answer.
    """
    try:
        yield
    except RuntimeError as error:
        # NCCL raises a DistError. gloo raises a plain RuntimeError, which can only be recognized by
        # its text. Any other RuntimeError is not about collectives.
        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
            raise
        raise ResourceError(
            "another process of this launch has ended or hangs"
            f" ({_describe_missing_processes(error)})",
            next_step=next_step,
        ) from error


def _describe_missing_processes(error: RuntimeError) -> str:
    """Return a message of torch that says which processes do not answer any more.

    In process 0, torch's message names the ranks of these processes. In any other process, the
    message refers to process 0.

    Args:
        error: the error of the failed collective. If all processes answer, its message is returned.
    """
    # A monitored barrier fails if some processes do not reach it in time, and its error names them.
    # With `wait_all_ranks` it names all of them, not only the first.
    try:
        distributed.monitored_barrier(
            _open_gloo_group(),
            timeout=timedelta(seconds=FAILED_STEP_TIMEOUT_S),
            wait_all_ranks=True,
        )
    except RuntimeError as barrier_error:
        error = barrier_error
    # Only the first line is a message; a stack trace in C++ follows.
    return str(error).splitlines()[0][:200]


def all_gather_object(local_object: object) -> list[Any]:
    """Gather an object from every process. Each process waits until all have called this function.

    Args:
        local_object: the object of this process, which pickle must be able to send.

    Returns:
        The objects of all processes, in the order of their ranks.

    Raises:
        ResourceError: if a process has ended or cannot be reached.
    """
    _, count = find_rank_and_world_size()
    if count == 1:
        return [local_object]
    objects = [None] * count
    try:
        distributed.all_gather_object(objects, local_object, group=_open_gloo_group())
    except RuntimeError as error:  # A connection was closed, or could not be opened.
        raise ResourceError(
            (
                "another process of this launch has ended or cannot be reached"
                f" ({str(error).splitlines()[0][:200]})"
            ),
            next_step=(
                "read the output of that process for the reason; if the machines have several"
                " networks, select one with GLOO_SOCKET_IFNAME"
            ),
        ) from error
    return objects


@cache
def _open_gloo_group() -> distributed.ProcessGroup:
    """Return the process group over gloo in which processes wait for each other.

    The first call creates the group, which is cached. All processes have to call this function,
    because torch creates a group only if all of them do.
    """
    group: distributed.ProcessGroup = distributed.new_group(
        backend="gloo", timeout=COLLECTIVE_TIMEOUT
    )
    return group


def check_devices(num_processes: int, key: str) -> None:
    """Raise UserError, naming `key`, if there are more processes than GPUs on this machine.

    Without a GPU any number of processes is accepted, because they share the CPU.
    """
    devices = torch.cuda.device_count()
    if 0 < devices < num_processes:
        raise UserError(
            key,
            got=f"{num_processes} processes on a machine with {devices} GPU{'s' * (devices > 1)}",
            expected=f"at most {devices} on each machine",
        )
