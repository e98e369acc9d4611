"""Early exits in a folder: config.json and the tensors of the MLP and its norm. The layout is specdistill's: no engine loads one."""

import dataclasses
from collections.abc import Mapping
from functools import partial
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
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "specdistill_early_exit",
        "dtype": dtype,
    }
    checkpoint.write_draft(folder, config | dataclasses.asdict(draft.config), draft.state_dict())


def load_exit(folder: Path | str, target: FrozenTarget, *, key: str = "eval.draft") -> ExitDraft:
    """Read an exit for a target. Raises UserError as `load_reading` does."""
    draft: ExitDraft = checkpoint.load_reading(
        check_exit, partial(ExitDraft, target=target), folder, target, key=key
    )
    return draft.to(target.device)


def check_exit(
    folder: Path,
    tensors: Mapping[str, Tensor],
    target: checkpoint.AnyTarget | None,
    *,
    key: str,
    name: Path | str,
) -> tuple[ExitConfig, Mapping[str, Tensor]]:
    """An exit's config and tensors, checked against each other. The tensors need have no content. Raises UserError as `load_exit` does."""
    config = config_from_json(checkpoint.read_config(folder, key), key)
    if target is not None:
        sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
        checkpoint.check_fit(
            sizes | {"num_target_layers": config.num_target_layers}, target, name, key
        )
    with torch.device("meta"):
        expected = {
            f"layers.0.{each}": tensor for each, tensor in ExitLayer(config).state_dict().items()
        }
    checkpoint.check_tensors(expected, tensors, name, key, what=WHAT)
    return config, tensors


def config_from_json(raw: Mapping[str, Any], key: str) -> ExitConfig:
    """Raises UserError for a size that is not there or no number, and for layers that the target cannot have."""
    names = [field.name for field in dataclasses.fields(ExitConfig)]
    config = ExitConfig(**checkpoint.stated_sizes(raw, names, key, what=WHAT))
    if config.exit_layer >= config.num_target_layers:
        got = f"exit_layer {config.exit_layer}"
        raise UserError(
            key, got=got, expected=f"fewer than the target's {config.num_target_layers} layers"
        )
    return config
