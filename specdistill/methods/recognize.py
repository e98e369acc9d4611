"""Where a draft is, and which method it is for, from its content: the tensors' names first, then what its config.json calls itself.

Tensors decide because configs do not: SafeAILab's EAGLE-3 heads call themselves `LlamaForCausalLM`, as a plain model does.
"""

import json
import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdistill.errors import UserError, one_line
from specdistill.hub import fetch, split_revision
from specdistill.methods.checkpoint import PICKLED, read_config
from specdistill.methods.mtp.checkpoint import ARCHITECTURE as MTP
from specdistill.targets.frozen import resolve
from specdistill.targets.shards import INDEX, SINGLE, Shards

EXPECTED = "a draft: an EAGLE or MTP head or a causal language model, config.json and weights"
EAGLE3_TENSORS = ({"fc.weight", "midlayer.hidden_norm.weight"}, {"fc.weight", "layers.0.hidden_norm.weight"})
EAGLE_TENSORS = {"fc.weight", "layers.0.self_attn.q_proj.weight"}
# Where a tensor that tells is missing, what a config.json calls its head; the reader then names the tensor.
NAMED = {
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Eagle3Speculator": "eagle3",
    "LlamaForCausalLMEagle": "eagle",
    "EagleLlamaForCausalLM": "eagle",
}
# Parallel drafts have the tensors of a head and these.
OTHER_TENSORS = {"mask_hidden", "hidden_norm.weight"}
WHOLE_DRAFT = (
    "config.json",
    "*.safetensors",
    "*.index.json",
    "pytorch_model*.bin",
    "tokenizer*",
    "*tokens*.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
    "generation_config.json",
)


def locate(draft: str, *, key: str = "eval.draft", expected: str = "the folder or Hub id of a draft") -> Path:
    """The folder of a draft: itself, or the Hub's files in the local cache; `org/name@revision` is a branch, tag or commit of it.

    Raises UserError for a path that is no folder, ResourceError when the Hub fails.
    """
    name, revision = split_revision(draft)
    return fetch(resolve(name, key), key=key, expected=expected, revision=revision, patterns=WHOLE_DRAFT)


def method_of(folder: Path, *, key: str = "eval.draft") -> str:
    """`eagle3`, `eagle`, `mtp` or `draft_model`. `key` is what errors name; raises UserError, saying what was found, for anything else."""
    config, names = read_config(folder, key), _tensor_names(folder, key)
    if not names & OTHER_TENSORS:
        if any(wanted <= names for wanted in EAGLE3_TENSORS):
            return "eagle3"
        if names >= EAGLE_TENSORS:
            return "eagle"
    architectures = config.get("architectures") or []
    if names and not names & OTHER_TENSORS and (incomplete := _incomplete(architectures, names)):
        return incomplete
    if names and architectures == [MTP]:
        return "mtp"
    if names and set(architectures) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        return "draft_model"
    found = f"architectures {', '.join(map(str, architectures)) or 'not named'}" + (
        f" and {len(names)} tensors" if names else " and no weights"
    )
    raise UserError(key, got=f"{folder}, which holds a config.json with {found}", expected=EXPECTED)


def _incomplete(architectures: list[str], names: set[str]) -> str | None:
    """The method of a head without one of the tensors that tell: by its name, or by tensors that no whole model calls so."""
    named = next((NAMED[architecture] for architecture in architectures if architecture in NAMED), None)
    if named or any(name.startswith("midlayer.") for name in names):
        return named or "eagle3"
    return "eagle" if "layers.0.self_attn.q_proj.weight" in names and "norm.weight" not in names else None


def _tensor_names(folder: Path, key: str) -> set[str]:
    """Names of the tensors in a folder's weights, without reading the tensors; empty when it has no weights."""
    if (folder / INDEX).is_file() or (folder / SINGLE).is_file():
        return set(Shards.open(folder, key).file_of)
    try:
        if (folder / PICKLED).is_file():
            return set(torch.load(folder / PICKLED, map_location="meta", weights_only=True))
        for index in sorted(folder.glob("*.index.json")):
            return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (SafetensorError, ValueError, KeyError, RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        got = f"{folder} with weights that cannot be read ({one_line(str(error))[:120]})"
        raise UserError(key, got=got, expected="whole safetensors, or a pickle of plain tensors") from error
    return set()
