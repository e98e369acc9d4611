"""Which rows of the source are held out for validation.

By hash, a row's side depends on nothing but what it holds and the seed: it stays there when others are added or left out, wherever it
stands, and equal rows are on one side.
"""

import hashlib
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdistill.errors import UserError
from specdistill.rows.cache import Columns

RANGE = 2**63  # of hashes: what a column of signed integers holds


def row_hash(row: Mapping[str, Any], seed: int) -> int:
    """0 … RANGE - 1, of a text, or of a conversation without what the assistant says: answers to the same questions are on one side."""
    if row["text"] is not None:
        content = ["text", row["text"]]
    else:
        content = [part for turn in row["messages"] if turn["role"] != "assistant" for part in (turn["role"], turn["content"])]
    digest = hashlib.blake2b("\0".join([str(seed), *content]).encode(), digest_size=8)
    return int.from_bytes(digest.digest()) % RANGE


def row_hashes(rows: Columns, numbers: Sequence[int], seed: int) -> dict[str, list[int]]:
    """The column `hash` of rows {text, messages}."""
    each = (dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True))
    return {"hash": [row_hash(row, seed) for row in each]}


def by_hash(hashes: NDArray[np.int64], fraction: float) -> set[int]:
    """Positions of the hashes in the lowest `fraction` of their range: one at least, and never all. Raises UserError if all are equal."""
    found = np.unique(hashes)
    if len(found) < 2:
        got = "a single usable row" if len(hashes) < 2 else f"{len(hashes)} usable rows that are all alike"
        raise UserError("data.source", got=got, expected="two or more: one at least is held out for validation")
    count = bisect_left(found, True, key=lambda value: int(value) >= fraction * RANGE)
    limit = found[min(max(count, 1), len(found) - 1)]
    return set(np.flatnonzero(hashes < limit).tolist())


def by_sample(count: int, fraction: float, seed: int) -> set[int]:
    """A random sample of that fraction of `count` positions: one at least, and never all. Raises UserError for a single one."""
    if count < 2:
        raise UserError(
            "data.source", got="a single usable row", expected="two or more: one at least is held out for validation"
        )
    return set(random.Random(seed).sample(range(count), min(count - 1, max(1, round(fraction * count)))))
