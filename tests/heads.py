"""Heads of noise, in every shape that files can hold."""

import dataclasses
from typing import Any

import torch

from specdistill.methods.eagle3.module import Eagle3Draft
from specdistill.methods.heads.table import HEADS
from specdistill.targets.frozen import FrozenTarget

# What fresh heads are not built with, or not in this order.
REPLACED = ("norm_before_fc", "own_embedding", "rope_scaling", "aux_layers")


def head_of(method: str, target: FrozenTarget, shape: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Any:
    """A head with every tensor random, and none the same as another."""
    replaced = {name: tuple(value) if name == "aux_layers" else value for name, value in shape.items() if name in REPLACED}
    built = {name: value for name, value in shape.items() if name not in replaced}
    if "aux_layers" in shape:
        built["aux_layers"] = sorted(shape["aux_layers"])
    head = HEADS[method].build(target, **built)
    if replaced:
        changed = Eagle3Draft(dataclasses.replace(head.config, **replaced))
        changed.load_state_dict(head.state_dict(), strict=False)
        head = changed
    for index, (name, parameter) in enumerate(head.named_parameters()):
        if name not in head.shared:
            generator = torch.Generator().manual_seed(index)
            parameter.data = torch.randn(parameter.shape, generator=generator)
    return head.to(dtype)
