from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from specdistill.errors import UserError
from specdistill.targets.frozen import FrozenTarget, check_aux_layers, default_aux_layers, resolve
from tests.tiny import tiny_target_model, tiny_tokenizer


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(tiny_target_model(), tiny_tokenizer(), name="tiny")


def test_captured_layers_are_transformers_hidden_states(target: FrozenTarget) -> None:
    ids = torch.arange(3, 20)[None]
    hidden_states = target.backbone(ids, output_hidden_states=True).hidden_states
    features = target.features(ids, [0, 2, target.num_layers - 1])
    for layer, got in zip((0, 2, target.num_layers - 1), features.aux, strict=True):
        assert torch.equal(got, hidden_states[layer])
    assert torch.equal(features.last_hidden, hidden_states[-1])


def test_after_all_layers_is_before_the_final_norm(target: FrozenTarget) -> None:
    features = target.features(torch.arange(3, 9)[None], [target.num_layers])
    assert torch.allclose(target.backbone.norm(features.aux[0]), features.last_hidden, atol=1e-6)


def test_capture_leaves_no_hooks_behind(target: FrozenTarget) -> None:
    target.features(torch.arange(3, 9)[None], [1, 2])
    assert not any(layer._forward_pre_hooks for layer in [*target.backbone.layers, target.backbone.norm])


def test_packed_documents_never_see_each_other(target: FrozenTarget) -> None:
    first, second = torch.arange(3, 15)[None], torch.arange(20, 28)[None]
    packed = torch.cat((first, second), dim=1)
    positions = torch.cat((torch.arange(12), torch.arange(8)))[None]
    together = target.features(packed, [2], position_ids_BT=positions)
    assert torch.allclose(together.aux[0][:, :12], target.features(first, [2]).aux[0], atol=1e-5)
    assert torch.allclose(together.aux[0][:, 12:], target.features(second, [2]).aux[0], atol=1e-5)
    # Several packed rows in a batch, as the trainer has them
    both = target.features(packed.repeat(2, 1), [2], position_ids_BT=positions.repeat(2, 1))
    assert torch.allclose(both.aux[0][1, 12:], target.features(second, [2]).aux[0][0], atol=1e-5)


def test_cached_passes_equal_one_pass(target: FrozenTarget) -> None:
    ids = torch.arange(3, 20)[None]
    whole = target.features(ids, [1, 3])
    cache = DynamicCache(config=target.config)
    parts = [target.features(ids[:, a:b], [1, 3], past_key_values=cache) for a, b in ((0, 9), (9, 10), (10, 17))]
    for index in range(2):
        assert torch.allclose(torch.cat([part.aux[index] for part in parts], 1), whole.aux[index], atol=1e-4)


def test_default_layers_are_low_middle_high() -> None:
    assert default_aux_layers(36) == [2, 18, 33]
    assert [default_aux_layers(n) for n in (7, 5, 4, 2)] == [[2, 3, 4], [1, 2, 4], [1, 2, 3], [1]]
    assert check_aux_layers(None, 16) == [2, 8, 13]


@pytest.mark.parametrize("layers", [[17], [-1], [2, 2], []])
def test_layers_out_of_range_are_refused(layers: list[int]) -> None:
    with pytest.raises(UserError, match=r"draft\.aux_layers: got .* 0\.\.16"):
        check_aux_layers(layers, 16)


def test_a_misspelt_name_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"target\.model: got pcio.*did you mean pico"):
        resolve("pcio")
    with pytest.raises(UserError, match=r"target\.model: got .*no folder"):
        FrozenTarget.load(str(tmp_path / "nothing"))


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json"])
def test_a_folder_without_weights_or_tokenizer_is_refused(tmp_path: Path, missing: str) -> None:
    tiny_target_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(UserError, match=r"^target\.model: got .* expected pico, a folder"):
        FrozenTarget.load(str(tmp_path))


def test_fingerprint_tells_weights_apart(target: FrozenTarget) -> None:
    other = FrozenTarget(tiny_target_model(seed=1), tiny_tokenizer(), name="tiny")
    same = FrozenTarget(tiny_target_model(), tiny_tokenizer(), name="tiny")
    assert target.fingerprint() == same.fingerprint() != other.fingerprint()
