"""The EAGLE-1 head: exact tensors, and what other writers put into a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdistill.errors import UserError
from specdistill.methods.eagle.checkpoint import load_eagle, save_eagle
from specdistill.methods.eagle.module import build_eagle
from specdistill.methods.heads.unroll import UnrollKVCache
from specdistill.targets.frozen import FrozenTarget
from tests.tiny import tiny_target_model, tiny_tokenizer


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(tiny_target_model(), tiny_tokenizer(), name="tiny")


def rewrite(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> None:
    """Add tensors and keys to a checkpoint; a key of None goes."""
    path = folder / "model.safetensors"
    save_file({**load_file(path), **(tensors or {})}, path)
    raw = {**json.loads((folder / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))


def test_tensors_are_those_that_engines_load(target: FrozenTarget, tmp_path: Path) -> None:
    save_eagle(build_eagle(target), tmp_path)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    size, source = target.hidden_size, target.config
    heads, groups, inner = source.num_attention_heads * 32, source.num_key_value_heads * 32, source.intermediate_size
    assert shapes == {
        "fc.weight": (size, 2 * size),
        "layers.0.self_attn.q_proj.weight": (heads, size),
        "layers.0.self_attn.k_proj.weight": (groups, size),
        "layers.0.self_attn.v_proj.weight": (groups, size),
        "layers.0.self_attn.o_proj.weight": (size, heads),
        "layers.0.post_attention_layernorm.weight": (size,),
        "layers.0.mlp.gate_proj.weight": (inner, size),
        "layers.0.mlp.up_proj.weight": (inner, size),
        "layers.0.mlp.down_proj.weight": (size, inner),
    }
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["bias"] is False


def test_it_computes_what_its_formula_says(target: FrozenTarget) -> None:
    """One position: attention over itself alone is its value, so the head is two matrix products and an MLP."""
    head = build_eagle(target)
    ids, hidden = torch.tensor([[7]]), torch.randn(1, 1, target.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output, next_hidden = head(
            ids, hidden, head.rotary(hidden, torch.zeros_like(ids)), UnrollKVCache(torch.zeros_like(ids), 1)
        )
        layer = head.layers[0]
        fused = torch.cat((head.embed_tokens(ids), hidden), -1) @ head.fc.weight.T
        value = layer.self_attn.v_proj(fused).view(1, 1, -1, 32)
        shared = target.config.num_attention_heads // target.config.num_key_value_heads
        state = fused + layer.self_attn.o_proj(value.repeat_interleave(shared, 2).flatten(2))
        normed = state * (state.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        expected = state + layer.mlp(normed)
    assert torch.allclose(output, expected, atol=1e-5) and output is next_hidden


def test_a_config_without_bias_means_a_bias_as_its_first_writer_has_it(target: FrozenTarget, tmp_path: Path) -> None:
    save_eagle(build_eagle(target), tmp_path)
    rewrite(tmp_path, bias=None)
    with pytest.raises(UserError, match=r"without fc\.bias"):
        load_eagle(tmp_path, target)
    rewrite(tmp_path, {"fc.bias": torch.linspace(0, 1, target.hidden_size)})
    assert load_eagle(tmp_path, target).fc.bias[-1] == 1


def test_a_bias_that_the_config_denies_is_refused_unless_it_is_nothing(target: FrozenTarget, tmp_path: Path) -> None:
    save_eagle(build_eagle(target), tmp_path)
    rewrite(tmp_path, {"fc.bias": torch.zeros(target.hidden_size)})
    assert load_eagle(tmp_path, target).fc.bias is None
    rewrite(tmp_path, {"fc.bias": torch.ones(target.hidden_size)})
    with pytest.raises(UserError, match=r"unknown fc\.bias"):
        load_eagle(tmp_path, target)


def test_copies_of_the_targets_embedding_and_head_are_read_and_others_refused(target: FrozenTarget, tmp_path: Path) -> None:
    save_eagle(build_eagle(target), tmp_path)
    own = {
        "embed_tokens.weight": target.backbone.embed_tokens.weight.detach(),
        "lm_head.weight": target.lm_head.weight.detach(),
    }
    rewrite(tmp_path, {name: tensor.half() for name, tensor in own.items()})  # as SafeAILab's are
    load_eagle(tmp_path, target)
    rewrite(tmp_path, {"lm_head.weight": own["lm_head.weight"] + 1})
    with pytest.raises(UserError, match=r"another lm_head\.weight than tiny has"):
        load_eagle(tmp_path, target)


def test_an_input_norm_in_the_first_layer_is_refused(target: FrozenTarget, tmp_path: Path) -> None:
    save_eagle(build_eagle(target), tmp_path)
    rewrite(tmp_path, {"layers.0.input_layernorm.weight": torch.ones(target.hidden_size)})
    with pytest.raises(UserError, match=r"unknown layers\.0\.input_layernorm\.weight"):
        load_eagle(tmp_path, target)


def test_vllms_wrapper_is_read(target: FrozenTarget, tmp_path: Path) -> None:
    save_eagle(build_eagle(target), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "eagle", "model": config, "method": "eagle"}))
    assert load_eagle(tmp_path, target).config.hidden_size == target.hidden_size
