"""What may be wrong with a head whose every tensor has the right shape, and the head without it.

A head accepts little when it is run otherwise than it was trained, and nothing in its files says so. Each repair undoes one such mistake
on a copy that shares the weights; the one that brings the head closer to its target names the cause.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from specdistill.methods.eagle.module import EagleDraft
from specdistill.methods.eagle3.module import Eagle3Draft
from specdistill.methods.layers import Rotary
from specdistill.methods.mtp.module import MtpDraft
from specdistill.targets.frozen import FrozenTarget, engine_aux_layers


@dataclass(frozen=True)
class Repair:
    """cause: what is wrong if the repaired head is better."""

    cause: str
    head: Any


def repairs(head: Any, target: FrozenTarget) -> Iterator[Repair]:
    """Every repair that a head can have, one at a time."""
    shared = {id(tensor): tensor for module in (head, target.model) for tensor in (*module.parameters(), *module.buffers())}

    def changed(cause: str, change: Callable[[Any], None]) -> Repair:
        repaired = copy.deepcopy(head, dict(shared))
        change(repaired)
        return Repair(cause, repaired)

    if isinstance(head, Eagle3Draft):
        yield from _of_eagle3(head, target, changed)
    if isinstance(head, EagleDraft | MtpDraft):
        yield changed("the two halves that fc reads, embedding and hidden state, are swapped", _swap_halves_of("fc"))
    if isinstance(head, MtpDraft):
        yield changed("the norms of embedding and hidden state are swapped", _swap("token_norm", "hidden_norm"))
    if isinstance(head, EagleDraft | Eagle3Draft):
        yield from _of_shape(head, target, changed)
    layers = [f"layers.{index}" for index, layer in enumerate(head.layers) if hasattr(getattr(layer, "mlp", None), "gate_proj")]
    for layer in layers:
        yield changed(f"{layer}.mlp.gate_proj and up_proj are swapped", _swap(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"))
    for name, parameter in head.named_parameters():
        if name not in head.shared and parameter.dim() == 2 and parameter.shape[0] == parameter.shape[1]:
            yield changed(f"{name} is transposed", _set(name, parameter.T))


Changed = Callable[[str, Callable[[Any], None]], Repair]


def _of_eagle3(head: Eagle3Draft, target: FrozenTarget, changed: Changed) -> Iterator[Repair]:
    config = head.config

    def residual(repaired: Any) -> None:
        repaired.layers[0].norm_before_residual = not config.norm_before_residual

    yield changed(f"norm_before_residual is {config.norm_before_residual}: it was trained with the other", residual)
    yield changed(
        f"norm_output is {config.norm_output}: it was trained with the other", _configure(norm_output=not config.norm_output)
    )
    for layers in _other_layers(config.aux_layers, target.num_layers):
        cause = f"it reads the target after layers {list(config.aux_layers)}: it was trained on {list(layers)}"
        yield changed(cause, _configure(aux_layers=layers))
    blocks = head.fc.weight.chunk(len(config.aux_layers), dim=1)
    orders = itertools.permutations(range(len(blocks))) if len(blocks) <= 3 else [tuple(range(len(blocks)))[::-1]]
    for order in orders:
        if list(order) != sorted(order):
            cause = f"fc reads the auxiliary states in another order than it was trained on: {[index + 1 for index in order]}"
            yield changed(cause, _set("fc.weight", torch.cat([blocks[index] for index in order], dim=1)))
    for one, other in itertools.combinations(("input_layernorm", "hidden_norm", "post_attention_layernorm"), 2):
        yield changed(f"the first layer's {one} and {other} are swapped", _swap(f"layers.0.{one}", f"layers.0.{other}"))
    yield changed(
        "the halves that the first layer's q, k and v read, embedding and hidden state, are swapped",
        _swap_halves_of(*(f"layers.0.self_attn.{part}_proj" for part in "qkv")),
    )
    if config.prunes_vocabulary:
        yield from _of_vocabulary(head, changed)
    if config.own_embedding:
        own = target.model.get_input_embeddings().weight
        yield changed("its embedding is not the target's: it was trained with that", _set("embed_tokens.weight", own))


def _other_layers(layers: Sequence[int], depth: int) -> list[tuple[int, ...]]:
    """Layers that a draft may have been trained on instead: one more, one less, the engines' default."""
    default = tuple(engine_aux_layers(depth)) if len(layers) == 3 else tuple(layers)
    others = [tuple(layer + 1 for layer in layers), tuple(layer - 1 for layer in layers), default]
    valid = [other for other in others if all(0 <= layer <= depth for layer in other) and other != tuple(layers)]
    return list(dict.fromkeys(valid))


