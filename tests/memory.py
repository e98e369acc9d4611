"""How much memory Python code takes at its peak."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_most(num_bytes: float) -> Iterator[None]:
    """Assert that the block never holds more bytes of objects that it made."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < num_bytes, f"{peak:,} bytes"
