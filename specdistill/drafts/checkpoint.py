"""EAGLE-3 checkpoints: a folder of config.json and model.safetensors in the layout of SGLang, SpecForge and vLLM (`midlayer.*`).

What goes over the edge here and nowhere else:
- the first layer is `layers.0` inside and `midlayer` in the file; readers take both;
- auxiliary layers count "after L layers" inside; the nested `eagle_aux_hidden_state_layer_ids` of the file counts L - 1. Engines disagree
  about that key, so it is left out when the layers are the default ones, which every engine then computes alike;
- the embedding is left out when it is the target's; `d2t` and `t2d` are left out when the vocabulary is not pruned (vLLM refuses them).
"""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdistill.drafts.eagle3 import Eagle3Config, Eagle3Draft
from specdistill.errors import UserError, one_line
from specdistill.targets.frozen import FrozenTarget, engine_aux_layers


def save_eagle3(draft: Eagle3Draft, folder: Path) -> None:
    """Write the head; `load_eagle3` reads it back bit for bit, and so do the engines."""
    folder.mkdir(parents=True, exist_ok=True)
    config = draft.config
    left_out = set() if config.owns_embedding else {"embed_tokens.weight"}
    left_out |= set() if config.prunes_vocabulary else {"d2t", "t2d"}
    tensors = {
        name.replace("layers.0.", "midlayer."): tensor.detach().cpu().contiguous()
        for name, tensor in draft.state_dict().items()
        if name not in left_out
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_to_json(config, draft.fc.weight.dtype), indent=2) + "\n")


def load_eagle3(folder: Path | str, target: FrozenTarget, *, key: str = "eval.draft") -> Eagle3Draft:
    """Read a head for a target, from the layouts that call the first layer `midlayer` or `layers.0`.

    `key` is the recipe key the folder came from, which errors name. Raises UserError when files are missing or broken, when a tensor is
    missing, unknown or of another shape, or when the head is for another hidden size or vocabulary than the target's.
    """
    folder = Path(folder)
    config = config_from_json(_read_config(folder, key), target.num_layers, key)
    _check_fit(config, target, folder, key)
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in _read_tensors(folder, key).items()}
    draft = Eagle3Draft(config)
    for parameter in draft.parameters():
        torch.nn.init.constant_(parameter, torch.nan)  # what is forgotten shows at once
    if not config.owns_embedding:
        tensors.setdefault("embed_tokens.weight", target.model.get_input_embeddings().weight)
    _check_tensors(tensors, draft, folder, key)
    draft.to(tensors["fc.weight"].dtype).load_state_dict(tensors, strict=False)
    if config.prunes_vocabulary:
        draft.set_vocabulary(draft.target_ids_W)  # t2d follows from d2t
    return draft


def config_to_json(config: Eagle3Config, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of `LlamaForCausalLMEagle3`."""
    eagle: dict[str, Any] = {"use_aux_hidden_state": True}
    if list(config.aux_layers) != engine_aux_layers(config.target_num_layers):
        eagle["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in config.aux_layers]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "num_hidden_layers": config.num_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": len(config.aux_layers),
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "norm_before_residual": config.norm_before_residual,
        "eagle_config": eagle,
    }


def config_from_json(raw: Mapping[str, Any], target_num_layers: int, key: str = "eval.draft") -> Eagle3Config:
    """The inverse of `config_to_json`, with the defaults that engines assume for absent keys."""
    nested = raw.get("eagle_config") or {}
    ids = nested.get("eagle_aux_hidden_state_layer_ids")
    aux_layers = [index + 1 for index in ids] if ids is not None else engine_aux_layers(target_num_layers)
    rope = raw.get("rope_parameters") or {}
    try:
        return Eagle3Config(
            vocab_size=raw["vocab_size"],
            draft_vocab_size=raw.get("draft_vocab_size") or raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            target_hidden_size=raw.get("target_hidden_size") or raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_attention_heads=raw["num_attention_heads"],
            num_key_value_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            aux_layers=tuple(aux_layers),
            target_num_layers=target_num_layers,
            num_layers=raw.get("num_hidden_layers", 1),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=raw.get("rope_theta") or rope.get("rope_theta") or 10000.0,
            rope_scaling=raw.get("rope_scaling"),
            max_position_embeddings=raw.get("max_position_embeddings", 2048),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_id=raw.get("eos_token_id"),
            fc_norm=raw.get("fc_norm", False),
            norm_output=raw.get("norm_output", False),
            norm_before_residual=raw.get("norm_before_residual", False),
        )
    except KeyError as error:
        raise UserError(key, got=f"a config.json without {error.args[0]}", expected="the keys of an EAGLE-3 head") from error


def _read_config(folder: Path, key: str) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(key, got=f"{folder}, which has no config.json", expected="the folder of a trained draft") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(key, got=f"{path}: {error}", expected="JSON") from error
    return raw


def _read_tensors(folder: Path, key: str) -> dict[str, Tensor]:
    """The weights of a folder; pickles only as plain tensors (`weights_only`)."""
    safetensors, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    try:
        if safetensors.is_file():
            return load_file(safetensors)
        if pickled.is_file():
            tensors: dict[str, Tensor] = torch.load(pickled, map_location="cpu", weights_only=True)
            return tensors
    except SafetensorError as error:
        raise UserError(key, got=f"{safetensors}: {one_line(str(error))}", expected="a whole safetensors file") from error
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise UserError(key, got=f"{pickled}: {one_line(str(error))[:120]}", expected="plain tensors (weights_only)") from error
    raise UserError(key, got=f"{folder}, which has no weights", expected="model.safetensors or pytorch_model.bin")


def _check_fit(config: Eagle3Config, target: FrozenTarget, folder: Path, key: str) -> None:
    for name, got, expected in (
        ("target_hidden_size", config.target_hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if got != expected:
            raise UserError(key, got=f"{folder} with {name} {got}", expected=f"{expected}, as {target.name} has")
    if not all(0 <= layer <= target.num_layers for layer in config.aux_layers):
        raise UserError(
            key, got=f"{folder} with auxiliary layers {list(config.aux_layers)}", expected=f"0..{target.num_layers}"
        )


def _check_tensors(tensors: Mapping[str, Tensor], draft: Eagle3Draft, folder: Path, key: str) -> None:
    """Every tensor of the head is there, in its shape, and no other is. `t2d` may be left out: it follows from `d2t`."""
    expected = draft.state_dict()
    optional = {"t2d"} if draft.config.prunes_vocabulary else {"t2d", "d2t"}
    missing = sorted(expected.keys() - tensors.keys() - optional)
    unknown = sorted(tensors.keys() - expected.keys())
    misshapen = [name for name in sorted(expected.keys() & tensors.keys()) if expected[name].shape != tensors[name].shape]
    if missing or unknown or misshapen:
        problems = [f"without {name}" for name in missing] + [f"with unknown {name}" for name in unknown]
        problems += [f"with {name} of shape {tuple(tensors[name].shape)}" for name in misshapen]
        wanted = "; ".join(f"{name} of shape {tuple(expected[name].shape)}" for name in (missing + misshapen)[:3])
        raise UserError(
            key, got=f"{folder} {', '.join(problems[:3])}", expected=wanted or "the tensors of an EAGLE-3 head alone"
        )