def _of_vocabulary(head: Eagle3Draft, changed: Changed) -> Iterator[Repair]:
    for cause, d2t in (
        ("d2t is too large by one", head.d2t - 1),
        ("d2t is too small by one", head.d2t + 1),
        ("d2t holds target ids, not offsets", head.d2t - torch.arange(len(head.d2t), device=head.d2t.device)),
    ):
        ids = d2t + torch.arange(len(d2t), device=d2t.device)
        if bool((ids >= 0).all()) and bool((ids < head.config.vocab_size).all()) and bool((ids.diff() > 0).all()):

            def renamed(repaired: Any, offsets: Tensor = d2t) -> None:
                repaired.d2t = offsets

            yield changed(cause, renamed)


def _of_shape(head: Any, target: FrozenTarget, changed: Changed) -> Iterator[Repair]:
    """Rotary frequencies and heads as the target has them."""
    config, rope = head.config, dict(getattr(target.config, "rope_parameters", None) or {})
    theta, kind = rope.pop("rope_theta", None), rope.get("rope_type", "default")
    scaling = None if kind == "default" else rope
    if theta is not None and (float(theta), scaling) != (config.rope_theta, config.rope_scaling):
        cause = f"its rotary base (rope_theta) is {config.rope_theta:g}: it was trained with the target's, {theta:g}"
        yield changed(cause, _configure(rope_theta=float(theta), rope_scaling=scaling))
    size = getattr(target.config, "head_dim", None) or target.hidden_size // target.config.num_attention_heads
    rows, groups = (number * config.head_dim for number in (config.num_attention_heads, config.num_key_value_heads))
    if size != config.head_dim and rows % size == 0 and groups % size == 0:
        cause = (
            f"its heads are of {config.head_dim} (num_attention_heads {config.num_attention_heads}): it was trained with {size}"
        )
        heads = {"num_attention_heads": rows // size, "num_key_value_heads": groups // size}
        yield changed(cause, _configure(head_dim=size, **heads))


def _configure(**fields: Any) -> Callable[[Any], None]:
    def change(head: Any) -> None:
        head.config = replace(head.config, **fields)
        if fields.keys() & {"rope_theta", "head_dim"}:
            head.rotary = Rotary(head.config)
            for layer in head.layers:
                layer.self_attn.head_dim = head.config.head_dim

    return change


def _set(name: str, weight: Tensor) -> Callable[[Any], None]:
    def change(head: Any) -> None:
        module, _, last = name.rpartition(".")
        setattr(head.get_submodule(module), last, nn.Parameter(weight.detach().contiguous(), requires_grad=False))

    return change


def _swap(one: str, other: str) -> Callable[[Any], None]:
    def change(head: Any) -> None:
        first, second = head.get_submodule(one), head.get_submodule(other)
        first.weight, second.weight = second.weight, first.weight

    return change


def _swap_halves_of(*names: str) -> Callable[[Any], None]:
    def change(head: Any) -> None:
        for name in names:
            first, second = head.get_submodule(name).weight.chunk(2, dim=1)
            _set(f"{name}.weight", torch.cat((second, first), dim=1))(head)

    return change
