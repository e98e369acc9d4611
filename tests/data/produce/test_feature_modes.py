"""Training from a store has the losses of training online at every step, in every method that
reads features, without a pass of the target."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from specdistill.data.produce.features import compute_by_target, open_feature_store
from specdistill.data.rows.store import FeatureStore, Tokens
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_recipe
from specdistill.recipe.sections import (
    HiddenStatesConfig,
    HybridStates,
    OfflineStates,
    OnlineStates,
)
from specdistill.targets.frozen import FrozenTarget
from tests.data.rows.stores import fill_store, make_origin, make_packed_rows
from tests.heads import HEADS
from tests.refusals import refused
from tests.tiny import tiny_target_model, tiny_tokenizer, write_inputs
from tests.training.small_runs import build_trainer

ROWS = make_packed_rows(8)
AUX_LAYERS = (1, 2, 3)


def build_target(dtype: torch.dtype) -> FrozenTarget:
    model = tiny_target_model().to(dtype)
    model.generation_config.eos_token_id = []
    return FrozenTarget(model, tiny_tokenizer(), name="tiny")


def record_history(
    folder: Path, target: FrozenTarget, method: str, store: FeatureStore | None, **train: Any
) -> list[float]:
    """Return the losses and gradient norms of four steps, and the losses of the evaluations between
    them."""
    batches = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
    }
    often = {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    fit = build_trainer(
        folder, ROWS, target, method, learning_rate=1e-2, store=store, **batches, **often, **train
    )
    fit.train()
    names = ("loss", "grad_norm", "eval_loss")
    return [entry[name] for entry in fit.state.log_history for name in names if name in entry]


def store_features(
    folder: Path,
    target: FrozenTarget,
    aux_layers: tuple[int, ...],
    dtype: str,
    rows: Dataset = ROWS,
    autocast: Any = None,
) -> FeatureStore:
    origin = make_origin(
        dtype, hidden_size=target.hidden_size, aux_layers=aux_layers, computed=target.dtype
    )
    return fill_store(folder, [rows], origin, compute_by_target(target, aux_layers, autocast))


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
Online = Callable[[str, torch.dtype, bool], list[float]]


@pytest.fixture(scope="module")
def train_online(tmp_path_factory: pytest.TempPathFactory) -> Online:
    """A function that trains without a store, once for each method, dtype and `bf16`."""

    @cache
    def train(method: str, dtype: torch.dtype, bf16: bool) -> list[float]:
        folder = tmp_path_factory.mktemp("online")
        return record_history(folder, build_target(dtype), method, None, bf16=bf16)

    return train


@pytest.mark.parametrize(
    ("dtype", "autocast", "kept"),
    [(FLOAT32, None, "float32"), (FLOAT32, BFLOAT16, "float32"), (BFLOAT16, BFLOAT16, "bfloat16")],
)
@pytest.mark.parametrize("method", HEADS)
def test_losses_equal_those_of_training_online(
    tmp_path: Path,
    method: str,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    kept: str,
    train_online: Online,
) -> None:
    target = build_target(dtype)
    bf16 = autocast is not None
    expected = train_online(method, dtype, bf16)
    aux_layers = tuple(build_trainer(tmp_path, ROWS, target, method).objective.draft.aux_layers)
    store = store_features(tmp_path / "store", target, aux_layers, kept, autocast=autocast)
    passes: list[int] = []
    target.backbone.register_forward_pre_hook(lambda *_: passes.append(1))
    assert record_history(tmp_path, target, method, store, bf16=bf16) == expected
    assert len(expected) == 10
    # A fresh EAGLE-3 head takes one pass, to check that the target's layers pass on what it reads.
    assert len(passes) == (method == "eagle3")


def test_features_that_the_store_lacks_are_computed_in_the_steps(
    tmp_path: Path, train_online: Online
) -> None:
    target = build_target(FLOAT32)
    store = store_features(tmp_path / "store", target, (), "float32", rows=ROWS.select(range(3)))
    kept = [store.collate([row]) for row in ROWS]
    assert ["features" in batch for batch in kept] == [True] * 3 + [False] * 5
    assert record_history(tmp_path, target, "eagle", store) == train_online("eagle", FLOAT32, False)


@pytest.mark.parametrize("method", HEADS)
def test_nothing_is_learned_from_the_last_token_of_a_document(
    tmp_path: Path, method: str, train_online: Online
) -> None:
    """Its features may therefore be 0, as they are where a server wrote the hidden states of a
    document that it generated."""
    target = build_target(torch.float32)
    aux_layers = tuple(build_trainer(tmp_path, ROWS, target, method).objective.draft.aux_layers)
    make, origin = (
        compute_by_target(target, aux_layers, None),
        make_origin(hidden_size=target.hidden_size, aux_layers=aux_layers),
    )

    def make_without_last_tokens(rows: Any) -> list[torch.Tensor]:
        features_of_rows = make(rows)
        for row, features in zip(rows, features_of_rows, strict=True):
            features[:, Tokens.from_row(row).document_lengths.cumsum() - 1] = 0
        return features_of_rows

    store = fill_store(tmp_path / "without", [ROWS], origin, make_without_last_tokens)
    assert record_history(tmp_path, target, method, store) == train_online(method, FLOAT32, False)


def test_worker_processes_can_read_the_store(tmp_path: Path, train_online: Online) -> None:
    target = build_target(FLOAT32)
    store = store_features(tmp_path / "store", target, (), "float32", rows=ROWS.select(range(3)))
    losses = record_history(tmp_path, target, "eagle", store, dataloader_num_workers=2)
    assert losses == train_online("eagle", FLOAT32, False)


def test_bfloat16_features_of_a_float32_target_give_close_losses(
    tmp_path: Path, train_online: Online
) -> None:
    target = build_target(FLOAT32)
    expected = torch.tensor(train_online("eagle3", FLOAT32, False)[::2])
    assert build_trainer(tmp_path, ROWS, target).objective.draft.aux_layers == AUX_LAYERS
    store = store_features(tmp_path / "store", target, AUX_LAYERS, "bfloat16")
    losses = torch.tensor(record_history(tmp_path, target, "eagle3", store)[::2])
    assert 0 < float((losses / expected - 1).abs().max()) < 0.01


def test_the_hidden_states_section_chooses_the_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    write_inputs(tmp_path)
    loaded = FrozenTarget.load(str(tmp_path / "model"))

    path = str(tmp_path / "store")

    def open_store(
        config: HiddenStatesConfig, autocast: torch.dtype | None = None
    ) -> FeatureStore | None:
        return open_feature_store(
            config,
            loaded,
            [1, 2],
            [ROWS, make_packed_rows(2, seed=3)],
            autocast=autocast,
            batch_size=2,
        )

    assert open_store(OnlineStates()) is None
    with refused("hidden_states.path", holds="which holds no features"):
        open_store(OfflineStates(path=path))
    filled = open_store(HybridStates(path=path))
    assert filled is not None and (filled.num_rows, filled.num_missing) == (10, 0)
    assert "stored features of 10 of 10 rows" in caplog.text
    assert filled.origin.weights == loaded.identity.weights and filled.origin.aux_layers == (1, 2)
    with refused(
        "hidden_states.path",
        holds="other features: computed float32 instead of float32 under bfloat16",
    ):
        open_store(OfflineStates(path=path), torch.bfloat16)
    assert open_store(OfflineStates(path=path)) is not None


@pytest.mark.parametrize(
    ("keys", "key", "got"),
    [
        (["hidden_states.mode=offline"], "hidden_states.path", "nothing"),
        (["hidden_states.path=a"], "hidden_states.path", "a"),
        (
            ["hidden_states.mode=offline", "hidden_states.path=a", "hidden_states.max_bytes=1"],
            "hidden_states.max_bytes",
            "1",
        ),
        (
            ["hidden_states.mode=offline", "hidden_states.path=a", "target.shard=layers"],
            "target.shard",
            "layers",
        ),
        (
            ["method=draft_model", "hidden_states.mode=offline", "hidden_states.path=a"],
            "hidden_states.mode",
            "offline",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused_in_one_line(
    keys: list[str], key: str, got: str
) -> None:
    with refused(key, got):
        load_recipe(Recipe, ["target.model=pico", "train.output_dir=runs", *keys])
