"""The processes of one launch before their first step: one on each machine prepares while the others wait, and all find they hold the same.

A step's collectives give up on a late process within minutes (`train.ddp_timeout`); preparing takes hours. So this waits in a group of its
own, over gloo, whose connections tell at once that a process has ended.
"""

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

from torch import distributed

from specdistill.errors import ResourceError, UserError

PATIENCE = timedelta(days=2)  # for a process that lives


def are_several() -> bool:
    """Whether this process has joined others."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


@contextmanager
def first_on_each_machine(doing: str) -> Iterator[None]:
    """Run a block in the first process of each machine, and then, when all of these have, in the others; `doing` says what takes so long.

    Raises ResourceError in those that wait for a process that has ended.
    """
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not are_several():
        yield
        return
    of_all(None)  # connected, they notice the end of any
    if rank == 1:
        print(f"{socket.gethostname()}: the first process is {doing}, the others wait for it", file=sys.stderr, flush=True)
    if rank > 0:
        of_all(None)
    yield
    if rank == 0:
        of_all(None)


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


def of_all(own: Any) -> list[Any]:
    """What each process passes, in their order; returns when all have come here. Raises ResourceError when one of them has ended, or
    cannot be reached.
    """
    if not are_several():
        return [own]
    found: list[Any] = [None] * distributed.get_world_size()
    try:
        distributed.all_gather_object(found, own, group=_group())
    except RuntimeError as error:  # a connection that was closed, or never made
        why = f"another process of this launch has ended or cannot be reached ({str(error).splitlines()[0][:200]})"
        next_step = "what it said tells why; between machines of several networks, GLOO_SOCKET_IFNAME names the one to take"
        raise ResourceError(why, next_step=next_step) from error
    return found


@cache
def _group() -> Any:
    return distributed.new_group(backend="gloo", timeout=PATIENCE)
