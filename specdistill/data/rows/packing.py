"""Pack documents into rows of equal length.

A row holds several documents, each with its own id and positions; the rest of the row is padding.
These are the columns of a row, all `max_length` long:

- `input_ids`: the tokens.
- `loss_mask`: 1 where the token carries loss.
- `document_ids`: 0, 1, 2, … in the row, -1 for padding. Tokens attend only to their own document.
- `position_ids`: restart at 0 with each document.

This module also computes what is read off such rows: batches, the draft vocabulary, and the share
of the loss tokens that it covers.
"""

import random
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset, List, Value
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from specdistill.common.errors import UserError, logger
from specdistill.common.processes import is_first
from specdistill.data.rows.files import read_array

# The columns of a packed row.
COLUMNS = {
    "input_ids": List(Value("int32")),
    "loss_mask": List(Value("int8")),
    "document_ids": List(Value("int32")),
    "position_ids": List(Value("int32")),
}
MIN_TOKENS = 3  # a draft reads two tokens before it predicts a third
PADDING_DOCUMENT = -1  # the document id of padding
# Share of the loss tokens that a draft's vocabulary should contain. A chain of draft tokens ends at
# the first token that the draft cannot propose. At this coverage that happens after nine tokens on
# average, however good the draft is.
MIN_COVERAGE = 0.9
# A batch's loss positions have at most LENGTH_MULTIPLE different lengths, and its documents are
# padded to a multiple of DOCUMENTS, so that a training step is compiled for few shapes.
LENGTH_MULTIPLE = 8
DOCUMENTS = 32
# Pieces that are sorted and packed at a time. Each chunk has documents of all lengths, so rows mix
# lengths. More pieces would fill rows better, but take longer to search.
CHUNK = 4096


class Piece(NamedTuple):
    """The tokens [start, stop) of the document number `document`; they fit into a row."""

    document: int
    start: int
    stop: int


