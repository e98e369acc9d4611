"""Tiny random targets with multi-token prediction, and checkpoints as publishers write them.

Names and shapes are stated by hand.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from specdistill.targets.frozen import FrozenTarget
from tests.tiny import tiny_tokenizer

KINDS = ("qwen3_next", "qwen3_5", "deepseek_v3")
HIDDEN, EXPERTS, INNER, VOCABULARY = 32, 4, 16, 260

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
HYBRID: dict[str, Any] = {  # a layer with linear attention, then one with full attention
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
# The scale of attention is not d ** -0.5 under YaRN, and values are wider than keys.
LATENT: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": INNER,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 20,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def tiny_model(kind: str, seed: int = 0) -> PreTrainedModel:
    """Return a random target; every parameter that starts as a constant is made random too."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "qwen3_next":
            experts = {
                "num_experts": EXPERTS,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": INNER,
            }
            config = Qwen3NextConfig(
                **COMMON, **HYBRID, **experts, shared_expert_intermediate_size=INNER
            )
            model: PreTrainedModel = Qwen3NextForCausalLM(config)
        elif kind == "qwen3_5":
            rope = {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 0],
                "partial_rotary_factor": 0.25,
            }
            model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**COMMON, **HYBRID, rope_parameters=rope))
        else:
            model = DeepseekV3ForCausalLM(DeepseekV3Config(**COMMON, **LATENT))
        for name, tensor in model.state_dict().items():
            if "norm" in name or "bias" in name:
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return model.eval()


def tiny_target(kind: str) -> FrozenTarget:
    return FrozenTarget(tiny_model(kind), tiny_tokenizer(), name=f"tiny {kind}")


def layer_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the decoder layer's tensors, by their names in checkpoints."""
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    if kind == "deepseek_v3":
        shapes |= {
            "self_attn.q_a_proj": (12, HIDDEN),
            "self_attn.q_a_layernorm": (12,),
            "self_attn.q_b_proj": (4 * 12, 12),
            "self_attn.kv_a_proj_with_mqa": (8 + 4, HIDDEN),
            "self_attn.kv_a_layernorm": (8,),
            "self_attn.kv_b_proj": (4 * (8 + 20), 8),
            "self_attn.o_proj": (HIDDEN, 4 * 20),
        }
    else:
        shapes |= {
            "self_attn.q_proj": (2 * 4 * 16, HIDDEN),  # with the output gate
            "self_attn.k_proj": (2 * 16, HIDDEN),
            "self_attn.v_proj": (2 * 16, HIDDEN),
            "self_attn.o_proj": (HIDDEN, 4 * 16),
            "self_attn.q_norm": (16,),
            "self_attn.k_norm": (16,),
        }
    if kind == "qwen3_5":
        feed_forward = {"mlp": 48}
    else:
        shared = "shared_expert" if kind == "qwen3_next" else "shared_experts"
        feed_forward = {
            f"mlp.{part}": INNER for part in (shared, *(f"experts.{e}" for e in range(EXPERTS)))
        }
        shapes |= {"mlp.gate": (EXPERTS, HIDDEN)}
        shapes |= {"mlp.shared_expert_gate": (1, HIDDEN)} if kind == "qwen3_next" else {}
    for part, inner in feed_forward.items():
        shapes |= {
            f"{part}.gate_proj": (inner, HIDDEN),
            f"{part}.up_proj": (inner, HIDDEN),
            f"{part}.down_proj": (HIDDEN, inner),
        }
    shapes = {f"{name}.weight": shape for name, shape in shapes.items()}
    return shapes | (
        {"mlp.gate.e_score_correction_bias": (EXPERTS,)} if kind == "deepseek_v3" else {}
    )


def mtp_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the published layer, without the copies of embedding and head."""
    if kind == "deepseek_v3":
        norms = ("enorm", "hnorm", "shared_head.norm")
        own = {"eh_proj.weight": (HIDDEN, 2 * HIDDEN)} | {
            f"{name}.weight": (HIDDEN,) for name in norms
        }
        return {
            f"model.layers.2.{name}": shape for name, shape in (own | layer_shapes(kind)).items()
        }
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    own = {"mtp.fc.weight": (HIDDEN, 2 * HIDDEN)} | {
        f"mtp.{name}.weight": (HIDDEN,) for name in norms
    }
    return own | {f"mtp.layers.0.{name}": shape for name, shape in layer_shapes(kind).items()}


def mtp_tensors(
    kind: str, model: PreTrainedModel, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return the tensors of a published layer, random.

    DeepSeek's comes with copies of embedding and head, and its routing bias in float32.
    """
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.2
        for name, shape in mtp_shapes(kind).items()
    }
    tensors = {
        name: tensor if name.endswith("correction_bias") else tensor.to(dtype)
        for name, tensor in tensors.items()
    }
    if kind == "deepseek_v3":
        tensors["model.layers.2.embed_tokens.weight"] = (
            model.get_input_embeddings().weight.data.to(dtype).clone()
        )
        tensors["model.layers.2.shared_head.head.weight"] = (
            model.get_output_embeddings().weight.data.to(dtype).clone()
        )
    return tensors


def write_checkpoint(
    kind: str,
    folder: Path,
    *,
    sharded: bool = False,
    with_mtp: bool = True,
    dtype: torch.dtype = torch.float32,
) -> FrozenTarget:
    """Write a checkpoint as its publisher would, and return the target loaded from it."""
    model = tiny_model(kind)
    for parameter in model.parameters():  # but no buffer: the routing bias is published in float32
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder, max_shard_size="40KB" if sharded else "1GB")
    tiny_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("num_nextn_predict_layers", None)
    if with_mtp:
        config["mtp_num_hidden_layers" if kind == "qwen3_5" else "num_nextn_predict_layers"] = 1
        add_tensors(folder, mtp_tensors(kind, model, dtype))
    (folder / "config.json").write_text(json.dumps(config))
    return FrozenTarget.load(str(folder), dtype=str(dtype).removeprefix("torch."))


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Add tensors to the single file, or to the last shard of several."""
    index_path = folder / "model.safetensors.index.json"
    if not index_path.is_file():
        path = folder / "model.safetensors"
        save_file(load_file(path) | tensors, path, metadata={"format": "pt"})
        return
    index = json.loads(index_path.read_text())
    path = folder / max(index["weight_map"].values())
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(tensors, path.name)
    index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
    index_path.write_text(json.dumps(index))


def all_tensors(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint; none may stand in two files."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        inside = load_file(path)
        assert not tensors.keys() & inside.keys(), path
        tensors |= inside
    return tensors
