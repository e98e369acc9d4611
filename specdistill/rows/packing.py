"""Packs documents into rows of equal length: several to a row, each with its id and its positions, the rest padding.

Columns of a row, all `max_length` long: `input_ids`; `loss_mask` (1 where the token carries loss); `document_ids` (0, 1, 2, … in the
row, -1 for padding): tokens see only the document they are in; `position_ids`, which restart at 0 with each document.

What is read off such rows is here too: a batch of them, and the draft vocabulary.
"""

import random
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset, List, Value
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from specdistill.errors import UserError, logger
from specdistill.rows.files import array

COLUMNS = {
    "input_ids": List(Value("int32")),
    "loss_mask": List(Value("int8")),
    "document_ids": List(Value("int32")),
    "position_ids": List(Value("int32")),
}
MIN_TOKENS = 3  # a draft reads two tokens before it predicts a third
PADDING_DOCUMENT = -1
LENGTHS, DOCUMENTS = (
    8,
    32,
)  # different lengths of a batch's loss positions, and the step of its number of documents
CHUNK = 4096  # pieces packed at a time: rows then mix lengths, and the search stays quick


class Piece(NamedTuple):
    """Tokens [start, stop) of a document."""

    document: int
    start: int
    stop: int


def usable(
    lengths: ArrayLike, may_cut: ArrayLike, max_length: int, filtered: Counter[str]
) -> NDArray[np.int64]:
    """Indices of documents of at least MIN_TOKENS, and no longer than a row unless they may be cut; the others are counted.

    Raises UserError for none.
    """
    lengths = np.asarray(lengths)
    too_short, too_long = lengths < MIN_TOKENS, (lengths > max_length) & ~np.asarray(may_cut, bool)
    indices = np.flatnonzero(~(too_short | too_long))
    if not len(indices) and too_long.any():
        shortest = lengths[too_long].min()
        raise UserError(
            "data.max_length",
            got=max_length,
            expected=f"{shortest} or more: every row of data.source is longer",
        )
    if not len(indices):
        raise UserError(
            "data.source",
            got=f"{len(lengths)} rows of fewer than {MIN_TOKENS} tokens",
            expected="longer rows",
        )
    reasons = (
        ("too_long", too_long, f"longer than data.max_length={max_length} tokens"),
        ("too_short", too_short, "too short to use"),
    )
    for name, found, what in reasons:
        if count := int(found.sum()):
            filtered[name] += count
            logger.warning("%d of %d documents are %s and are filtered", count, len(lengths), what)
    return indices


def cut(lengths: Sequence[int], max_length: int) -> list[Piece]:
    """Every document in consecutive pieces of `max_length` tokens and a rest, which is never shorter than MIN_TOKENS."""
    pieces = []
    for document, length in enumerate(lengths):
        bounds = [*range(0, length, max_length), length]
        if len(bounds) > 2 and bounds[-1] - bounds[-2] < MIN_TOKENS:
            bounds[-2] = length - MIN_TOKENS
        pieces += [Piece(document, start, stop) for start, stop in pairwise(bounds)]
    return pieces


def fill_rows(
    pieces: Sequence[Piece], max_length: int, packing: bool, seed: int | str
) -> list[list[Piece]]:
    """Rows of pieces. Best fit: in each shuffled chunk, longest first, every piece goes into the row where it leaves the least space."""
    shuffled = list(pieces)
    random.Random(seed).shuffle(shuffled)
    if not packing:
        return [[piece] for piece in shuffled]
    rows: list[list[Piece]] = []
    for first in range(0, len(shuffled), CHUNK):
        spaces: list[tuple[int, int]] = []  # (tokens free, row), sorted
        for piece in sorted(
            shuffled[first : first + CHUNK], key=lambda piece: piece.start - piece.stop
        ):
            length = piece.stop - piece.start
            best = bisect_left(spaces, (length, 0))
            if best == len(spaces):
                rows.append([])
                space, row = max_length, len(rows) - 1
            else:
                space, row = spaces.pop(best)
            rows[row].append(piece)
            insort(spaces, (space - length, row))
    random.Random(seed).shuffle(rows)
    return rows


