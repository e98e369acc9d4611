"""A feature store: rows are read in any order as they were written, and damaged or foreign shards
are named."""

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
from tests.data.rows.stores import (
    LENGTH,
    collate_batch,
    fill_store,
    make_features,
    make_origin,
    make_packed_rows,
)
from tests.refusals import refused

ROWS = [Tokens.from_row(row) for row in make_packed_rows(5)]


def write_test_shard(path: Path, origin: Origin) -> Path:
    write_shard(path, origin, ROWS, [make_features(row, origin) for row in ROWS])
    return path


def read_features(shard: Shard, index: int) -> torch.Tensor:
    into = torch.zeros(
        shard.origin.num_features, LENGTH, shard.origin.hidden_size, dtype=shard.origin.row_dtype
    )
    shard.read(index, into)
    assert not into[:, len(shard.rows[index]) :].any()
    return into[:, : len(shard.rows[index])]


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_rows_are_read_as_they_were_rounded_when_written(tmp_path: Path, stored: str) -> None:
    shard = Shard.open(
        write_test_shard(tmp_path / "shard", make_origin(stored)), make_origin(stored)
    )
    for index in (3, 0, 4, 1, 2):
        expected = make_features(ROWS[index], shard.origin).to(getattr(torch, stored))
        assert torch.equal(read_features(shard, index), expected)
        assert shard.rows[index].key == ROWS[index].key


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_shard_is_little_more_than_its_features_and_always_the_same_bytes(
    tmp_path: Path, stored: str
) -> None:
    spec = make_origin(stored, hidden_size=256)
    one, other = (write_test_shard(tmp_path / name, spec).read_bytes() for name in ("one", "other"))
    assert one == other
    tokens = sum(map(len, ROWS))
    assert 0 <= len(one) - tokens * (spec.token_bytes + 4) < HEADER_BYTES
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".part",
        "one",
        "other",
    ] and not list((tmp_path / ".part").iterdir())


def test_the_key_of_a_row_covers_its_tokens_and_the_borders_of_its_documents() -> None:
    row = make_packed_rows(3)[2]
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


def read_all_features(path: Path, origin: Origin) -> dict[bytes, bytes]:
    """Return the features of every row as bytes, by the key of the row."""
    shard = Shard.open(path, origin)
    return {
        row.key: shard.checked(index).view(torch.uint8).numpy().tobytes()
        for index, row in enumerate(shard.rows)
    }


def test_no_damaged_byte_is_read(tmp_path: Path) -> None:
    """A damaged byte changes the key of a row, its checksum or a size of the file, or else it has
    no meaning."""
    spec = make_origin("bfloat16")
    whole = write_test_shard(tmp_path / "whole", spec).read_bytes()
    expected, damaged, num_noticed = (
        read_all_features(tmp_path / "whole", spec),
        tmp_path / "damaged",
        0,
    )
    places = [*range(0, 1100, 7), *range(1100, len(whole), 101), len(whole) - 1]
    for place in places:
        damaged.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        _open_shard.cache_clear()
        try:
            features = read_all_features(damaged, spec)
        except UserError:
            num_noticed += 1
            continue
        num_noticed += features.keys() != expected.keys()
        assert {
            key: features[key] for key in features.keys() & expected.keys()
        }.items() <= expected.items(), place
    assert num_noticed > 0.95 * len(places)


@pytest.mark.parametrize("length", [0, 4, 300, -1])
def test_a_part_of_a_shard_is_refused_as_damaged(tmp_path: Path, length: int) -> None:
    whole = write_test_shard(tmp_path / "whole", make_origin()).read_bytes()
    (tmp_path / "part").write_bytes(whole[:length])
    with refused(KEY, holds="which is damaged"):
        Shard.open(tmp_path / "part", make_origin())


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("weights", "c" * 64, "weights cccccccccccc instead of aaaaaaaaaaaa"),
        ("stored", "bfloat16", "stored bfloat16 instead of float32"),
        ("hidden_size", 8, "hidden_size 8 instead of 16"),
        ("aux_layers", (2, 1), "aux_layers [2, 1] instead of [1, 2]"),
    ],
)
def test_features_of_another_origin_are_refused_with_the_difference(
    tmp_path: Path, field: str, value: object, said: str
) -> None:
    write_test_shard(tmp_path / "other", make_origin(**{field: value}))
    with refused(KEY, holds=f"which holds other features: {said}"):
        Shard.open(tmp_path / "other", make_origin())


def test_files_that_are_no_shards_are_refused(tmp_path: Path) -> None:
    save_file({"features": torch.zeros(2)}, tmp_path / "plain")
    with refused(KEY, holds="which is no shard of a feature store"):
        Shard.open(tmp_path / "plain", make_origin())


# ---- Stores


TRAIN, VALIDATION = make_packed_rows(10), make_packed_rows(3, seed=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fill_store(tmp_path, [TRAIN, VALIDATION], make_origin())
    return tmp_path


def test_batches_come_with_the_features_of_their_rows(folder: Path) -> None:
    store = FeatureStore.open(folder, [TRAIN, VALIDATION], make_origin())
    for indices in ([7, 0, 3], [9], [2, 2, 8, 1]):
        batch, expected = collate_batch(store, TRAIN, indices)
        assert torch.equal(batch["features"], expected)
    batch, expected = collate_batch(store, VALIDATION, [2, 0])
    assert torch.equal(batch["features"], expected)
    # the last two fill up the batch, and have no features
    batch, expected = collate_batch(store, fill_up(TRAIN, 8), [4, 15, 11])
    assert torch.equal(batch["features"], expected) and not expected[1:].any()


def test_a_batch_with_a_row_that_the_store_lacks_has_no_features(tmp_path: Path) -> None:
    store = fill_store(tmp_path, [TRAIN], make_origin())
    assert "features" in store.collate([TRAIN[0]])
    assert "features" not in store.collate([TRAIN[0], make_packed_rows(1, seed=2)[0]])


def test_a_store_that_cannot_be_used_is_refused_in_one_line(folder: Path) -> None:
    sets = [TRAIN, VALIDATION]
    with refused(KEY, folder / "nowhere"):
        FeatureStore.open(folder / "nowhere", sets, make_origin())
    with refused(
        KEY, folder / "000000-of-000004.safetensors", holds="which holds other features: "
    ):
        FeatureStore.open(folder, sets, make_origin(weights="c"))
    with refused(KEY, folder, holds="which lacks 2 of the 15 rows"):
        FeatureStore.open(folder, [*sets, make_packed_rows(2, seed=5)], make_origin())
    os.remove(folder / "000002-of-000004.safetensors")
    with refused(KEY, folder / "000002-of-000004.safetensors", holds="which is missing"):
        FeatureStore.open(folder, sets, make_origin())


def test_a_row_that_was_damaged_later_is_named_when_it_is_read(folder: Path) -> None:
    path = folder / "000001-of-000004.safetensors"
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    store = FeatureStore.open(folder, [TRAIN, VALIDATION], make_origin())
    store.collate([TRAIN[0], TRAIN[9]])  # these rows are in other shards
    with refused(KEY, path, holds="which is damaged (row "):
        store.collate(list(TRAIN))
