"""What a long pass over data will cost, printed before it is paid: counted where it can be, else estimated from a sample that was timed."""

import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from specdistill.errors import ResourceError

PREPARED_BYTES = 18  # of a token as a document (4 + 1) and in a packed row (3 · 4 + 1)


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
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def announce(doing: str, cost: Cost, sample: str, folder: Path, *, force: bool = False) -> None:
    """Print a pass's cost to stderr. Raises ResourceError when the disk of `folder` has no room for it, unless `force`.

    sample: what it is estimated from.
    """
    free, taken = decimal(left := free_bytes(folder)), decimal(int(cost.num_bytes))
    minutes = cost.seconds / 60
    table = Table(doing, "estimate")
    for name, count in (("rows", cost.rows), ("tokens", cost.tokens), ("loss tokens", cost.loss_tokens)):
        table.add_row(name, f"{count:,.0f}")
    table.add_row("disk", f"{taken} ({free} free)")
    table.add_row("time", f"{minutes / 60:,.1f} h" if minutes >= 60 else f"{minutes:.1f} min")
    table.add_row("estimated from", sample)
    Console(file=sys.stderr).print(table)
    if cost.num_bytes > left and not force:
        next_step = "free disk space, set data.cache_dir to a larger disk, or begin anyway (data.force=true)"
        raise ResourceError(f"{doing} takes about {taken} in {folder}, whose disk has {free} left", next_step=next_step)