class Packed:
    """Documents with columns `input_ids`, `loss_mask` and `length` as rows of `max_length` tokens; `packed[range]`: some."""

    def __init__(
        self, documents: Dataset, max_length: int, packing: bool, pad_token_id: int, seed: int
    ) -> None:
        self.max_length, self.pad_token_id = max_length, pad_token_id
        self.documents = documents.select_columns(["input_ids", "loss_mask"]).with_format("numpy")
        lengths = array(documents, "length").tolist()
        self.rows = fill_rows(cut(lengths, max_length), max_length, packing, seed)
        filled = 100 * sum(lengths) / max(1, len(self.rows) * max_length)
        logger.info(
            "%d documents in %d rows of %d tokens, %.1f%% filled",
            len(lengths),
            len(self.rows),
            max_length,
            filled,
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: range) -> dict[str, list[Any]]:
        rows = [self.rows[number] for number in part]
        needed = sorted({piece.document for row in rows for piece in row})
        found = self.documents[
            needed
        ]  # at once, and each of them once: a long document has pieces in many rows
        tokens = dict(
            zip(needed, zip(found["input_ids"], found["loss_mask"], strict=True), strict=True)
        )
        fillers = {
            "input_ids": self.pad_token_id,
            "loss_mask": 0,
            "document_ids": PADDING_DOCUMENT,
            "position_ids": 0,
        }
        shape = (len(rows), self.max_length)
        packed = {
            column: np.full(shape, fillers[column], COLUMNS[column].feature.dtype)
            for column in COLUMNS
        }
        for index, row in enumerate(rows):
            place = 0
            for number, piece in enumerate(row):
                input_ids, loss_mask = tokens[piece.document]
                length = piece.stop - piece.start
                slots = index, slice(place, place + length)
                packed["input_ids"][slots] = input_ids[piece.start : piece.stop]
                packed["loss_mask"][slots] = loss_mask[piece.start : piece.stop]
                packed["document_ids"][slots] = number
                packed["position_ids"][slots] = range(length)
                place += length
        return {column: list(values) for column, values in packed.items()}


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A batch of rows: int64 tensors [B, T], one for each column, and what a step would otherwise have to look for (`indexed`)."""
    return indexed(
        {
            column: torch.tensor([row[column] for row in rows], dtype=torch.long)
            for column in COLUMNS
        }
    )


def indexed(batch: dict[str, Tensor]) -> dict[str, Any]:
    """A batch with where its loss tokens and documents are, so that no operation of the step depends on data.

    Both are padded, to few different lengths: a compiled step is made for each length that it meets.

    loss_positions: [R] int64, positions in the flattened batch of the tokens that carry loss and are not the first of their document;
    then 0, where a document begins. cumulative_lengths: [N + 1] int32, where each document of the flattened batch begins, padding being
    one of its own, and its end; then the end again. longest: tokens of the longest of these.
    """
    ids_BT, position_ids_BT = batch["document_ids"], batch["position_ids"]
    num_tokens = ids_BT.numel()
    found = ((batch["loss_mask"] > 0) & (position_ids_BT > 0)).flatten().nonzero().flatten()
    begins_BT = torch.cat((torch.ones_like(ids_BT[:, :1]), ids_BT.diff(dim=1)), dim=1) != 0
    bounds = F.pad(begins_BT.flatten().nonzero().flatten(), (0, 1), value=num_tokens)
    return {
        **batch,
        "loss_positions": _padded(found, -(-num_tokens // LENGTHS), 0),
        "cumulative_lengths": _padded(bounds, DOCUMENTS, num_tokens).int(),
        "longest": int(bounds.diff().max()),
    }


def _padded(numbers: Tensor, multiple: int, value: int) -> Tensor:
    """To the next multiple, and to one at least."""
    return F.pad(
        numbers, (0, -len(numbers) % multiple or (0 if len(numbers) else multiple)), value=value
    )


def draft_vocabulary(rows: Dataset, vocab_size: int, draft_vocab_size: int | None) -> Tensor | None:
    """Sorted target ids [W] of the most frequent loss tokens of `rows`; None keeps the whole vocabulary.

    Ties go to the lower id. Raises UserError when the draft vocabulary is empty or larger than the target's.
    """
    if draft_vocab_size is None or draft_vocab_size == vocab_size:
        return None
    if not 0 < draft_vocab_size < vocab_size:
        raise UserError(
            "draft.vocab_size",
            got=draft_vocab_size,
            expected=f"null or 1..{vocab_size}, the target's vocabulary",
        )
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for batch in (
        rows.select_columns(["input_ids", "loss_mask"]).with_format("torch").iter(batch_size=1024)
    ):
        counts += torch.bincount(
            batch["input_ids"][batch["loss_mask"].bool()], minlength=vocab_size
        )
    return counts.argsort(descending=True, stable=True)[:draft_vocab_size].sort().values
