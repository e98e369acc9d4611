"""A feature store: what is read is what was written, in any order; whatever is damaged or of
something else is named."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specdistill.common.errors import UserError
from specdistill.data.rows.store import (
    HEADER_BYTES,
    KEY,
    FeatureStore,
    Origin,
    Shard,
    Tokens,
    _open_shard,
    write_shard,
)
from specdistill.training.trainer import fill_up
from tests.data.rows.stores import LENGTH, batch_of, feature_of, filled, origin, packed
from tests.refusals import refused

ROWS = [Tokens.from_row(row) for row in packed(5)]


def written(path: Path, of: Origin) -> Path:
    write_shard(path, of, ROWS, [feature_of(row, of) for row in ROWS])
    return path


def read(shard: Shard, index: int) -> torch.Tensor:
    into = torch.zeros(
        shard.origin.num_features, LENGTH, shard.origin.hidden_size, dtype=shard.origin.row_dtype
    )
    shard.read(index, into)
    assert not into[:, len(shard.rows[index]) :].any()
    return into[:, : len(shard.rows[index])]


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_rows_are_read_as_they_were_rounded_when_written(tmp_path: Path, stored: str) -> None:
    shard = Shard.open(written(tmp_path / "shard", origin(stored)), origin(stored))
    for index in (3, 0, 4, 1, 2):
        expected = feature_of(ROWS[index], shard.origin).to(getattr(torch, stored))
        assert torch.equal(read(shard, index), expected)
        assert shard.rows[index].key == ROWS[index].key


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_shard_is_little_more_than_its_features_and_always_the_same_bytes(
    tmp_path: Path, stored: str
) -> None:
    of = origin(stored, hidden_size=256)
    one, other = (written(tmp_path / name, of).read_bytes() for name in ("one", "other"))
    assert one == other
    tokens = sum(map(len, ROWS))
    assert 0 <= len(one) - tokens * (of.token_bytes + 4) < HEADER_BYTES
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".part",
        "one",
        "other",
    ] and not list((tmp_path / ".part").iterdir())


def test_a_row_is_its_tokens_and_the_borders_of_its_documents() -> None:
    row = packed(3)[2]
    key = Tokens.from_row(row).key
    assert Tokens.from_row({**row, "loss_mask": [0] * LENGTH}).key == key
    other_token = [row["input_ids"][0] + 1, *row["input_ids"][1:]]
    assert Tokens.from_row({**row, "input_ids": other_token}).key != key
    other_border = [0] * 5 + [1] * 4 + row["document_ids"][9:]
    assert (
        other_border != row["document_ids"]
        and Tokens.from_row({**row, "document_ids": other_border}).key != key
    )
    after_padding = [*row["input_ids"][:-1], 7]
    assert (
        row["document_ids"][-1] == -1
        and Tokens.from_row({**row, "input_ids": after_padding}).key == key
    )


def reading(path: Path, of: Origin) -> dict[bytes, bytes]:
    """The features of every row by its key, as bytes."""
    shard = Shard.open(path, of)
    return {
        row.key: shard.checked(index).view(torch.uint8).numpy().tobytes()
        for index, row in enumerate(shard.rows)
    }


def test_no_damaged_byte_is_read(tmp_path: Path) -> None:
    """A row is not found by other tokens, or not read by its checksum; or nothing adds up, or the
    byte means nothing."""
    of = origin("bfloat16")
    whole = written(tmp_path / "whole", of).read_bytes()
    expected, damaged, num_noticed = reading(tmp_path / "whole", of), tmp_path / "damaged", 0
    places = [*range(0, 1100, 7), *range(1100, len(whole), 101), len(whole) - 1]
    for place in places:
        damaged.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        _open_shard.cache_clear()
        try:
            found = reading(damaged, of)
        except UserError:
            num_noticed += 1
            continue
        num_noticed += found.keys() != expected.keys()
        assert {
            key: found[key] for key in found.keys() & expected.keys()
        }.items() <= expected.items(), place
    assert num_noticed > 0.95 * len(places)


@pytest.mark.parametrize("length", [0, 4, 300, -1])
def test_a_part_of_a_shard_is_damaged(tmp_path: Path, length: int) -> None:
    whole = written(tmp_path / "whole", origin()).read_bytes()
    (tmp_path / "part").write_bytes(whole[:length])
    with refused(KEY, holds="which is damaged"):
        Shard.open(tmp_path / "part", origin())


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("weights", "c" * 64, "weights cccccccccccc instead of aaaaaaaaaaaa"),
        ("stored", "bfloat16", "stored bfloat16 instead of float32"),
        ("hidden_size", 8, "hidden_size 8 instead of 16"),
        ("aux_layers", (2, 1), "aux_layers [2, 1] instead of [1, 2]"),
    ],
)
def test_features_of_something_else_are_named(
    tmp_path: Path, field: str, value: object, said: str
) -> None:
    written(tmp_path / "other", origin(**{field: value}))
    with refused(KEY, holds=f"which holds other features: {said}"):
        Shard.open(tmp_path / "other", origin())


def test_other_files_are_no_shards(tmp_path: Path) -> None:
    save_file({"features": torch.zeros(2)}, tmp_path / "plain")
    with refused(KEY, holds="which is no shard of a feature store"):
        Shard.open(tmp_path / "plain", origin())


# ---- Stores


TRAIN, VALIDATION = packed(10), packed(3, seed=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    filled(tmp_path, [TRAIN, VALIDATION], origin())
    return tmp_path


def test_batches_come_with_the_features_of_their_rows(folder: Path) -> None:
    store = FeatureStore.open(folder, [TRAIN, VALIDATION], origin())
    for indices in ([7, 0, 3], [9], [2, 2, 8, 1]):
        batch, expected = batch_of(store, TRAIN, indices)
        assert torch.equal(batch["features"], expected)
    batch, expected = batch_of(store, VALIDATION, [2, 0])
    assert torch.equal(batch["features"], expected)
    # the last two fill up the batch, and have no features
    batch, expected = batch_of(store, fill_up(TRAIN, 8), [4, 15, 11])
    assert torch.equal(batch["features"], expected) and not expected[1:].any()


def test_a_batch_with_a_row_that_is_not_there_has_none(tmp_path: Path) -> None:
    store = filled(tmp_path, [TRAIN], origin())
    assert "features" in store.collate([TRAIN[0]])
    assert "features" not in store.collate([TRAIN[0], packed(1, seed=2)[0]])


def test_a_store_that_cannot_be_used_is_one_line(folder: Path) -> None:
    sets = [TRAIN, VALIDATION]
    with refused(KEY, folder / "nowhere"):
        FeatureStore.open(folder / "nowhere", sets, origin())
    with refused(
        KEY, folder / "000000-of-000004.safetensors", holds="which holds other features: "
    ):
        FeatureStore.open(folder, sets, origin(weights="c"))
    with refused(KEY, folder, holds="which lacks 2 of the 15 rows"):
        FeatureStore.open(folder, [*sets, packed(2, seed=5)], origin())
    os.remove(folder / "000002-of-000004.safetensors")
    with refused(KEY, folder / "000002-of-000004.safetensors", holds="which is missing"):
        FeatureStore.open(folder, sets, origin())


def test_a_row_that_was_damaged_later_is_told_when_it_is_read(folder: Path) -> None:
    path = folder / "000001-of-000004.safetensors"
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    store = FeatureStore.open(folder, [TRAIN, VALIDATION], origin())
    store.collate([TRAIN[0], TRAIN[9]])  # of other shards
    with refused(KEY, path, holds="which is damaged (row "):
        store.collate(list(TRAIN))
