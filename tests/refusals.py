"""Checks of refusals by their key and value, not by the sentence around them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from specdistill.common.errors import UserError


@contextmanager
def refused(key: str, got: object = "", *, holds: str = "") -> Iterator[None]:
    """Assert that the block raises a UserError about this key.

    got: what its value begins with. holds: what else is in it.
    """
    with pytest.raises(UserError) as caught:
        yield
    assert caught.value.key == key, caught.value
    assert caught.value.got.startswith(str(got)) and holds in caught.value.got, caught.value


def refused_key(stderr: str) -> str:
    """Return the key that a command's only error names."""
    (error,) = (line for line in stderr.splitlines() if line.startswith("error: "))
    said = error.removeprefix("error: ")
    return said.partition(next(mark for mark in (": got ", " is required", ": ") if mark in said))[
        0
    ]
