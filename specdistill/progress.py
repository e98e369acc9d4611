"""How far a long task has come: a bar on a terminal; anywhere else a plain line now and then, which a log file can bear."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS = 30.0  # between two plain lines


@contextmanager
def progress(description: str, total: int, unit: str) -> Iterator[Callable[..., None]]:
    """Show on stderr how many of `total` units are done; yields the function that adds a number of them, or 1.

    Without a terminal: a line every SECONDS at most, and one at the end. Only the first process on each machine shows anything.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield lambda count=1: None
    elif sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(description, total=total)
            yield lambda count=1: bar.advance(task, count)
    else:
        done, start = 0, time.monotonic()
        shown = start

        def line(times: str) -> None:
            print(f"{description}: {done} of {total} {unit}, {times}", file=sys.stderr, flush=True)

        def advance(count: int = 1) -> None:
            nonlocal done, shown
            done, now = done + count, time.monotonic()
            if now - shown >= SECONDS and 0 < done < total:
                shown = now
                line(f"{_clock((now - start) * (total / done - 1))} left")

        yield advance
        line(f"took {_clock(time.monotonic() - start)}")


def hide_bars_of_transformers() -> None:
    """Without a terminal, transformers loads and writes weights without its own bars. Does nothing where it is not imported."""
    logging = sys.modules.get("transformers.utils.logging")
    if logging is not None and not sys.stderr.isatty():
        logging.disable_progress_bar()


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
