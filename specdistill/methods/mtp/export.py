"""Export a draft for multi-token prediction: merge its weights into a full copy of the target's checkpoint, where engines look for them.

Only files that must differ are written: the shards that hold the target's own such layer (or one new shard, `model-mtp.safetensors`),
the index and config.json. Other weights are hard links where the file system allows it, all else is copied. Tensors keep the dtype that
the checkpoint has them in, so a layer that was not trained comes out bit for bit.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdistill.engines.engine import Engine
from specdistill.errors import UserError
from specdistill.methods.checkpoint import read_config
from specdistill.methods.folder import check_new, link, new_folder
from specdistill.methods.mtp.checkpoint import check_fit
from specdistill.methods.mtp.tensor_names import SERVED_TYPES, Naming, depth_key, has_fused_experts, merge_experts, naming_of
from specdistill.targets.files import INDEX, SINGLE, Shards, TargetFiles, needed

NEW_SHARD = "model-mtp.safetensors"


def export(draft: Path, engine: Engine, output: Path, target: TargetFiles | None, num_speculative_tokens: int) -> None:
    """Write the target's checkpoint with the draft's layer. Raises UserError for a target of which no engine would look for it."""
    target = needed(target, "the layer goes into its checkpoint")
    kind = target.text_config.get("model_type")
    if kind not in SERVED_TYPES:
        got = f"{engine.name} for a layer of {target.name}, a {kind}"
        raise UserError("engine", got=got, expected=f"a target that it loads such layers of: {', '.join(sorted(SERVED_TYPES))}")
    merge_mtp_weights(draft, target.fetch("*"), output)


def merge_mtp_weights(draft: Path, target: Path, output: Path) -> None:
    """Write `output`: the checkpoint in the folder `target` with the layer in the folder `draft` (see `save_mtp`).

    Raises UserError when the output exists, the draft is for another target, its tensors are not those that the checkpoint already has,
    or the checkpoint is quantized or disagrees with its index; ResourceError when writing fails. Nothing is left behind then.
    """
    check_new(output)
    checkpoint = Shards.open(target, "target.model")
    checkpoint.check()
    config, draft_config = checkpoint.config(), read_config(draft, "draft")
    merged = _tensors(draft, draft_config, checkpoint, config)
    with new_folder(output) as partial:
        _write(checkpoint, merged, partial)
        _write_config(config, depth_key(draft_config["text_config"]["model_type"]), partial)
        Shards.open(partial, "output_dir").check()


def _tensors(draft: Path, draft_config: dict[str, Any], checkpoint: Shards, config: dict[str, Any]) -> dict[str, Tensor]:
    """The draft's tensors by the names, and in the dtypes, that the checkpoint has or would have them in."""
    target, text = checkpoint.folder, config.get("text_config") or config
    if config.get("quantization_config") or text.get("quantization_config"):
        raise UserError("target.model", got=f"{target}, which is quantized", expected="a checkpoint in floating point")
    # A config.json may leave out what is its model's default.
    check_fit(draft_config, (draft_config.get("text_config") or {}) | text, draft, "draft", str(target))
    naming, num_layers = naming_of(draft_config["text_config"]["model_type"]), draft_config["text_config"]["num_hidden_layers"]
    shards, draft_prefix = Shards.open(draft, "draft"), naming.prefix(num_layers)
    prefix = naming.find_prefix(checkpoint.file_of, num_layers) or draft_prefix
    present = {name for name in checkpoint.file_of if naming.owns(name, prefix)}
    tensors = {prefix + name.removeprefix(draft_prefix): tensor for name, tensor in shards.load(shards.file_of).items()}
    if has_fused_experts(present or checkpoint.file_of):
        tensors = merge_experts(tensors)
    if present:
        wrong = (present - {prefix + name for name in naming.copies}) ^ tensors.keys()
        wrong |= {name for name in tensors.keys() & present if checkpoint.describe(name)[1] != tensors[name].shape}
    else:
        wrong = {prefix + name for name in naming.names.values()} - tensors.keys()
        tensors |= _copies(checkpoint, naming, prefix)
    if wrong:
        got = f"{draft}, which differs about {', '.join(sorted(wrong)[:3])}"
        raise UserError("draft", got=got, expected=f"the tensors of the layer that {target} has")
    stated = [part.get(key) for part in (config, text) for key in ("dtype", "torch_dtype")]
    default = next((getattr(torch, name) for name in stated if name), None)
    for name, tensor in tensors.items():
        end = "." + name.removeprefix(prefix + naming.layer)
        like = name if name in present else next((other for other in checkpoint.file_of if other.endswith(end)), None)
        tensors[name] = tensor.to(checkpoint.describe(like)[0] if like else default or tensor.dtype)
    return tensors


def _copies(checkpoint: Shards, naming: Naming, prefix: str) -> dict[str, Tensor]:
    """The target's own tensors that the naming repeats."""
    sources = {
        prefix + copy: next(name for end in ends for name in checkpoint.file_of if f".{name}".endswith(f".{end}"))
        for copy, ends in naming.copies.items()
    }
    tensors = checkpoint.load(sources.values())
    return {copy: tensors[source].clone() for copy, source in sources.items()}


def _write(checkpoint: Shards, merged: dict[str, Tensor], folder: Path) -> None:
    """The checkpoint's files in another folder, with some tensors replaced or added."""
    sharded = (checkpoint.folder / INDEX).is_file()
    file_of = checkpoint.file_of | {name: checkpoint.file_of.get(name, NEW_SHARD if sharded else SINGLE) for name in merged}
    rewritten = {file_of[name] for name in merged}
    for path in sorted(checkpoint.folder.rglob("*")):
        inside = path.relative_to(checkpoint.folder)
        # Hidden folders hold what a download or git remembers of the original.
        if path.is_dir() or any(part.startswith(".") for part in inside.parts) or str(inside) in rewritten:
            continue
        (folder / inside).parent.mkdir(parents=True, exist_ok=True)
        link(path, folder / inside) if path.suffix == ".safetensors" else shutil.copy2(path, folder / inside)
    for file in sorted(rewritten):
        kept = [name for name, place in checkpoint.file_of.items() if place == file and name not in merged]
        metadata = {"format": "pt"}
        if (checkpoint.folder / file).is_file():
            with safe_open(checkpoint.folder / file, framework="pt") as weights:
                metadata = weights.metadata() or metadata
        added = {name: tensor.contiguous() for name, tensor in merged.items() if file_of[name] == file}
        save_file(checkpoint.load(kept) | added, folder / file, metadata=metadata)
    if sharded:
        index = json.loads((checkpoint.folder / INDEX).read_text(encoding="utf-8"))
        index["weight_map"] = file_of
        index.setdefault("metadata", {})["total_size"] = Shards(folder, file_of, "output_dir").num_bytes
        index["metadata"].pop("total_parameters", None)
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_config(config: dict[str, Any], key: str, folder: Path) -> None:
    """State under `key` that there is one such layer, where the text model's config stands."""
    text = config.get("text_config") or config
    if text.get(key) != 1:
        text[key] = 1
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
