"""Likely causes of low acceptance in a head whose every tensor has the right shape, and the head repaired.

A head accepts little when it is run differently from how it was trained, and nothing in its files says so. Each likely cause is repaired on
a copy that shares the weights; the one whose copy is closer to the target names the cause.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from specdistill.methods.layers import Rotary
from specdistill.targets.frozen import FrozenTarget

Repair = tuple[
    Any, ...
]  # a cause, and what reverts it: a function of a head, and its other arguments


def on_copies(
    likely_causes: Callable[[Any, FrozenTarget], Iterator[Repair]], head: Any, target: FrozenTarget
) -> Iterator[tuple[str, Any]]:
    """Each of a method's likely causes, and a copy of the head without it."""
    modules = (head, target.model)
    shared = {
        id(tensor): tensor
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
    }
    for cause, repair, *arguments in likely_causes(head, target):
        copied = copy.deepcopy(head, dict(shared))
        repair(copied, *arguments)
        yield cause, copied


def of_layers(head: Any) -> Iterator[Repair]:
    """Matrices that changed places or were transposed."""
    for index, layer in enumerate(head.layers):
        if hasattr(getattr(layer, "mlp", None), "gate_proj"):
            mlp = f"layers.{index}.mlp"
            yield (
                f"{mlp}.gate_proj and up_proj are swapped",
                swap,
                f"{mlp}.gate_proj",
                f"{mlp}.up_proj",
            )
    for name, parameter in head.named_parameters():
        if (
            name not in head.shared
            and parameter.dim() == 2
            and parameter.shape[0] == parameter.shape[1]
        ):
            yield f"{name} is transposed", set_weight, name, parameter.T


def of_shape(head: Any, target: FrozenTarget) -> Iterator[Repair]:
    """Rotary frequencies and heads as the target has them."""
    config, rope = head.config, dict(getattr(target.config, "rope_parameters", None) or {})
    theta, kind = rope.pop("rope_theta", None), rope.get("rope_type", "default")
    scaling = None if kind == "default" else rope
    if theta is not None and (float(theta), scaling) != (config.rope_theta, config.rope_scaling):
        cause = f"its rotary base (rope_theta) is {config.rope_theta:g}: it was trained with the target's, {theta:g}"
        yield cause, configure, {"rope_theta": float(theta), "rope_scaling": scaling}
    size = (
        getattr(target.config, "head_dim", None)
        or target.hidden_size // target.config.num_attention_heads
    )
    rows, groups = (
        number * config.head_dim
        for number in (config.num_attention_heads, config.num_key_value_heads)
    )
    if size != config.head_dim and rows % size == 0 and groups % size == 0:
        num_heads = config.num_attention_heads
        cause = f"its heads are of {config.head_dim} (num_attention_heads {num_heads}): it was trained with {size}"
        sizes = {
            "head_dim": size,
            "num_attention_heads": rows // size,
            "num_key_value_heads": groups // size,
        }
        yield cause, configure, sizes


def configure(head: Any, fields: dict[str, Any]) -> None:
    head.config = replace(head.config, **fields)
    if fields.keys() & {"rope_theta", "head_dim"}:
        head.rotary = Rotary(head.config)
        for layer in head.layers:
            layer.self_attn.head_dim = head.config.head_dim


def set_weight(head: Any, name: str, weight: Tensor) -> None:
    module, _, last = name.rpartition(".")
    setattr(
        head.get_submodule(module),
        last,
        nn.Parameter(weight.detach().contiguous(), requires_grad=False),
    )


def swap(head: Any, one: str, other: str) -> None:
    first, second = head.get_submodule(one), head.get_submodule(other)
    first.weight, second.weight = second.weight, first.weight


def swap_halves_of(head: Any, *names: str) -> None:
    for name in names:
        first, second = head.get_submodule(name).weight.chunk(2, dim=1)
        set_weight(head, f"{name}.weight", torch.cat((second, first), dim=1))
