"""Packed rows of several documents, and stores of their features."""

from collections.abc import Sequence
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor

from specdistill.data.produce.features import MakeFeatures, Rows, fill
from specdistill.data.rows.packing import collate
from specdistill.data.rows.store import FeatureStore, Origin, Tokens
from specdistill.recipe.sections import HybridStates

LENGTH = 24


def make_packed_rows(count: int, seed: int = 0) -> Dataset:
    """Return rows of one to three documents, most with some padding."""
    generator, table = torch.Generator().manual_seed(seed), []
    for index in range(count):
        lengths = (
            [LENGTH] if index % 3 == 0 else [5 + index % 4, 7] if index % 3 == 1 else [6, 3, 10]
        )
        used = sum(lengths)
        padding = LENGTH - used
        ids = torch.randint(3, 200, (used,), generator=generator).tolist()
        documents = [number for number, length in enumerate(lengths) for _ in range(length)]
        table.append(
            {
                "input_ids": ids + [0] * padding,
                "loss_mask": [1] * used + [0] * padding,
                "document_ids": documents + [-1] * padding,
                "position_ids": [position for length in lengths for position in range(length)]
                + [0] * padding,
            }
        )
    return Dataset.from_list(table)


def make_origin(stored: str = "float32", **others: object) -> Origin:
    values = {
        "weights": "a" * 64,
        "tokenizer": "b" * 64,
        "computed": "float32",
        "hidden_size": 16,
        "aux_layers": (1, 2),
    }
    return Origin(**{"stored": stored, **values, **others})  # type: ignore[arg-type]


def make_features(tokens: Tokens, origin: Origin) -> Tensor:
    """Return random features [A + 1, L, D] of a row, the same each time."""
    generator = torch.Generator().manual_seed(int.from_bytes(tokens.key[:6], "little"))
    return torch.randn(origin.num_features, len(tokens), origin.hidden_size, generator=generator)


class CountingMaker:
    """A maker of random features that counts the rows it was given."""

    def __init__(self, origin: Origin) -> None:
        self.origin, self.num_made = origin, 0

    def __call__(self, rows: Rows) -> list[Tensor]:
        self.num_made += len(rows)
        return [make_features(Tokens.from_row(row), self.origin) for row in rows]


def fill_store(
    folder: Path,
    sets: Sequence[Dataset],
    origin: Origin,
    make: MakeFeatures | None = None,
    max_bytes: int | None = None,
    *,
    force: bool = False,
) -> FeatureStore:
    """Fill a store in shards of four rows."""
    config = HybridStates(path=str(folder), shard_tokens=4 * LENGTH, max_bytes=max_bytes)
    return fill(config, sets, origin, make or CountingMaker(origin), 2, force=force)


def collate_batch(
    store: FeatureStore, rows: Dataset, indices: Sequence[int]
) -> tuple[dict[str, Tensor], Tensor]:
    """Return a batch of a store, and the features [B, A + 1, T, D] that it should have."""
    picked = [rows[index] for index in indices]
    expected = torch.zeros(len(picked), store.origin.num_features, LENGTH, store.origin.hidden_size)
    for row, into in zip(picked, expected, strict=True):
        tokens = Tokens.from_row(row)
        if len(tokens):
            into[:, : len(tokens)] = make_features(tokens, store.origin)
    batch = store.collate(picked)
    assert all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(batch[name]))
        for name, value in collate(picked).items()
    )
    return batch, expected
