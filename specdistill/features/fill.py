"""Fills a feature store: every process of a launch makes its share of the shards that are missing, damaged or of something else.

Shards are of consecutive rows, the training rows first, and each is made by itself: whichever process makes it, after however many kills,
its bytes are the same. A killed process repeats the shard that it was at.
"""

import fcntl
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets
from safetensors import SafetensorError
from torch import Tensor, distributed

from specdistill.command import check_writable
from specdistill.cost import Cost, announce
from specdistill.errors import ResourceError, UserError
from specdistill.features.shard import HEADER_BYTES, Origin, Shard, Tokens, UnfitShardError, write_shard
from specdistill.features.store import KEY, PATTERN, FeatureStore, numpy_rows, opened, shard_name
from specdistill.processes import are_several, of_all
from specdistill.progress import progress

Rows = Sequence[dict[str, Any]]  # with the columns of specdistill.data.packing
Make = Callable[[Rows], Sequence[Tensor]]  # rows -> the features [A + 1, L, D] of each


def fill(
    folder: Path,
    sets: Sequence[Dataset],
    origin: Origin,
    make: Make,
    shard_tokens: int,
    max_bytes: int | None = None,
    *,
    batch_size: int = 1,
    force: bool = False,
) -> FeatureStore:
    """The store of the rows of some sets, or of the first of them that have room in `max_bytes`. Every process has to call it.

    batch_size: rows that `make` is given at a time. Says which shards that were there are made again, and why, and after the first one what
    the others cost. A launch waits for another one that fills the same folder. Raises ResourceError for a disk that is full, cannot be
    written or, unless `force`, has no room for the others, and goes on from there next time.
    """
    check_writable(folder, KEY)
    rows = concatenate_datasets(list(sets))
    rank, count = (distributed.get_rank(), distributed.get_world_size()) if are_several() else (0, 1)
    shards = _plan(rows, origin, shard_tokens, max_bytes)
    with ExitStack() as stack, storing(folder):
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_alone(folder))
            _clear(folder, shards)
        of_all(None)
        own = list(shards.items())[rank::count]
        with progress("Storing features", sum(len(part) for _, part in own), "rows") as advance:
            is_told = rank > 0
            for name, part in own:
                begin, shard_rows = time.monotonic(), rows.select(part)
                is_new = _complete(folder / name, shard_rows, origin, make, batch_size)
                left = sum(len(other) for file, other in shards.items() if not (folder / file).exists())
                if is_new and left and not is_told:
                    is_told, sample = True, _cost(folder / name, shard_rows, (time.monotonic() - begin) / count)
                    announce(
                        "storing features", sample.times(left / len(part)), f"the first {len(part):,} rows", folder, force=force
                    )
                advance(len(part))
        of_all(None)
    try:
        return FeatureStore([opened(folder / name, origin) for name in shards], sets, origin)
    except UnfitShardError as error:
        raise UserError(KEY, got=error, expected="a folder that all machines share") from error


@contextmanager
def storing(folder: Path) -> Iterator[None]:
    """Raises ResourceError for a disk that is full or cannot be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        next_step = "free the disk, or set hidden_states.max_bytes; the same command goes on behind the last shard"
        raise ResourceError(f"{folder} could not be filled ({error})", next_step=next_step) from error


def _plan(rows: Dataset, origin: Origin, shard_tokens: int, max_bytes: int | None) -> dict[str, range]:
    """The rows of each shard, as many shards as have room."""
    per_shard = max(1, shard_tokens // len(rows[0]["input_ids"]))
    parts = [range(first, min(first + per_shard, len(rows))) for first in range(0, len(rows), per_shard)]
    plan: dict[str, range] = {}
    room = max_bytes
    for index, part in enumerate(parts):
        if room is not None:
            room -= _size([Tokens.of(row) for row in numpy_rows(rows.select(part))], origin)
            if room < 0:
                break
        plan[shard_name(index, len(parts))] = part
    return plan


def _size(rows: Sequence[Tokens], origin: Origin) -> int:
    """Bytes of a shard, or a few more."""
    tokens, documents = sum(map(len, rows)), sum(len(row.document_lengths) for row in rows)
    return tokens * (origin.token_bytes + 4) + 4 * documents + 12 * len(rows) + HEADER_BYTES


def _clear(folder: Path, shards: dict[str, range]) -> None:
    """Remove what killed processes left, and shards of another number, which were of other rows."""
    kept = {name.partition("-")[2] for name in shards}
    others = [path for path in folder.glob(PATTERN) if kept and path.name.partition("-")[2] not in kept]
    if others:
        print(f"{folder}: {len(others)} shards of other rows are removed", file=sys.stderr)
    for path in (*folder.glob("*.part"), *folder.glob(".tmp*"), *others):  # the second are safetensors' own
        path.unlink()


def _complete(path: Path, rows: Dataset, origin: Origin, make: Make, batch_size: int) -> bool:
    """Have a shard of these rows: the one that is there, if it is, or a new one. Whether it is new."""
    tokens = [Tokens.of(row) for row in numpy_rows(rows)]
    try:
        _check(Shard.open(path, origin), tokens)
        return False
    except UnfitShardError as error:
        if path.exists():
            print(f"{path} {error}: it is made again", file=sys.stderr, flush=True)
    features: list[Tensor] = []
    for batch in rows.iter(batch_size):
        features += make([dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)])
    write_shard(path, origin, tokens, features)
    return True


def _cost(path: Path, rows: Dataset, seconds: float) -> Cost:
    """Of a shard that was made in so many seconds."""
    tokens, loss_tokens = sum(len(Tokens.of(row)) for row in numpy_rows(rows)), sum(map(sum, rows["loss_mask"]))
    return Cost(len(rows), tokens, loss_tokens, path.stat().st_size, seconds)


def _check(shard: Shard, rows: Sequence[Tokens]) -> None:
    """Raises UnfitShardError unless it holds these rows, whole."""
    if [row.key for row in shard.rows] != [row.key for row in rows]:
        raise UnfitShardError("is of other rows")
    for index in range(len(rows)):
        shard.checked(index)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Within it no other launch fills the folder; the system ends the lock of a killed process."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{folder}: another process is filling it; waiting", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
