import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from specdistill.common.repositories import resolve
from specdistill.data.rows.packing import index_batch
from specdistill.methods.chains.objective import TrainingTimeTest
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.loading import read_tokenizer
from specdistill.training.losses.divergence import forward_kl
from tests.families import OTHERS, write_model
from tests.heads import document_rows
from tests.refusals import refused
from tests.tiny import save_adapter, tiny_target_model, tiny_tokenizer, write_target


def test_captured_layers_are_transformers_hidden_states(target: FrozenTarget) -> None:
    ids = torch.arange(3, 20)[None]
    hidden_states = target.backbone(ids, output_hidden_states=True).hidden_states
    features = target.features(ids, [0, 2, target.num_layers - 1])
    for layer, captured in zip((0, 2, target.num_layers - 1), features.aux, strict=True):
        assert torch.equal(captured, hidden_states[layer])
    assert torch.equal(features.last_hidden, hidden_states[-1])


def test_features_after_all_layers_precede_the_final_norm(target: FrozenTarget) -> None:
    features = target.features(torch.arange(3, 9)[None], [target.num_layers])
    assert torch.allclose(target.backbone.norm(features.aux[0]), features.last_hidden, atol=1e-6)


def test_capture_leaves_no_hooks_behind(target: FrozenTarget) -> None:
    target.features(torch.arange(3, 9)[None], [1, 2])
    assert not any(
        layer._forward_pre_hooks for layer in [*target.backbone.layers, target.backbone.norm]
    )


def test_a_misspelt_name_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    with refused("target.model", "pcio"):
        resolve("pcio")
    with refused("target.model", tmp_path / "nothing"):
        FrozenTarget.load(str(tmp_path / "nothing"))


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json"])
def test_a_folder_without_weights_or_tokenizer_is_refused(tmp_path: Path, missing: str) -> None:
    (write_target(tmp_path) / missing).unlink()
    with refused("target.model", tmp_path):
        FrozenTarget.load(str(tmp_path))


def test_a_tokenizer_that_splits_no_text_is_refused(tmp_path: Path) -> None:
    file = write_target(tmp_path) / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": [512]}))
    with refused("target.model", tmp_path):
        FrozenTarget.load(str(tmp_path))
    with refused("target.model", tmp_path):
        read_tokenizer(TargetFiles(str(tmp_path)))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("targets") / "base")


def test_a_merged_adapter_makes_another_target(base: Path, tmp_path: Path) -> None:
    adapted = save_adapter(
        tmp_path, "someone/Base"
    )  # the last part of the base's name is that of its folder
    plain, target = (
        FrozenTarget.load(str(base)),
        FrozenTarget.load(str(base), adapter=str(tmp_path)),
    )
    ids = torch.arange(4, 28)[None]
    assert torch.allclose(target.model(ids).logits, adapted(ids).logits.detach(), atol=1e-5)
    assert not torch.allclose(target.model(ids).logits, plain.model(ids).logits, atol=1e-2)
    assert type(target.model) is type(plain.model) and target.num_parameters == plain.num_parameters
    assert target.name == f"{base} + {tmp_path}" and target.identity.adapter == str(tmp_path)
    assert (
        target.identity.weights != plain.identity.weights
        and target.identity.tokenizer == plain.identity.tokenizer
    )
    config = tmp_path / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 16'))
    rescaled = FrozenTarget.load(str(base), adapter=str(tmp_path))
    assert not torch.allclose(rescaled.model(ids).logits, target.model(ids).logits, atol=1e-2)
    assert not rescaled.identity.is_same(target.identity)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("someone/other", {}),
        (None, {"hidden_size": 128}),
        (None, {"num_layers": 6}),
        (None, {"num_layers": 2}),
    ],
)
def test_an_adapter_of_another_base_is_refused(
    base: Path, tmp_path: Path, name: str, model: Any
) -> None:
    save_adapter(tmp_path, name, **model)
    with refused("target.adapter"):
        FrozenTarget.load(str(base), adapter=str(tmp_path))


def test_several_adapters_are_refused(base: Path) -> None:
    with refused("target.adapter", "2 adapters"):
        FrozenTarget.load(str(base), adapter=["a", "b"])


@pytest.mark.parametrize(
    "broken", ["adapter_config.json", "adapter_model.safetensors", "truncated"]
)
def test_a_broken_adapter_is_refused(base: Path, tmp_path: Path, broken: str) -> None:
    save_adapter(tmp_path, str(base))
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100]) if broken == "truncated" else (
        tmp_path / broken
    ).unlink()
    with refused("target.adapter"):
        FrozenTarget.load(str(base), adapter=str(tmp_path))


def test_missing_weights_are_refused(base: Path, tmp_path: Path) -> None:
    tensors = load_file(write_target(tmp_path) / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with refused("target.model", f"{tmp_path} without model.layers.1.mlp.up_proj.weight"):
        FrozenTarget.load(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("musicgen", ""),
        ("reformer", ""),
        ("t5", "an encoder-decoder"),
        ("bart", "an encoder-decoder"),
    ],
)
def test_a_class_that_is_no_target_is_refused_in_one_line(
    tmp_path: Path, kind: str, why: str
) -> None:
    """transformers cannot read musicgen's config, and reformer's class rejects its own config."""
    CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with refused("target.model", tmp_path, holds=why):
        FrozenTarget.load(str(tmp_path))


def test_the_attention_is_the_classs_own_unless_one_is_named(base: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "gemma2", {"model_type": "gemma2"}, OTHERS)
    assert FrozenTarget.load(str(tmp_path / "gemma2")).config._attn_implementation == "eager"
    assert FrozenTarget.load(str(base)).config._attn_implementation == "sdpa"
    assert FrozenTarget.load(str(base), attn="eager").config._attn_implementation == "eager"


def test_a_step_runs_each_layer_once_and_the_head_at_loss_tokens_alone() -> None:
    target = FrozenTarget(tiny_target_model(), tiny_tokenizer(), name="tiny")
    ids = torch.arange(3, 67)[None]
    batch = index_batch({**document_rows(range(3, 67)), "loss_mask": (ids > 50).long()})
    objective = TrainingTimeTest(build_eagle3(target), forward_kl, 1)
    target._packing  # noqa: B018  (examined before the hooks count passes)
    calls, tokens = [0] * target.num_layers, 0

    def count(layer: int, *_: Any) -> None:
        calls[layer] += 1

    def add(_module: Any, args: tuple[torch.Tensor, ...]) -> None:
        nonlocal tokens
        tokens += args[0].numel() // args[0].shape[-1]

    for number, layer in enumerate(target.layers):
        layer.register_forward_pre_hook(partial(count, number))
    target.lm_head.register_forward_pre_hook(add)
    with torch.no_grad():
        objective(**batch, **objective.read_target(target, batch))
    assert calls == [1] * target.num_layers
    assert int((ids > 50).sum()) == tokens == len(batch["loss_positions"]) < ids.numel()
