"""Long tasks: what one will cost, printed before it is paid, and how far it is: a bar on a terminal, else a line now and then."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from specdistill.errors import ResourceError
from specdistill.terminal import Console

SECONDS = 30.0  # between two plain lines
PREPARED_BYTES = 18  # of a token as a document (4 + 1) and in a packed row (3 · 4 + 1)


@contextmanager
def progress(description: str, total: int, unit: str) -> Iterator[Callable[..., None]]:
    """Show on stderr how many of `total` units are done; yields the function that adds a number of them, or 1, and `more` to the total.

    Without a terminal: a line every SECONDS at most, and one at the end. Only the first process on each machine shows anything.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield lambda count=1, more=0: None
    elif sys.stderr.isatty():
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(description, total=total)
            yield lambda count=1, more=0: bar.update(
                task, advance=count, total=bar.tasks[0].total + more
            )
    else:
        done, start = 0, time.monotonic()
        shown = start

        def line(times: str) -> None:
            print(f"{description}: {done} of {total} {unit}, {times}", file=sys.stderr, flush=True)

        def advance(count: int = 1, more: int = 0) -> None:
            nonlocal done, shown, total
            done, total, now = done + count, total + more, time.monotonic()
            if now - shown >= SECONDS and 0 < done < total:
                shown = now
                line(f"{clock((now - start) * (total / done - 1))} left")

        yield advance
        line(f"took {clock(time.monotonic() - start)}")


def hide_bars_of_transformers() -> None:
    """Without a terminal, transformers loads and writes weights without its own bars. Does nothing where it is not imported."""
    logging = sys.modules.get("transformers.utils.logging")
    if logging is not None and not sys.stderr.isatty():
        logging.disable_progress_bar()


def clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


class Cost(NamedTuple):
    """rows, tokens, loss_tokens: that come of it. num_bytes: on the disk. seconds: it takes."""

    rows: float
    tokens: float
    loss_tokens: float
    num_bytes: float
    seconds: float

    def times(self, factor: float) -> "Cost":
        return Cost(*(value * factor for value in self))


def free_bytes(folder: Path) -> int:
    """On the disk of a folder, which need not exist yet."""
    existing = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
    )
    return shutil.disk_usage(existing).free


def announce(doing: str, cost: Cost, sample: str, folder: Path, *, force: bool = False) -> None:
    """Print a pass's cost to stderr. Raises ResourceError when the disk of `folder` has no room for it, unless `force`.

    sample: what it is estimated from.
    """
    free, taken = decimal(left := free_bytes(folder)), decimal(int(cost.num_bytes))
    minutes = cost.seconds / 60
    table = Table(doing, "estimate")
    for name, count in (
        ("rows", cost.rows),
        ("tokens", cost.tokens),
        ("loss tokens", cost.loss_tokens),
    ):
        table.add_row(name, f"{count:,.0f}")
    table.add_row("disk", f"{taken} ({free} free)")
    table.add_row("time", f"{minutes / 60:,.1f} h" if minutes >= 60 else f"{minutes:.1f} min")
    table.add_row("estimated from", sample)
    Console(stderr=True).print(table)
    if cost.num_bytes > left and not force:
        next_step = "free disk space, set data.cache_dir to a larger disk, or begin anyway (data.force=true)"
        raise ResourceError(
            f"{doing} takes about {taken} in {folder}, whose disk has {free} left",
            next_step=next_step,
        )