def select_usable(
    documents: Dataset,
    may_cut: ArrayLike,
    max_length: int,
    filtered: Counter[str],
    source: str = "data.source",
) -> NDArray[np.int64]:
    """Find the documents that can be packed into rows, and count the others by the reason.

    A usable document has at least MIN_TOKENS tokens, is no longer than a row unless it may be cut
    into pieces, and has a piece with a token that carries loss. If it also has pieces without such
    a token, these pieces are counted, too.

    Args:
        documents: documents with the columns `length` and `loss_mask`.
        may_cut: whether each document may be cut; a single value stands for all documents.
        max_length: tokens of a row.
        filtered: counts by reason. This function adds its counts to them.
        source: names the source of the documents in error messages.

    Returns:
        The indices of the usable documents, in ascending order.

    Raises:
        UserError: if no document is usable.
    """
    # Flag the documents that cannot be used, each for one reason: too short, too long, or without
    # loss. `cut` keeps only pieces with loss, so a document without loss has no piece.
    lengths = read_array(documents, "length")
    too_short = lengths < MIN_TOKENS
    too_long = (lengths > max_length) & ~np.asarray(may_cut, bool)
    pieces = cut(read_loss_masks(documents), max_length)
    num_pieces = np.bincount([piece.document for piece in pieces], minlength=len(lengths))
    without_loss = (num_pieces == 0) & ~too_short & ~too_long
    indices = np.flatnonzero(~(too_short | too_long | without_loss))

    if not len(indices) and without_loss.any():
        raise UserError(
            "data.source",
            got=f"{source}, where no row has a loss token that a draft can learn",
            expected=(
                "a 1 in loss_mask after a row's first token, or data.loss_mask=all for loss on"
                " every token"
            ),
        )
    if not len(indices) and too_long.any():
        raise UserError(
            "data.max_length",
            got=max_length,
            expected=f"{lengths[too_long].min()} or more: every row of data.source is longer",
        )
    if not len(indices):
        raise UserError(
            "data.source",
            got=f"{len(lengths)} rows, all of fewer than {MIN_TOKENS} tokens",
            expected=f"some rows of {MIN_TOKENS} or more tokens",
        )

    # Count and report the documents that are left out.
    for name, is_filtered, description in (
        ("too_long", too_long, f"longer than data.max_length={max_length} tokens"),
        ("too_short", too_short, "too short to use"),
        ("without_loss", without_loss, "without a loss token that a draft can learn"),
    ):
        count = int(is_filtered.sum())
        if count:
            filtered[name] += count
            logger.warning(
                "Left out %d of %d documents, which are %s", count, len(lengths), description
            )

    # `cut` divides a document into one piece per `max_length` tokens, rounded up. If a document has
    # fewer pieces, `cut` left out the ones without loss.
    num_expected_pieces = -(-lengths // max_length)
    count = int((num_expected_pieces - num_pieces)[indices].sum())
    if count:
        filtered["pieces_without_loss"] += count
        logger.warning(
            "Left out %d pieces without a loss token; documents longer than data.max_length=%d"
            " tokens are cut into pieces",
            count,
            max_length,
        )
    return indices


def read_loss_masks(documents: Dataset) -> Iterator[NDArray[np.int8]]:
    """Yield the loss mask of each document, reading the documents in batches."""
    for batch in documents.select_columns(["loss_mask"]).with_format("numpy").iter(batch_size=1024):
        yield from batch["loss_mask"]


def cut(masks: Iterable[NDArray[np.int8]], max_length: int) -> list[Piece]:
    """Cut documents into pieces that fit a row, and leave out the pieces without loss.

    A document is cut into consecutive pieces of `max_length` tokens. The last piece of a document
    may be shorter, but not shorter than MIN_TOKENS.

    Args:
        masks: the loss mask of each document, with one entry per token.
        max_length: tokens of a row.

    Returns:
        The pieces that are kept, in the order of the documents.
    """
    pieces = []
    for document, mask in enumerate(masks):
        # The pieces lie between consecutive bounds. If the last piece would be too short, it takes
        # tokens from the piece before it.
        length = len(mask)
        bounds = [*range(0, length, max_length), length]
        if len(bounds) > 2 and bounds[-1] - bounds[-2] < MIN_TOKENS:
            bounds[-2] = length - MIN_TOKENS

        # Keep a piece if any token except its first carries loss. The first token is predicted by
        # no token before it.
        pieces += [
            Piece(document, start, stop)
            for start, stop in pairwise(bounds)
            if mask[start + 1 : stop].any()
        ]
    return pieces


def fill_rows(
    pieces: Sequence[Piece], max_length: int, packing: bool, seed: int | str
) -> list[list[Piece]]:
    """Distribute pieces of documents over rows, so that little of each row stays empty.

    The method is best fit: the pieces are shuffled and taken in chunks. In each chunk, longest
    first, every piece goes into the row in which it leaves the least space.

    Args:
        pieces: the pieces.
        max_length: tokens of a row.
        packing: put several pieces into a row; otherwise each piece has a row of its own.
        seed: seed of the random order.

    Returns:
        The pieces of each row, with the rows in shuffled order.
    """
    # Without packing, each piece is a row.
    shuffled = list(pieces)
    random.Random(seed).shuffle(shuffled)
    if not packing:
        return [[piece] for piece in shuffled]

    # Fill rows chunk by chunk. A chunk does not use the space that earlier chunks left in their
    # rows, so that the search stays fast.
    rows: list[list[Piece]] = []
    for first in range(0, len(shuffled), CHUNK):
        spaces: list[tuple[int, int]] = []  # (tokens free, row), sorted
        chunk = shuffled[first : first + CHUNK]
        chunk.sort(key=lambda piece: piece.stop - piece.start, reverse=True)
        for piece in chunk:
            # Find the smallest space that is large enough; otherwise begin a new row.
            length = piece.stop - piece.start
            best = bisect_left(spaces, (length, 0))
            if best == len(spaces):
                rows.append([])
                space = max_length
                row = len(rows) - 1
            else:
                space, row = spaces.pop(best)
            rows[row].append(piece)
            insort(spaces, (space - length, row))

    # Long pieces were placed first, so shuffle the rows.
    random.Random(seed).shuffle(rows)
    return rows


class Packed:
    """Documents, packed into rows of `max_length` tokens; `packed[range]` returns some of the rows.

    The documents have the columns `input_ids`, `loss_mask` and `length`. Pieces without loss are
    left out.

    Attributes:
        num_tokens: tokens of the pieces that are packed, without padding.
    """

    def __init__(
        self, documents: Dataset, max_length: int, packing: bool, pad_token_id: int, seed: int
    ) -> None:
        self.max_length = max_length
        self.pad_token_id = pad_token_id
        self.documents = documents.select_columns(["input_ids", "loss_mask"]).with_format("numpy")
        self.rows = fill_rows(
            cut(read_loss_masks(documents), max_length), max_length, packing, seed
        )
        pieces = chain.from_iterable(self.rows)
        self.num_tokens = sum(piece.stop - piece.start for piece in pieces)
        logger.info(
            "Packed %d documents into %d rows of %d tokens, %.1f%% filled",
            len(documents),
            len(self.rows),
            max_length,
            100 * self.num_tokens / max(1, len(self.rows) * max_length),
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: range) -> dict[str, list[NDArray[np.integer]]]:
        """Return the rows with the numbers `part`: per column, an array of `max_length` per row."""
        # Read all documents at once, and each only once: a long one has pieces in many rows.
        rows = [self.rows[number] for number in part]
        document_numbers = sorted({piece.document for piece in chain.from_iterable(rows)})
        documents = self.documents[document_numbers]
        ids_of_document = dict(zip(document_numbers, documents["input_ids"], strict=True))
        mask_of_document = dict(zip(document_numbers, documents["loss_mask"], strict=True))

        # Start with rows of padding, and write the pieces into them one after the other.
        fillers = {
            "input_ids": self.pad_token_id,
            "loss_mask": 0,
            "document_ids": PADDING_DOCUMENT,
            "position_ids": 0,
        }
        packed = {
            column: np.full((len(rows), self.max_length), fillers[column], kind.feature.dtype)
            for column, kind in COLUMNS.items()
        }
        for index, row in enumerate(rows):
            place = 0
            for number, piece in enumerate(row):
                length = piece.stop - piece.start
                source = slice(piece.start, piece.stop)
                slots = index, slice(place, place + length)
                packed["input_ids"][slots] = ids_of_document[piece.document][source]
                packed["loss_mask"][slots] = mask_of_document[piece.document][source]
                packed["document_ids"][slots] = number
                packed["position_ids"][slots] = range(length)
                place += length
        return {column: list(values) for column, values in packed.items()}


def collate(rows: Sequence[Mapping[str, ArrayLike]]) -> dict[str, Any]:
    """Build a training batch from packed rows.

    Args:
        rows: B rows of T tokens each, with the columns COLUMNS: the token ids, the loss mask, the
            number of each token's document, and the token's position in that document.

    Returns:
        An int64 tensor [B, T] for each column, and the entries that `index_batch` adds: where the
        loss tokens are, where documents begin, and the length of the longest document.
    """
    batch = {}
    for column in COLUMNS:
        batch[column] = torch.tensor([row[column] for row in rows], dtype=torch.long)
    return index_batch(batch)


def index_batch(batch: dict[str, Tensor]) -> dict[str, Any]:
    """Add to a batch where its loss tokens are and where its documents begin.

    Both lists of positions are found here, before the training step, because their lengths depend
    on the data. They are padded to one of a few lengths, because the training step is compiled anew
    for each new length.

    Args:
        batch: the columns of packed rows, each an int64 tensor [B, T] for B rows of T tokens.

    Returns:
        The batch with three more entries. Positions count through the flattened batch of B * T
        tokens.
        `loss_positions` (int64): the positions of the tokens that carry loss, without the first
        token of each document, and then zeros as padding.
        `cumulative_lengths` (int32): the positions at which the documents begin, and then B * T,
        repeated as padding. The padding of a row counts as a document.
        `longest`: the number of tokens of the longest document.
    """
    ids_BT = batch["document_ids"]
    position_ids_BT = batch["position_ids"]
    num_tokens = ids_BT.numel()

    # Find the loss tokens. Nothing predicts the first token of a document, whose position is 0.
    is_learned_BT = (batch["loss_mask"] > 0) & (position_ids_BT > 0)
    loss_positions = is_learned_BT.flatten().nonzero().flatten()

    # A document begins at the first token of a row, and wherever the document id changes. The
    # padding of a row has a document id of its own, so it counts as a document.
    begins_BT = torch.cat((torch.ones_like(ids_BT[:, :1]), ids_BT.diff(dim=1)), dim=1) != 0
    bounds = F.pad(begins_BT.flatten().nonzero().flatten(), (0, 1), value=num_tokens)

    # Loss positions are padded to a multiple of an eighth of the tokens: 8 possible lengths.
    return {
        **batch,
        "loss_positions": _pad_numbers(loss_positions, -(-num_tokens // LENGTH_MULTIPLE), 0),
        "cumulative_lengths": _pad_numbers(bounds, DOCUMENTS, num_tokens).int(),
        "longest": int(bounds.diff().max()),
    }


def _pad_numbers(numbers: Tensor, multiple: int, value: int) -> Tensor:
    """Append copies of `value` to a list of numbers until its length is a multiple of `multiple`.

    An empty list gets the length `multiple`, too.

    Args:
        numbers: the numbers, a tensor with one dimension.
        multiple: the length of the result is a multiple of this.
        value: the number that is appended.
    """
    # -(-a // b) is a / b, rounded up.
    padded_length = max(1, -(-len(numbers) // multiple)) * multiple
    return F.pad(numbers, (0, padded_length - len(numbers)), value=value)


@lru_cache(maxsize=2)
def count_tokens(rows: Dataset, vocab_size: int, *, with_loss: bool) -> Tensor:
    """Count how often each token of the target occurs in packed rows.

    Args:
        rows: packed rows.
        vocab_size: V, tokens of the target.
        with_loss: count only the tokens that carry loss; otherwise all tokens except padding.

    Returns:
        The counts [V], int64 on the CPU.
    """
    # Padding is never counted: it has a loss mask of 0 and the document id PADDING_DOCUMENT, which
    # is below every other document id.
    column = "loss_mask" if with_loss else "document_ids"
    counts = torch.zeros(vocab_size, dtype=torch.long, device="cpu")
    for batch in (
        rows.select_columns(["input_ids", column]).with_format("torch").iter(batch_size=1024)
    ):
        is_counted = batch[column] > (0 if with_loss else PADDING_DOCUMENT)
        counts += torch.bincount(batch["input_ids"][is_counted], minlength=vocab_size)
    return counts


def draft_vocabulary(rows: Dataset, vocab_size: int, draft_vocab_size: int | None) -> Tensor | None:
    """Choose the tokens that a draft can propose: those that carry loss most often.

    Of two equally frequent tokens, the one with the lower id is chosen.

    Args:
        rows: packed rows, whose tokens are counted.
        vocab_size: the number of tokens of the target.
        draft_vocab_size: W, the number of tokens to choose; None for the target's whole vocabulary.

    Returns:
        The chosen token ids [W] in ascending order; None for the whole vocabulary.

    Raises:
        UserError: if the draft vocabulary is empty or larger than the target's.
    """
    if draft_vocab_size is None or draft_vocab_size == vocab_size:
        return None
    if not 0 < draft_vocab_size < vocab_size:
        raise UserError(
            "draft.vocab_size",
            got=draft_vocab_size,
            expected=f"null, or 1 to {vocab_size}, the size of the target's vocabulary",
        )
    most_frequent = count_tokens(rows, vocab_size, with_loss=True).argsort(
        descending=True, stable=True
    )
    return most_frequent[:draft_vocab_size].sort().values


def check_coverage(rows: Dataset, vocab_size: int, draft: object, init: str | None) -> float | None:
    """Measure which share of the loss tokens the draft's vocabulary contains, and log the share.

    A share below MIN_COVERAGE is logged as a warning, with a larger vocabulary as advice.

    Args:
        rows: packed rows, whose tokens with loss are counted.
        vocab_size: V, the number of tokens of the target.
        draft: the draft. The tokens that it can propose are in its attribute `target_ids_W`, if it
            has a vocabulary of its own.
        init: the value of `draft.init`, a trained draft that the draft was initialized from, with
            its vocabulary; None for a new draft.

    Returns:
        The share; None if the draft can propose every token.
    """
    # A draft without a vocabulary of its own can propose every token of the target.
    draft_ids_W = getattr(draft, "target_ids_W", None)
    if draft_ids_W is None or len(draft_ids_W) >= vocab_size:
        return None

    # Divide the loss tokens that are in the draft vocabulary by all loss tokens.
    counts_V = count_tokens(rows, vocab_size, with_loss=True)
    coverage = int(counts_V[draft_ids_W.cpu()].sum()) / max(1, int(counts_V.sum()))
    message = (
        f"the draft vocabulary of {len(draft_ids_W):,} of {vocab_size:,} tokens covers"
        f" {coverage:.1%} of the tokens with loss in the training data"
    )
    if is_first() and coverage >= MIN_COVERAGE:
        logger.info(message)
    elif is_first():
        # Find how many of the most frequent tokens would cover MIN_COVERAGE of the loss tokens. If
        # the vocabulary came with a draft from `draft.init`, that key has to be reset, too.
        shares_V = counts_V.sort(descending=True).values.cumsum(0) / counts_V.sum()
        sufficient_size = int((shares_V < MIN_COVERAGE).sum()) + 1
        advice = f"draft.vocab_size={sufficient_size} would cover {MIN_COVERAGE:.0%}"
        key, hint = ("draft.init", "draft.init=null ") if init else ("draft.vocab_size", "")
        logger.warning(
            f"{key}: {message}. The draft cannot propose any token outside this"
            f" vocabulary. {hint}{advice}."
        )
    return coverage
