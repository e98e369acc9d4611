"""What may be wrong with a head whose every tensor has the right shape, and the head without it.

A head accepts little when it is run otherwise than it was trained, and nothing in its files says so. Each mistake is undone on a copy that
shares the weights; the one whose copy is closer to the target names the cause.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from specdistill.methods.contract import Mistake
from specdistill.methods.layers import Rotary
from specdistill.targets.frozen import FrozenTarget

Change = Callable[[Any], None]
Changed = Callable[[str, Change], Mistake]


def undoing(head: Any, target: FrozenTarget) -> Changed:
    """(cause, change) -> the mistake, with the change made on a copy of the head that shares its weights."""
    shared = {id(tensor): tensor for module in (head, target.model) for tensor in (*module.parameters(), *module.buffers())}

    def changed(cause: str, change: Change) -> Mistake:
        repaired = copy.deepcopy(head, dict(shared))
        change(repaired)
        return Mistake(cause, repaired)

    return changed


def mistakes_of_layers(head: Any, changed: Changed) -> Iterator[Mistake]:
    """Matrices that changed places or were transposed."""
    layers = [f"layers.{index}" for index, layer in enumerate(head.layers) if hasattr(getattr(layer, "mlp", None), "gate_proj")]
    for layer in layers:
        yield changed(f"{layer}.mlp.gate_proj and up_proj are swapped", swap(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"))
    for name, parameter in head.named_parameters():
        if name not in head.shared and parameter.dim() == 2 and parameter.shape[0] == parameter.shape[1]:
            yield changed(f"{name} is transposed", set_weight(name, parameter.T))


def mistakes_of_shape(head: Any, target: FrozenTarget, changed: Changed) -> Iterator[Mistake]:
    """Rotary frequencies and heads as the target has them."""
    config, rope = head.config, dict(getattr(target.config, "rope_parameters", None) or {})
    theta, kind = rope.pop("rope_theta", None), rope.get("rope_type", "default")
    scaling = None if kind == "default" else rope
    if theta is not None and (float(theta), scaling) != (config.rope_theta, config.rope_scaling):
        cause = f"its rotary base (rope_theta) is {config.rope_theta:g}: it was trained with the target's, {theta:g}"
        yield changed(cause, configure(rope_theta=float(theta), rope_scaling=scaling))
    size = getattr(target.config, "head_dim", None) or target.hidden_size // target.config.num_attention_heads
    rows, groups = (number * config.head_dim for number in (config.num_attention_heads, config.num_key_value_heads))
    if size != config.head_dim and rows % size == 0 and groups % size == 0:
        cause = (
            f"its heads are of {config.head_dim} (num_attention_heads {config.num_attention_heads}): it was trained with {size}"
        )
        heads = {"num_attention_heads": rows // size, "num_key_value_heads": groups // size}
        yield changed(cause, configure(head_dim=size, **heads))


def configure(**fields: Any) -> Callable[[Any], None]:
    def change(head: Any) -> None:
        head.config = replace(head.config, **fields)
        if fields.keys() & {"rope_theta", "head_dim"}:
            head.rotary = Rotary(head.config)
            for layer in head.layers:
                layer.self_attn.head_dim = head.config.head_dim

    return change


def set_weight(name: str, weight: Tensor) -> Callable[[Any], None]:
    def change(head: Any) -> None:
        module, _, last = name.rpartition(".")
        setattr(head.get_submodule(module), last, nn.Parameter(weight.detach().contiguous(), requires_grad=False))

    return change


def swap(one: str, other: str) -> Callable[[Any], None]:
    def change(head: Any) -> None:
        first, second = head.get_submodule(one), head.get_submodule(other)
        first.weight, second.weight = second.weight, first.weight

    return change


def swap_halves_of(*names: str) -> Callable[[Any], None]:
    def change(head: Any) -> None:
        for name in names:
            first, second = head.get_submodule(name).weight.chunk(2, dim=1)
            set_weight(f"{name}.weight", torch.cat((second, first), dim=1))(head)

    return change
