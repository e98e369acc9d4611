"""The processes of one launch before their first step: one on each machine prepares while the others wait, or take a share of what it
has to generate, and all find they hold the same.

A step's collectives give up on a late process within minutes (`train.ddp_timeout`); preparing takes hours. So this waits in a group of its
own, over gloo, whose connections tell at once that a process has ended.
"""

import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

from torch import distributed

from specdistill.errors import ResourceError, UserError

PATIENCE = timedelta(days=2)  # for a process that lives
COMES_WITHIN = 5.0  # seconds, for the processes of a step that failed


def are_several() -> bool:
    """Whether this process has joined others."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def share() -> tuple[int, int]:
    """This process's number among those of the launch, and how many there are."""
    return (distributed.get_rank(), distributed.get_world_size()) if are_several() else (0, 1)


class Crew:
    """What the processes of this machine compute for its first: `work` of one item each. size: how many they are."""

    def __init__(self, work: Callable[..., Any], group: Any = None) -> None:
        self.size = 1 if group is None else distributed.get_world_size(group)
        self._work, self._group = work, group

    def __call__(self, items: Sequence[Any], **own: Any) -> list[Any]:
        """`work(item)` of up to `size` items, that pickle, each in a process of its own. own: more arguments of the call that this one
        makes, of the first item.
        """
        if self._group is None:
            return [self._work(item, **own) for item in items]
        _gathered(list(items), self._group)
        return _gathered(self._work(items[0], **own), self._group)[: len(items)]

    def work(self) -> None:
        """In the other processes, until the first is done."""
        number = distributed.get_rank(self._group)
        while items := _gathered(None, self._group)[0]:
            _gathered(self._work(items[number]) if number < len(items) else None, self._group)

    def end(self) -> None:
        """In the first process."""
        if self._group is not None:
            _gathered(None, self._group)


def _no_work(item: Any) -> None:
    raise AssertionError("nothing to work on")


@contextmanager
def first_on_each_machine(doing: str, work: Callable[..., Any] | None = None) -> Iterator[Crew]:
    """Run a block in the first process of each machine, and then, when all of these have, in the others; `doing` says what takes so long.

    Meanwhile the others compute `work(item)` of what the block, in which it is the crew that this yields, gives to them.
    Raises ResourceError in those that wait for a process that has ended.
    """
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not are_several():
        yield Crew(work or _no_work)
        return
    of_all(None)  # connected, they notice the end of any
    if rank == 1:
        share = "the others wait for it" if work is None else "the others take a share of its work"
        print(f"{socket.gethostname()}: the first process is {doing}, {share}", file=sys.stderr, flush=True)
    crew = Crew(work or _no_work, None if work is None else _machine())
    if rank > 0:
        if work is not None:
            crew.work()
        of_all(None)
    yield crew
    if rank == 0:
        crew.end()
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
    """In torch's words: the first process says which do not come, the others refer to it."""
    try:
        distributed.monitored_barrier(_group(), timeout=timedelta(seconds=COMES_WITHIN), wait_all_ranks=True)
    except RuntimeError as named:
        error = named
    return str(error).splitlines()[0][:200]


def of_all(own: Any) -> list[Any]:
    """What each process passes, in their order; returns when all have come here. Raises ResourceError when one of them has ended, or
    cannot be reached.
    """
    return _gathered(own, _group()) if are_several() else [own]


def _gathered(own: Any, group: Any) -> list[Any]:
    found: list[Any] = [None] * distributed.get_world_size(group)
    try:
        distributed.all_gather_object(found, own, group=group)
    except RuntimeError as error:  # a connection that was closed, or never made
        why = f"another process of this launch has ended or cannot be reached ({str(error).splitlines()[0][:200]})"
        next_step = "what it said tells why; between machines of several networks, GLOO_SOCKET_IFNAME names the one to take"
        raise ResourceError(why, next_step=next_step) from error
    return found


@cache
def _group() -> Any:
    return distributed.new_group(backend="gloo", timeout=PATIENCE)


@cache
def _machine() -> Any:
    """The group of this machine's processes: they follow one another, from local rank 0."""
    firsts = [rank for rank, local_rank in enumerate(of_all(os.environ.get("LOCAL_RANK", "0"))) if local_rank == "0"]
    ends = [*firsts[1:], distributed.get_world_size()]
    machines = [
        distributed.new_group(list(range(first, end)), backend="gloo", timeout=PATIENCE)
        for first, end in zip(firsts, ends, strict=True)
    ]
    (own,) = (group for group in machines if distributed.get_rank(group) >= 0)
    return own
