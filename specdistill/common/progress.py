"""Print what a long task will cost before it starts, and its progress while it runs.

Progress is a bar on a terminal, and elsewhere a line now and then.
"""

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
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from specdistill.common.errors import ResourceError
from specdistill.common.terminal import Console

SECONDS = 30.0  # the least time between two plain lines
# The fewest parts that must be done before the time left is estimated. The first part reads
# weights, compiles and fills caches, so its time says little about the others.
MIN_PARTS = 3
# Bytes on disk of a token as a document (4 + 1) and in a packed row (3 · 4 + 1).
PREPARED_BYTES = 18


class TimeLeft(TimeRemainingColumn):
    """A column that shows the time left, once MIN_PARTS parts are done."""

    def render(self, task: Task) -> Text:
        if task.fields["parts"] < MIN_PARTS:
            return Text("-:--:--", style="progress.remaining")
        return super().render(task)


@contextmanager
def show_progress(description: str, total: int, unit: str) -> Iterator[Callable[..., None]]:
    """Show on stderr how many units of a task are done.

    Without a terminal there is a line every SECONDS at most, and one at the end. Only the first
    process on each machine shows anything. The time left is shown once MIN_PARTS calls have added
    something.

    Args:
        description: the task.
        total: units of the whole task.
        unit: the name of a unit, in the plural.

    Yields:
        A function that adds `count` units, by default 1, to those that are done, and `more` units
        to the total.
    """
    parts = 0

    # Only the first process of a machine shows progress.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield lambda count=1, more=0: None

    # A terminal gets a bar.
    elif sys.stderr.isatty():
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeLeft(),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(description, total=total, parts=parts)

            def advance_bar(count: int = 1, more: int = 0) -> None:
                nonlocal parts, total
                parts += count > 0
                total += more
                bar.update(task, advance=count, total=total, parts=parts)

            yield advance_bar
    else:
        # Anything else, such as a log file, gets lines from time to time.
        num_done = 0
        start = time.monotonic()
        shown = start

        def line(times: str) -> None:
            print(
                f"{description}: {num_done} of {total} {unit}, {times}", file=sys.stderr, flush=True
            )

        def advance(count: int = 1, more: int = 0) -> None:
            nonlocal num_done, parts, shown, total
            num_done = num_done + count
            total = total + more
            now = time.monotonic()
            parts += count > 0
            if now - shown >= SECONDS and 0 < num_done < total:
                shown = now
                line(
                    f"{format_clock((now - start) * (total / num_done - 1))} left"
                    if parts >= MIN_PARTS
                    else f"after {format_clock(now - start)}"
                )

        yield advance
        line(f"took {format_clock(time.monotonic() - start)}")


def hide_bars_of_transformers() -> None:
    """Hide the progress bars of transformers if stderr is not a terminal.

    transformers shows them while it loads and writes weights. This does nothing if transformers is
    not imported.
    """
    logging = sys.modules.get("transformers.utils.logging")
    if logging is not None and not sys.stderr.isatty():
        logging.disable_progress_bar()


def format_clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds, e.g. 0:01:30."""
    return str(timedelta(seconds=round(seconds)))


def format_speed(tokens_per_second: float | None) -> str:
    """Return a speed with its significant decimals: 1,234, 12, 2.5 or 0.46; – for None."""
    if tokens_per_second is None:
        return "–"
    decimals = 0 if tokens_per_second >= 10 else 1 if tokens_per_second >= 1 else 2
    return f"{tokens_per_second:,.{decimals}f}"


class Cost(NamedTuple):
    """The cost of a task, and what it produces.

    Attributes:
        rows: rows that it produces.
        tokens: tokens of these rows.
        loss_tokens: loss tokens among them.
        num_bytes: bytes that it takes on the disk.
        seconds: time that it takes.
    """

    rows: float
    tokens: float
    loss_tokens: float
    num_bytes: float
    seconds: float

    def times(self, factor: float) -> "Cost":
        """Return the cost of a task that is `factor` times as large."""
        return Cost(*(value * factor for value in self))


def find_free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(
        next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    ).free


def announce(doing: str, cost: Cost, sample: str, folder: Path, *, force: bool = False) -> None:
    """Print the cost of a task to stderr before it starts.

    Args:
        doing: the task.
        cost: its cost.
        sample: what the cost is estimated from.
        folder: the folder that it writes to.
        force: start even if the disk has too little room.

    Raises:
        ResourceError: if the disk of the folder has too little room, unless `force`.
    """
    free, needed_space = (
        decimal(free_space_bytes := find_free_bytes(folder)),
        decimal(int(cost.num_bytes)),
    )
    minutes = cost.seconds / 60
    table = Table(doing, "estimate")
    for name, count in (
        ("rows", cost.rows),
        ("tokens", cost.tokens),
        ("loss tokens", cost.loss_tokens),
    ):
        table.add_row(name, f"{count:,.0f}")
    table.add_row("disk", f"{needed_space} ({free} free)")
    table.add_row("time", f"{minutes / 60:,.1f} h" if minutes >= 60 else f"{minutes:.1f} min")
    table.add_row("estimated from", sample)
    Console(stderr=True).print(table)
    if cost.num_bytes > free_space_bytes and not force:
        raise ResourceError(
            f"{doing} takes about {needed_space} in {folder}, whose disk has {free} left",
            next_step=(
                "free disk space, set data.cache_dir to a larger disk, or begin anyway"
                " (data.force=true)"
            ),
        )
