"""Early exits in a folder: config.json and the tensors of the MLP and its norm. The layout is specdistill's: no engine loads one."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdistill.errors import UserError
from specdistill.methods import checkpoint
from specdistill.methods.early_exit.module import ExitConfig, ExitDraft, ExitLayer
from specdistill.targets.frozen import FrozenTarget

ARCHITECTURE = "SpecdistillEarlyExit"
WHAT = "an early exit"


def save_exit(draft: ExitDraft, folder: Path) -> None:
    """Write the exit; `load_exit` reads it back bit for bit."""
    dtype = str(draft.layers[0].mlp.down_proj.weight.dtype).removeprefix("torch.")
    config = {"architectures": [ARCHITECTURE], "model_type": "specdistill_early_exit", "dtype": dtype}
    checkpoint.write_draft(folder, config | dataclasses.asdict(draft.config), draft.state_dict())


def load_exit(folder: Path | str, target: FrozenTarget, *, key: str = "eval.draft") -> ExitDraft:
    """Read an exit for a target. `key` is the recipe key the folder came from, which errors name.

    Raises UserError when files are missing or broken, when a tensor is missing, unknown or of another shape or kind, or for an exit of
    another vocabulary, width or depth than the target's.
    """
    folder = Path(folder)
    tensors = checkpoint.read_tensors(folder, key)
    draft = ExitDraft(check_exit(folder, tensors, target, key=key, name=folder), target)
    checkpoint.fill(draft, tensors, checkpoint.stored_dtype(tensors.values()))
    return draft.to(target.device)


def check_exit(
    folder: Path, tensors: Mapping[str, Tensor], target: checkpoint.AnyTarget | None, *, key: str, name: Path | str
) -> ExitConfig:
    """An exit's config, checked against its tensors, which need have no content. Raises UserError as `load_exit` does."""
    config = config_from_json(checkpoint.read_config(folder, key), key)
    if target is not None:
        checkpoint.check_fit({"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}, target, name, key)
        if config.num_target_layers != target.num_layers:
            got = f"{name} for {config.num_target_layers} layers"
            raise UserError(key, got=got, expected=f"{target.num_layers}, as {target.name} has")
    with torch.device("meta"):
        expected = {f"layers.0.{each}": tensor for each, tensor in ExitLayer(config).state_dict().items()}
    checkpoint.check_tensors(expected, tensors, name, key, what=WHAT)
    return config


def config_from_json(raw: Mapping[str, Any], key: str) -> ExitConfig:
    """Raises UserError for a size that is not there or no number, and for layers that the target cannot have."""
    sizes: dict[str, Any] = {field.name: raw.get(field.name) for field in dataclasses.fields(ExitConfig)}
    for name, size in sizes.items():
        if type(size) is not int or not 0 < size <= checkpoint.LARGEST_SIZE:
            got, expected = f"{name} {size!r}"[:80], f"a whole number from 1 to {checkpoint.LARGEST_SIZE:,}"
            raise UserError(key, got=got, expected=expected)
    config = ExitConfig(**sizes)
    if config.exit_layer >= config.num_target_layers:
        got = f"exit_layer {config.exit_layer}"
        raise UserError(key, got=got, expected=f"fewer than the target's {config.num_target_layers} layers")
    return config
