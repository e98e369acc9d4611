"""A feature store as training reads it: rows in any order, and one line for a store that cannot be used."""

import os
from pathlib import Path

import pytest
import torch

from specdistill.rows.store import KEY, FeatureStore
from specdistill.training.trainer import fill_up
from tests.refusals import refused
from tests.rows.stores import batch_of, filled, origin, packed

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


def test_rows_that_fill_up_a_batch_need_no_features(folder: Path) -> None:
    store = FeatureStore.open(folder, [TRAIN, VALIDATION], origin())
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
    with refused(KEY, folder / "000000-of-000004.safetensors", holds="which is of other features: "):
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
