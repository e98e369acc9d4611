"""Packing: no token is lost or repeated, and every document stays separate."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset

from specdistill.data.rows.packing import (
    COLUMNS,
    MIN_TOKENS,
    Packed,
    Piece,
    collate,
    cut,
    draft_vocabulary,
    fill_rows,
    select_usable,
)
from tests.refusals import refused

PAD = 7


def make_documents(lengths: list[int]) -> Dataset:
    """Return documents whose tokens are all different; odd tokens carry loss."""
    first, rows = 100, []
    for length in lengths:
        ids = list(range(first, first + length))
        rows.append({"input_ids": ids, "loss_mask": [token % 2 for token in ids], "length": length})
        first += length
    return Dataset.from_list(rows)


@pytest.mark.parametrize("packing", [True, False])
def test_every_token_comes_out_once_in_its_document_at_its_position(packing: bool) -> None:
    generator = random.Random(0)
    lengths = [generator.randint(MIN_TOKENS, 70) for _ in range(200)]
    documents = make_documents(lengths)
    packed_rows = Packed(documents, 32, packing, PAD, seed=1)
    packed = zip(*packed_rows[range(len(packed_rows))].values(), strict=True)
    rows = [dict(zip(COLUMNS, map(np.ndarray.tolist, row), strict=True)) for row in packed]
    batch = collate(rows)
    assert all(
        batch[column].shape == (len(rows), 32) and batch[column].dtype == torch.int64
        for column in COLUMNS
    )
    real = batch["document_ids"] >= 0
    assert sorted(batch["input_ids"][real].tolist()) == list(range(100, 100 + sum(lengths)))
    assert (batch["loss_mask"][real] == batch["input_ids"][real] % 2).all()
    assert (batch["input_ids"][~real] == PAD).all()
    assert not batch["loss_mask"][~real].any() and not batch["position_ids"][~real].any()
    starts = {sum(lengths[:index]) + 100 for index in range(len(lengths))}
    for ids, numbers, positions in zip(
        batch["input_ids"], batch["document_ids"], batch["position_ids"], strict=True
    ):
        present = numbers[numbers >= 0].unique().tolist()
        assert present == list(range(len(present))) and (packing or present == [0])
        for number in present:
            piece, places = ids[numbers == number].tolist(), positions[numbers == number].tolist()
            assert places == list(range(len(piece))) and piece == list(
                range(piece[0], piece[0] + len(piece))
            )
            assert not starts & set(piece[1:])  # no piece runs over into the next document


def test_a_batch_lists_its_loss_positions_and_document_lengths() -> None:
    """One row has documents of 5 and 3 tokens, the other has one of 4; the rest is padding. Nothing
    can predict the first token of a document, so that its loss does not count."""
    rows = [
        {"document_ids": [0] * 5 + [1] * 3 + [-1] * 2, "loss_mask": [0, 0, 0, 1, 1, 1, 1, 1, 0, 0]},
        {"document_ids": [0] * 4 + [-1] * 6, "loss_mask": [0, 1] * 2 + [0] * 6},
    ]
    positions = [[0, 1, 2, 3, 4, 0, 1, 2, 0, 0], [0, 1, 2, 3] + [0] * 6]
    batch = collate(
        [
            {**row, "input_ids": [7] * 10, "position_ids": place}
            for row, place in zip(rows, positions, strict=True)
        ]
    )
    # Their number is a multiple of three, an eighth of 20 tokens.
    assert batch["loss_positions"].tolist() == [3, 4, 6, 7, 11, 13]
    assert batch["cumulative_lengths"].tolist() == [0, 5, 8, 10, 14, *[20] * 27]
    assert batch["cumulative_lengths"].dtype == torch.int32 and batch["longest"] == 6
    row = {"document_ids": [0] * 64, "input_ids": [7] * 64, "position_ids": range(64)}
    positions_by_count = [
        collate([{**row, "loss_mask": [1] * n + [0] * (64 - n)}])["loss_positions"]
        for n in range(65)
    ]
    assert {len(places) for places in positions_by_count} == {
        8 * n for n in range(1, 9)
    } and not positions_by_count[0].any()


def test_packing_leaves_little_padding() -> None:
    generator = random.Random(0)
    pieces = [Piece(index, 0, generator.randint(3, 256)) for index in range(5000)]
    rows = fill_rows(pieces, 256, packing=True, seed=0)
    assert sorted(piece for row in rows for piece in row) == pieces
    assert sum(piece.stop for piece in pieces) / (256 * len(rows)) > 0.98
    assert len({len(row) for row in rows[:50]}) > 1  # short and long pieces are mixed
    assert (
        rows
        == fill_rows(pieces, 256, packing=True, seed=0)
        != fill_rows(pieces, 256, packing=True, seed=1)
    )


def test_texts_are_cut_into_whole_rows_and_a_rest_that_is_worth_a_row() -> None:
    pieces = [
        (0, 0, 8),
        (0, 8, 16),
        (0, 16, 20),
        (1, 0, 8),
        (2, 0, 8),
        (2, 8, 14),
        (2, 14, 17),
        (3, 0, 5),
    ]
    assert cut([np.ones(length, np.int8) for length in (20, 8, 17, 5)], 8) == [
        Piece(*piece) for piece in pieces
    ]


def make_masked_documents(*masks: list[int]) -> Dataset:
    """Return documents with these loss masks."""
    rows = [
        {"input_ids": list(range(10, 10 + len(mask))), "loss_mask": mask, "length": len(mask)}
        for mask in masks
    ]
    return Dataset.from_list(rows)


def test_documents_that_cannot_be_used_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    filtered: Counter[str] = Counter()
    documents = make_masked_documents([1] * 2, [1] * 3, [1] * 8, [1] * 9, [1] * 9)
    assert select_usable(documents, [False, False, False, False, True], 8, filtered).tolist() == [
        1,
        2,
        4,
    ]
    assert filtered == {"too_long": 1, "too_short": 1}
    assert (
        "Left out 1 of 5 documents, which are longer than data.max_length=8 tokens" in caplog.text
    )
    assert "Left out 1 of 5 documents, which are too short" in caplog.text
    with refused("data.max_length", 8):
        select_usable(make_masked_documents([1] * 12, [1] * 9, [1]), [False] * 3, 8, Counter())
    with refused("data.source", "2 rows, all of fewer than 3 tokens"):
        select_usable(make_masked_documents([1], [1] * 2), [True, False], 8, Counter())


def test_documents_and_pieces_without_loss_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing predicts the first token of a piece, and no other token of the third and the fifth
    document carries loss."""
    zero = [0] * 8
    documents = make_masked_documents(
        [0, 0, 1], zero, [1, 0, 0], [*zero, *zero, 0, 1, 0], [*zero, 1, 0, 0], [*zero, 0, 1, 1, 1]
    )
    filtered: Counter[str] = Counter()
    assert select_usable(documents, True, 8, filtered).tolist() == [0, 3, 5]
    assert filtered == {"without_loss": 3, "pieces_without_loss": 3}
    assert (
        "Left out 3 of 6 documents, which are without a loss token" in caplog.text
        and "Left out 3 pieces without a loss token" in caplog.text
    )
    with refused("data.source", "rows.jsonl", holds="no row has a loss token"):
        select_usable(
            make_masked_documents(zero, [1, 0, 0], [0] * 20), True, 8, Counter(), "rows.jsonl"
        )


