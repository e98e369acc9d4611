"""Faults on demand: what a request meets instead of an answer, or beside it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["status", "cut", "lost", "corrupt", "slow", "conflict"]


@dataclass
class Fault:
    """What the next `times` requests of a route meet, after `skip` of them went well.

    status: answered with `status`, and nothing is done.
    cut: the connection ends in the middle of the body, of the answer's, or of the request's where one is sent; nothing is done.
    lost: all is done, and the connection ends before the answer.
    corrupt: one byte of the body, sent or received, is another.
    slow: `call()` in the middle of the body.
    conflict: another commit lands on the branch just before.

    `route` is a name in routes.ROUTES; `path` is in the request's path.
    """

    kind: Kind
    route: str
    times: int = 1
    skip: int = 0
    path: str = ""
    status: int = 500
    call: Callable[[], None] | None = None


class Faults:
    def __init__(self) -> None:
        self.waiting: list[Fault] = []
        self._lock = threading.Lock()

    def inject(self, fault: Fault) -> None:
        self.waiting.append(replace(fault))

    def clear(self) -> None:
        with self._lock:
            self.waiting.clear()

    def meets(self, route: str, path: str) -> Fault | None:
        """The fault that this request meets."""
        with self._lock:
            for fault in self.waiting:
                if fault.route != route or fault.path not in path:
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                if not fault.times:
                    self.waiting.remove(fault)
                return fault
        return None


def with_another_byte(content: bytes, index: int) -> bytes:
    """A letter becomes its capital, so that base64 stays base64."""
    return content[:index] + bytes([content[index] ^ 0x20]) + content[index + 1 :]
