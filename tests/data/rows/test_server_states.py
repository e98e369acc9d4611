"""Rows and features from one request to a server that writes hidden states as vLLM does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file

from specdistill.common.errors import ResourceError
from specdistill.data.produce.features import compute_by_target, open_feature_store
from specdistill.data.rows.store import FeatureStore, find_waiting_path
from specdistill.recipe.sections import HybridStates, ServerRegeneration
from specdistill.targets.frozen import FrozenTarget
from tests.data.produce import openai_server
from tests.data.produce.hidden_states_server import serve_hidden_states
from tests.data.produce.openai_server import Behaviour
from tests.data.produce.row_sets import (
    Job,
    chat,
    config_for,
    make_numbered_rows,
    open_rows,
    row_target,
)
from tests.refusals import refused
from tests.tiny import write_target

AUX_LAYERS = (3, 1)
WRITTEN = (1, 3, 4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return FrozenTarget.load(str(write_target(tmp_path_factory.mktemp("target"))))


def make_hybrid_states(folder: Path, **others: Any) -> HybridStates:
    return HybridStates(path=str(folder / "store"), dtype="float32", shard_tokens=256, **others)


def generate_rows(
    folder: Path, address: str, hidden_states: HybridStates, num_tokens: int = 900
) -> tuple[Dataset, Dataset]:
    """Return rows of several documents: texts, and conversations of which both answers are
    generated."""
    rows = [
        *make_numbered_rows(20),
        *(chat(f"{number}?", None, "more", None) for number in range(20)),
    ]
    settings = ServerRegeneration(
        num_tokens=num_tokens,
        prompt_tokens=4,
        batch_size=8,
        server=[address],
        filter=["truncated"],
    )
    config = config_for(folder, rows, max_length=96, regenerate=settings)
    return open_rows(Job(config, row_target(), (), hidden_states.waiting))


def store_features(
    config: HybridStates, target: FrozenTarget, sets: Sequence[Dataset]
) -> tuple[FeatureStore, int]:
    """Return the store, and the number of passes of the target that filled it."""
    passes: list[int] = []
    compute_by_target(target, AUX_LAYERS, None)(
        [sets[0][0]]
    )  # the first pass ever checks how rows are read
    hook = target.backbone.register_forward_pre_hook(lambda *_: passes.append(1))
    store = open_feature_store(config, target, AUX_LAYERS, sets, autocast=None, batch_size=4)
    hook.remove()
    assert store is not None and store.num_missing == 0
    return store, len(passes)


def count_rows_as_generated(
    store: FeatureStore, target: FrozenTarget, sets: Sequence[Dataset]
) -> int:
    """Return the number of rows whose features are 0 at the last tokens of documents.

    All other features have to be those of a pass of the target.
    """
    count = 0
    for row in (row for rows in sets for row in rows):
        (features_ATD,), (expected_ALD,) = (
            store.collate([row])["features"],
            compute_by_target(target, AUX_LAYERS, None)([row]),
        )
        length = expected_ALD.shape[1]
        is_last = torch.tensor(row["document_ids"]).diff(append=torch.tensor([-1]))[:length] != 0
        if not features_ATD[:, :length][:, is_last].any():
            expected_ALD[:, is_last] = 0
            count += 1
        # Rounding of float32: values are of the order of 10.
        assert torch.allclose(features_ATD[:, :length], expected_ALD, atol=5e-5)
    return count


def test_rows_and_features_come_from_one_request(
    target: FrozenTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config, states_folder = make_hybrid_states(tmp_path), tmp_path / "written"
    states_folder.mkdir()
    with serve_hidden_states(target, WRITTEN, states_folder) as address:
        sets = generate_rows(tmp_path, address, config)
    assert not list(states_folder.iterdir()) and config.waiting is not None
    assert max(max(row["document_ids"]) for row in sets[0]) > 0
    documents = zip(sets[1][0]["input_ids"], sets[1][0]["document_ids"], strict=True)
    find_waiting_path(
        config.waiting, [token for token, number in documents if number == 0][:-1]
    ).unlink()
    store, num_passes = store_features(config, target, sets)
    num_rows, num_kept = store.num_rows, count_rows_as_generated(store, target, sets)
    # One further pass compares the hidden states of the server with the target's.
    assert num_rows / 2 < num_kept < num_rows and num_passes <= 1 + num_rows - num_kept
    assert (
        f"stored features of {num_rows} of {num_rows} rows ({num_kept} kept while generating)"
        in caplog.text
    )
    assert not config.waiting.exists()


def test_hidden_states_of_other_layers_are_refused(target: FrozenTarget, tmp_path: Path) -> None:
    for written, key, got in (
        ((2, 3, 4), "hidden_states.path", "hidden states of other layers or of another target"),
        ((1, 4), "hidden_states.server", "which writes hidden states of shape ["),
    ):
        folder = tmp_path / str(len(written))
        folder.mkdir()
        config = make_hybrid_states(folder)
        with serve_hidden_states(target, written, folder) as address:
            sets = generate_rows(folder, address, config, num_tokens=300)
        with refused(key, holds=got):
            store_features(config, target, sets)


@pytest.mark.long  # makes rows and features
def test_passes_of_the_target_replace_hidden_states_that_a_server_does_not_give(
    target: FrozenTarget, tmp_path: Path
) -> None:
    """One server lacks the connector, and one has an earlier version, which writes hidden states of
    prompts only. A store that is limited to some rows asks for none."""
    bodies: list[dict[str, Any]] = []
    for name, written, includes_output in (("plain", None, True), ("earlier", tmp_path, False)):
        (folder := tmp_path / name).mkdir()
        with serve_hidden_states(
            target, WRITTEN, written, includes_output=includes_output
        ) as address:
            sets = generate_rows(folder, address, make_hybrid_states(folder))
        assert not list(tmp_path.glob("*.*")) and not (folder / "store").exists()
        store, num_passes = store_features(make_hybrid_states(folder), target, sets)
        assert num_passes > 1
        assert count_rows_as_generated(store, target, sets) == 0
    (folder := tmp_path / "some").mkdir()
    with openai_server.running(Behaviour(fault=lambda _, body: bodies.append(body))) as server:  # type: ignore[func-returns-value]
        generate_rows(folder, server.address, make_hybrid_states(folder, max_bytes=10**6))
    assert bodies and not any("kv_transfer_params" in body for body in bodies)


def test_a_file_of_other_hidden_states_is_left_and_named(
    target: FrozenTarget, tmp_path: Path
) -> None:
    somebodys = tmp_path / "model.safetensors"
    save_file({"hidden_states": torch.zeros(1), "token_ids": torch.tensor([1])}, somebodys)
    (tmp_path / "model.safetensors.lock").touch()
    for path, why in (
        (somebodys, "the hidden states of another prompt"),
        (tmp_path / "none", "no hidden states that this machine"),
    ):
        naming = Behaviour(
            more=lambda _, path=path: {"kv_transfer_params": {"hidden_states_path": str(path)}}
        )  # type: ignore[misc]
        with openai_server.running(naming) as server, pytest.raises(ResourceError, match=why):
            generate_rows(tmp_path, server.address, make_hybrid_states(tmp_path))
    assert len(load_file(somebodys)) == 2