@pytest.mark.parametrize("packing", [True, False])
def test_no_row_or_piece_without_loss_is_packed_and_none_with_loss_is_lost(packing: bool) -> None:
    """The expected rows are the pieces of eight tokens with loss, found one by one. Lengths are
    multiples of eight, so that no rest is moved."""
    generator = random.Random(1)
    masks = [
        [int(generator.random() < 0.15) for _ in range(8 * generator.randint(1, 6))]
        for _ in range(100)
    ]
    documents = Dataset.from_list(
        [
            {
                "input_ids": [1000 * index + place for place in range(len(mask))],
                "loss_mask": mask,
                "length": len(mask),
            }
            for index, mask in enumerate(masks)
        ]
    )
    expected = [
        1000 * index + start
        for index, mask in enumerate(masks)
        for start in range(0, len(mask), 8)
        if 1 in mask[start + 1 : start + 8]
    ]
    packed = Packed(documents, 8, packing, PAD, seed=0)
    rows = packed[range(len(packed))]
    assert (
        sorted(ids[0] for ids in rows["input_ids"]) == expected
        and 0 < len(expected) < sum(map(len, masks)) / 8
    )
    assert packed.num_tokens == 8 * len(expected)


def test_the_draft_vocabulary_holds_the_most_frequent_loss_tokens() -> None:
    """Token 7 carries loss 700 times, and 2 and 5 do 500 times each; 1 and 9 never do, although
    they are the most frequent tokens."""
    pairs = [(1, 7)] * 700 + [(1, 2)] * 500 + [(9, 5)] * 500 + [(9, 9)] * 300
    masks = [[0, 1]] * 1700 + [[0, 0]] * 300
    rows = Dataset.from_dict({"input_ids": [[*pair] for pair in pairs], "loss_mask": masks})

    def select_ids(number: int | None) -> list[int] | None:
        ids = draft_vocabulary(rows, 10, number)
        return None if ids is None else ids.tolist()

    assert [select_ids(number) for number in (1, 2, 3, 5)] == [
        [7],
        [2, 7],
        [2, 5, 7],
        [0, 1, 2, 5, 7],
    ]
    assert select_ids(None) is None and select_ids(10) is None and len(select_ids(9) or []) == 9
    for number in (0, 11):
        with refused("draft.vocab_size", number):
            select_ids(number)
