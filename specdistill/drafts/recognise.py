"""Which method a draft folder is for, from its content: the tensors' names first, then what its config.json calls itself.

Tensors decide because configs do not: SafeAILab's EAGLE-3 heads call themselves `LlamaForCausalLM`, as a plain model does.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdistill.errors import UserError, one_line

EXPECTED = "a draft: an EAGLE-3 head or a causal language model, config.json and weights"
EAGLE3_TENSORS = ({"fc.weight", "midlayer.hidden_norm.weight"}, {"fc.weight", "layers.0.hidden_norm.weight"})


def method_of(folder: Path, *, key: str = "eval.draft") -> str:
    """`eagle3` or `draft_model`. `key` is what errors name; raises UserError, saying what was found, for anything else."""
    config, names = read_config(folder, key), _tensor_names(folder, key)
    if any(wanted <= names for wanted in EAGLE3_TENSORS):
        return "eagle3"
    architectures = config.get("architectures") or []
    if names and set(architectures) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        return "draft_model"
    found = f"architectures {', '.join(map(str, architectures)) or 'not named'}" + (
        f" and {len(names)} tensors" if names else " and no weights"
    )
    raise UserError(key, got=f"{folder}, which holds a config.json with {found}", expected=EXPECTED)


def read_config(folder: Path, key: str) -> dict[str, Any]:
    """A folder's config.json. Raises UserError, saying what is there instead, when it has none."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        found = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        inside = next((str(folder / name) for name in found if (folder / name / "config.json").is_file()), None)
        shown = f"holds {', '.join(found[:5])}{', …' * (len(found) > 5)}" if found else "is empty"
        raise UserError(key, got=f"{folder}, which {shown}", expected=EXPECTED, nearest=inside) from error
    except (ValueError, OSError) as error:
        raise UserError(key, got=f"{path}: {error}", expected="JSON") from error
    if not isinstance(config, dict):
        raise UserError(key, got=f"{path}, which holds no keys", expected="the config.json of a draft")
    return config


def _tensor_names(folder: Path, key: str) -> set[str]:
    """Names of the tensors in a folder's weights, without reading the tensors; empty when it has no weights."""
    try:
        for index in sorted(folder.glob("*.index.json")):
            return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        if (folder / "model.safetensors").is_file():
            with safe_open(folder / "model.safetensors", framework="pt") as weights:
                return set(weights.keys())
        if (folder / "pytorch_model.bin").is_file():
            return set(torch.load(folder / "pytorch_model.bin", map_location="meta", weights_only=True))
    except (SafetensorError, ValueError, KeyError, RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        got = f"{folder} with weights that cannot be read ({one_line(str(error))[:120]})"
        raise UserError(key, got=got, expected="whole safetensors, or a pickle of plain tensors") from error
    return set()
