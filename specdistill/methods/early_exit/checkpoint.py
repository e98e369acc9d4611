"""Early exits on disk: a folder of config.json and the tensors of the MLP and its norm.

The layout is specdistill's, because no engine loads early exits.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from specdistill.common.errors import UserError
from specdistill.methods import checkpoint
from specdistill.methods.early_exit.module import ExitConfig, ExitDraft, ExitLayer
from specdistill.methods.sizes import RawConfig
from specdistill.targets.frozen import FrozenTarget

ARCHITECTURE = "SpecdistillEarlyExit"
DESCRIPTION = "an early exit"


def save_exit(draft: ExitDraft, folder: Path) -> None:
    """Write config.json and weights of an exit into a folder.

    `load_exit` reads the exit back bit for bit.
    """
    # `has_gain` is only written if it is true.
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "specdistill_early_exit",
        "dtype": str(draft.layers[0].mlp.down_proj.weight.dtype).removeprefix("torch."),
    }
    shape = dataclasses.asdict(draft.config)
    if not draft.config.has_gain:
        del shape["has_gain"]
    checkpoint.write_draft(folder, config | shape, draft.state_dict())


def load_exit(folder: Path | str, target: FrozenTarget, *, key: str = "eval.draft") -> ExitDraft:
    """Load an early exit, and check that it fits the target.

    Args:
        folder: the folder of the exit.
        target: the target.
        key: the recipe key to name in errors.

    Raises:
        UserError: for files that are missing or broken, and for tensors or sizes that do not fit.
    """
    draft = checkpoint.load_feature_draft(
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
    """Check an exit's config and tensors against each other and against its target.

    Args:
        folder: the folder that holds config.json.
        tensors: the tensors by name; they may be on the meta device.
        target: the target. None: only compare the exit's files with each other.
        key: the recipe key to name in errors.
        name: what errors call the exit.

    Returns:
        The config and the tensors.

    Raises:
        UserError: for tensors or sizes that do not fit.
    """
    # Compare the sizes of exit and target.
    config = read_exit_config(checkpoint.read_config(folder, key), key)
    if target is not None:
        sizes = {
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_target_layers": config.num_target_layers,
        }
        checkpoint.check_fit(sizes, target, name, key)

    # Compare the tensors with those of an exit of this config.
    with torch.device("meta"):
        expected = {
            f"layers.0.{name}": tensor for name, tensor in ExitLayer(config).state_dict().items()
        }
    checkpoint.check_tensors(expected, tensors, name, key, what=DESCRIPTION)
    return config, tensors


def is_exit_config(config: RawConfig) -> bool:
    """Return whether a config.json belongs to an early exit."""
    return bool(config.get("architectures") == [ARCHITECTURE])


def read_exit_config(raw: RawConfig, key: str) -> ExitConfig:
    """Read an exit's config from its config.json.

    Args:
        raw: the content of config.json.
        key: the recipe key to name in errors.

    Raises:
        UserError: for a size that is missing or no number, and for an exit layer that is not below
            the number of the target's layers.
    """
    # All fields are sizes, except the switch `has_gain`.
    names = [field.name for field in dataclasses.fields(ExitConfig) if field.name != "has_gain"]
    sizes = checkpoint.read_sizes(raw, names, key, what=DESCRIPTION)
    config = ExitConfig(**sizes, has_gain=bool(raw.get("has_gain")))
    if config.exit_layer >= config.num_target_layers:
        raise UserError(
            key,
            got=f"exit_layer {config.exit_layer}",
            expected=f"less than {config.num_target_layers}, the number of the target's layers",
        )
    return config
