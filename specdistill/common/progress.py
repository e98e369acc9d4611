"""Print the estimated cost of a long task before it starts, and its progress while it runs.

On a terminal, progress is a bar. Elsewhere, such as in a log file, it is a line now and then.
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
from specdistill.common.folders import find_existing_folder
from specdistill.common.terminal import Console

SECONDS = 30.0  # the shortest time between two lines of progress outside a terminal
# How many parts must be done before the remaining time is estimated. The first part also reads
# weights, compiles and fills caches, so its time says little about later parts.
MIN_PARTS = 3
# Bytes that a training token takes on the disk: 4 for the id and 1 for the mask in a document, and
# three columns of 4 bytes and 1 for the mask in a packed row.
PREPARED_BYTES = 18


class TimeLeft(TimeRemainingColumn):
    """A column of a progress bar that shows the remaining time, once MIN_PARTS parts are done."""

    def render(self, task: Task) -> Text:
        """Return the remaining time, or dashes while too few parts of the task are done."""
        if task.fields["parts"] < MIN_PARTS:
            return Text("-:--:--", style="progress.remaining")
        return super().render(task)


@contextmanager
def show_progress(description: str, total: int, unit: str) -> Iterator[Callable[..., None]]:
    """Show on stderr how many units of a task are done.

    On a terminal this is a bar. Elsewhere it is at most one line every SECONDS, and one at the end.
    Only the first process on each machine shows anything.

    A task is done in parts, each of one or more units. The remaining time is shown as soon as
    MIN_PARTS parts are done.

    Args:
        description: the task, such as "Making shards".
        total: the number of units of the whole task.
        unit: the name of a unit in the plural, such as "shards".

    Yields:
        A function `advance(count=1, more=0)`. A call says that a part with `count` units is done,
        and adds `more` units to the task. With count=0 it only adds units.
    """
    num_parts = 0  # parts of the task that are done

    # In other processes than the first on a machine, `advance` does nothing.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield lambda count=1, more=0: None

    # On a terminal, show a bar.
    elif sys.stderr.isatty():
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeLeft(),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(description, total=total, parts=num_parts)

            def advance_bar(count: int = 1, more: int = 0) -> None:
                """Show that a part with `count` units is done, and that `more` units were added."""
                nonlocal num_parts, total
                # With count=0 the call only adds units: no part is done.
                if count > 0:
                    num_parts += 1
                total += more
                bar.update(task, advance=count, total=total, parts=num_parts)

            yield advance_bar
    else:
        # Elsewhere, such as in a log file, print a line from time to time.
        num_done = 0  # units that are done
        start = time.monotonic()
        last_printed = start

        def print_line(duration: str) -> None:
            line = f"{description}: {num_done} of {total} {unit}, {duration}"
            print(line, file=sys.stderr, flush=True)

        def advance(count: int = 1, more: int = 0) -> None:
            """Count a finished part of the task, and print a line if the last one is old enough.

            Args:
                count: the units of the part; 0 for a call that only adds units to the task.
                more: units to add to the task.
            """
            nonlocal last_printed, num_done, num_parts, total
            num_done += count
            total += more
            if count > 0:
                num_parts += 1

            # Print no line before the first unit is done. Print none when all are done, either: the
            # line below, after `yield`, is for the end of the task.
            now = time.monotonic()
            if now - last_printed >= SECONDS and 0 < num_done < total:
                last_printed = now
                # The remaining time is estimated from the average time per unit so far. Before
                # MIN_PARTS parts are done that is too uncertain, so the elapsed time is printed.
                if num_parts >= MIN_PARTS:
                    seconds_left = (now - start) * (total / num_done - 1)
                    print_line(f"{format_clock(seconds_left)} left")
                else:
                    print_line(f"after {format_clock(now - start)}")

        yield advance
        print_line(f"took {format_clock(time.monotonic() - start)}")


def hide_bars_of_transformers() -> None:
    """Hide the progress bars of transformers if stderr is not a terminal.

    transformers shows the bars while it loads and writes weights. In a log file they fill pages.
    """
    # Look the module up without importing transformers, which is slow. As long as nothing has
    # imported transformers, there are no bars to hide.
    transformers_logging = sys.modules.get("transformers.utils.logging")
    if transformers_logging is not None and not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()


def format_clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds, e.g. 0:01:30."""
    return str(timedelta(seconds=round(seconds)))


def format_speed(tokens_per_second: float | None) -> str:
    """Format a speed with about two significant digits: 1,234, 12, 2.5 or 0.46; – for None."""
    if tokens_per_second is None:
        return "–"
    decimals = 2
    if tokens_per_second >= 10:
        decimals = 0
    elif tokens_per_second >= 1:
        decimals = 1
    return f"{tokens_per_second:,.{decimals}f}"


class Cost(NamedTuple):
    """The estimated cost and output of a task that makes training data.

    Attributes:
        rows: rows that the task produces.
        tokens: tokens of these rows.
        loss_tokens: how many of these tokens count in the loss.
        num_bytes: bytes that the rows take on the disk.
        seconds: the time that the task takes.
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
    # A folder that does not exist yet will be on the disk of the closest folder above it.
    return shutil.disk_usage(find_existing_folder(folder)).free


def announce(
    task: str,
    cost: Cost,
    sample: str,
    folder: Path,
    *,
    folder_key: str = "data.cache_dir",
    force: bool = False,
) -> None:
    """Print the estimated cost of a task to stderr, and check that the disk has enough room.

    Args:
        task: the task, such as "generating", for the table and the error.
        cost: the estimated cost of the task.
        sample: a description of what the cost was estimated from, such as "512 of 5,738 rows".
        folder: the folder that the task writes to.
        folder_key: the key that names the folder, for the error.
        force: whether to start even if the disk has too little room.

    Raises:
        ResourceError: if the disk of the folder has too little room, unless `force`.
    """
    # `decimal` formats bytes with a decimal prefix, such as 16.1 GB.
    free_bytes = find_free_bytes(folder)
    free_space = decimal(free_bytes)
    needed_space = decimal(int(cost.num_bytes))

    # Print the cost as a table.
    minutes = cost.seconds / 60
    table = Table(task, "estimate")
    for name, count in (
        ("rows", cost.rows),
        ("tokens", cost.tokens),
        ("loss tokens", cost.loss_tokens),
    ):
        table.add_row(name, f"{count:,.0f}")
    table.add_row("disk", f"{needed_space} ({free_space} free)")
    table.add_row("time", f"{minutes / 60:,.1f} h" if minutes >= 60 else f"{minutes:.1f} min")
    table.add_row("estimated from", sample)
    Console(stderr=True).print(table)

    # Refuse a task that would fill the disk after hours of work.
    if cost.num_bytes > free_bytes and not force:
        raise ResourceError(
            f"{task} takes about {needed_space} in {folder}, whose disk has {free_space} left",
            next_step=(
                f"free disk space, set {folder_key} to a folder on a larger disk, or begin anyway"
                " (data.force=true)"
            ),
        )
