"""A feature store as training reads it: a folder of shards, whose rows come with the batches that they are in."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from specdistill.errors import UserError
from specdistill.rows.packing import collate
from specdistill.rows.shard import Origin, Shard, Tokens, UnfitShardError

KEY = "hidden_states.path"
PATTERN = "*-of-*.safetensors"
WHOLE = "a whole store: `specdistill data features` makes what is missing"


class FeatureStore:
    """Shards of one origin. Processes and their data loaders open it alike, and read rows in any order.

    num_missing: of the rows that it was opened for, those that it does not have.
    """

    def __init__(self, shards: Iterable[Shard], sets: Sequence[Dataset], origin: Origin) -> None:
        self.origin = origin
        self.places = {row.key: (shard, index) for shard in shards for index, row in enumerate(shard.rows)}
        keys = [Tokens.of(row).key for rows in sets for row in numpy_rows(rows)]
        self.num_rows, self.num_missing = len(keys), sum(key not in self.places for key in keys)

    @classmethod
    def open(cls, folder: Path, sets: Sequence[Dataset], origin: Origin) -> "FeatureStore":
        """The store of all rows of some sets. Raises UserError, naming the shard, for one that is missing, damaged or of something else."""
        found = sorted(path.name for path in folder.glob(PATTERN)) if folder.is_dir() else []
        if not found:
            raise UserError(KEY, got=f"{folder}, which holds no features", expected=WHOLE)
        names = sorted({shard_name(index, int(name[10:16])) for name in found for index in range(int(name[10:16]))})
        try:
            shards = [opened(folder / name, origin) for name in names]
        except UnfitShardError as error:
            raise UserError(KEY, got=error, expected=WHOLE) from error
        store = cls(shards, sets, origin)
        if store.num_missing:
            got = f"{folder}, which lacks {store.num_missing:,} of the {store.num_rows:,} rows of this recipe's data"
            raise UserError(KEY, got=got, expected=WHOLE)
        return store

    def collate(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A batch as `specdistill.rows.packing.collate` makes it. Where the store has all its rows, also `features` [B, A + 1, T, D], 0 at
        padding. Raises UserError for a damaged shard.
        """
        batch = collate(rows)
        tokens = [Tokens.of(row) for row in rows]
        places = [self.places.get(row.key) if len(row) else None for row in tokens]
        if any(place is None and len(row) for place, row in zip(places, tokens, strict=True)):
            return batch
        length = batch["input_ids"].shape[1]
        shape = (len(rows), self.origin.num_features, length, self.origin.hidden_size)
        features = torch.empty(shape, dtype=self.origin.row_dtype)
        for place in filter(None, places):
            place[0].expect(place[1])
        with ThreadPoolExecutor(len(rows)) as pool:  # waiting for the disk, summing and copying are not Python's
            list(pool.map(self._read, places, features))
        return {**batch, "features": features}

    def _read(self, place: tuple[Shard, int] | None, into_ATD: Tensor) -> None:
        """A row, and 0 where it has no tokens. Raises UserError for a damaged shard."""
        if place is None:
            into_ATD.zero_()
            return
        shard, index = place
        into_ATD[:, len(shard.rows[index]) :] = 0
        try:
            shard.read(index, into_ATD)
        except UnfitShardError as error:
            raise UserError(KEY, got=f"{shard.path}, which {error}", expected=WHOLE) from error


def opened(path: Path, origin: Origin) -> Shard:
    """Raises UnfitShardError that begins with the file's path."""
    try:
        return Shard.open(path, origin)
    except UnfitShardError as error:
        raise UnfitShardError(f"{path}, which {error}") from error


def shard_name(index: int, total: int) -> str:
    return f"{index:06d}-of-{total:06d}.safetensors"


def numpy_rows(rows: Dataset) -> Any:
    return rows.select_columns(["input_ids", "document_ids"]).with_format("numpy")
