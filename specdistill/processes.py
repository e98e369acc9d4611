"""The processes of one launch before their first step: they wait for one another, and check that they hold the same.

A step's collectives give up on a late process within minutes (`train.ddp_timeout`); preparing takes hours. So this waits in a group of its
own, over gloo, whose connections fail at once when a process has ended.
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

from specdistill.errors import ResourceError, UserError

GLOO_SECONDS = 0.5  # for gloo's threads to free the last tensors
PATIENCE = timedelta(days=2)  # for a process that lives
COMES_WITHIN = 5.0  # seconds, for the processes of a step that failed


def peak_memory_bytes(device: torch.device) -> int:
    """The accelerator's that this process held at once, or without one all of this process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def join() -> tuple[int, int]:
    """`share` of a command that is launched in several processes, one for each GPU. They leave at its end."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not distributed.is_initialized():
        PartialState(cpu=not torch.cuda.is_available())
        atexit.register(leave)
    return share()


def leave() -> None:
    """Leave the group while the interpreter is whole.

    gloo's threads may still hold tensors of the last collectives; a thread that frees them while the interpreter shuts down aborts the
    process after its work is done (pytorch/pytorch issue 190489). Nothing tells when they are freed, so this waits.
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()
    if not torch.cuda.is_available():
        time.sleep(GLOO_SECONDS)


def share() -> tuple[int, int]:
    """This process's number among those of the launch, and how many have joined it."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def is_first() -> bool:
    """Whether this process writes and prints what all of the launch have in common."""
    return share()[0] == 0


def agree(facts: Mapping[str, str], *, otherwise: str = "") -> None:
    """Compare what every process holds under the same names. Raises UserError, naming the first difference and its machine.

    otherwise: what to do then.
    """
    (first, expected), *others = of_all((socket.gethostname(), dict(facts)))
    for rank, (machine, found) in enumerate(others, 1):
        for name in {**expected, **found}:
            if found.get(name) != expected.get(name):
                got = f"{found.get(name, 'nothing')} in process {rank} on {machine}"
                wanted = f"{expected.get(name, 'nothing')}, as in process 0 on {first}"
                raise UserError(name, got=got, expected=wanted + otherwise)


@contextmanager
def collectives(next_step: str) -> Iterator[None]:
    """Raises ResourceError for a collective operation of a step that fails because another process has ended, hangs or is late."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
            raise
        why = f"another process of this launch has ended or hangs ({_who_is_missing(error)})"
        raise ResourceError(why, next_step=next_step) from error


def _who_is_missing(error: RuntimeError) -> str:
    """torch's message: in the first process it names the ranks that are missing, in the others it refers to that process."""
    try:
        distributed.monitored_barrier(
            _group(), timeout=timedelta(seconds=COMES_WITHIN), wait_all_ranks=True
        )
    except RuntimeError as named:
        error = named
    return str(error).splitlines()[0][:200]


def of_all(own: Any) -> list[Any]:
    """What each process passes, by rank; returns when all have called it. Raises ResourceError when one has ended or is unreachable."""
    _, count = share()
    if count == 1:
        return [own]
    found: list[Any] = [None] * count
    try:
        distributed.all_gather_object(found, own, group=_group())
    except RuntimeError as error:  # a connection that was closed, or never made
        why = f"another process of this launch has ended or cannot be reached ({str(error).splitlines()[0][:200]})"
        next_step = "its own output says why; between machines with several networks, GLOO_SOCKET_IFNAME selects one"
        raise ResourceError(why, next_step=next_step) from error
    return found


@cache
def _group() -> Any:
    return distributed.new_group(backend="gloo", timeout=PATIENCE)
