"""Rows and features by one request, of a server that writes hidden states as vLLM does."""

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
from tests.data.produce.hidden_states_server import running
from tests.data.produce.openai_server import Behaviour
from tests.data.produce.row_sets import Job, chat, config_for, numbered, open_rows, row_target
from tests.refusals import refused
from tests.tiny import write_target

AUX_LAYERS = (3, 1)
WRITTEN = (1, 3, 4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return FrozenTarget.load(str(write_target(tmp_path_factory.mktemp("target"))))


def hybrid(folder: Path, **others: Any) -> HybridStates:
    return HybridStates(path=str(folder / "store"), dtype="float32", shard_tokens=256, **others)


def generated(
    folder: Path, address: str, hidden_states: HybridStates, num_tokens: int = 900
) -> tuple[Dataset, Dataset]:
    """Rows of several documents: of texts and of conversations of two turns, both of which are
    generated."""
    rows = [*numbered(20), *(chat(f"{number}?", None, "more", None) for number in range(20))]
    settings = ServerRegeneration(
        num_tokens=num_tokens,
        prompt_tokens=4,
        batch_size=8,
        server=[address],
        filter=["truncated"],
    )
    config = config_for(folder, rows, max_length=96, regenerate=settings)
    return open_rows(Job(config, row_target(), (), hidden_states.waiting))


def stored(
    config: HybridStates, target: FrozenTarget, sets: Sequence[Dataset]
) -> tuple[FeatureStore, int]:
    """The store, and the passes of the target that it took."""
    passes: list[int] = []
    compute_by_target(target, AUX_LAYERS, None)(
        [sets[0][0]]
    )  # the first pass tries how rows are read
    hook = target.backbone.register_forward_pre_hook(lambda *_: passes.append(1))
    store = open_feature_store(config, target, AUX_LAYERS, sets, autocast=None, batch_size=4)
    hook.remove()
    assert store is not None and store.num_missing == 0
    return store, len(passes)


def num_as_generated(store: FeatureStore, target: FrozenTarget, sets: Sequence[Dataset]) -> int:
    """Of rows that have 0 at the last tokens of documents. All have what a pass gives elsewhere,
    and the others there, too."""
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


def test_rows_and_features_are_of_one_request(
    target: FrozenTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config, written = hybrid(tmp_path), tmp_path / "written"
    written.mkdir()
    with running(target, WRITTEN, written) as address:
        sets = generated(tmp_path, address, config)
    assert not list(written.iterdir()) and config.waiting is not None
    assert max(max(row["document_ids"]) for row in sets[0]) > 0
    documents = zip(sets[1][0]["input_ids"], sets[1][0]["document_ids"], strict=True)
    find_waiting_path(
        config.waiting, [token for token, number in documents if number == 0][:-1]
    ).unlink()
    store, num_passes = stored(config, target, sets)
    num_rows, num_found = store.num_rows, num_as_generated(store, target, sets)
    # one to compare
    assert num_rows / 2 < num_found < num_rows and num_passes <= 1 + num_rows - num_found
    assert (
        f"stored features of {num_rows} of {num_rows} rows ({num_found} kept while generating)"
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
        config = hybrid(folder)
        with running(target, written, folder) as address:
            sets = generated(folder, address, config, num_tokens=300)
        with refused(key, holds=got):
            stored(config, target, sets)


@pytest.mark.long  # makes rows and features
def test_a_server_that_gives_none_is_followed_by_passes(
    target: FrozenTarget, tmp_path: Path
) -> None:
    """Without the connector, or of an earlier version, whose files are of prompts; and a store of
    some rows alone has no use for them."""
    asked: list[dict[str, Any]] = []
    for name, written, of_output in (("plain", None, True), ("earlier", tmp_path, False)):
        (folder := tmp_path / name).mkdir()
        with running(target, WRITTEN, written, of_output=of_output) as address:
            sets = generated(folder, address, hybrid(folder))
        assert not list(tmp_path.glob("*.*")) and not (folder / "store").exists()
        store, num_passes = stored(hybrid(folder), target, sets)
        assert num_passes > 1
        assert num_as_generated(store, target, sets) == 0
    (folder := tmp_path / "some").mkdir()
    with openai_server.running(Behaviour(fault=lambda _, body: asked.append(body))) as server:  # type: ignore[func-returns-value]
        generated(folder, server.address, hybrid(folder, max_bytes=10**6))
    assert asked and not any("kv_transfer_params" in body for body in asked)


def test_a_file_of_something_else_is_left_and_told(target: FrozenTarget, tmp_path: Path) -> None:
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
            generated(tmp_path, server.address, hybrid(tmp_path))
    assert len(load_file(somebodys)) == 2
