"""What may be wrong with an EAGLE-3 head whose files are right."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from specdistill.engines.limits import engine_aux_layers
from specdistill.methods.contract import Mistake
from specdistill.methods.eagle3.module import Eagle3Draft
from specdistill.methods.heads.mistakes import (
    Changed,
    configure,
    mistakes_of_layers,
    mistakes_of_shape,
    set_weight,
    swap,
    swap_halves_of,
    undoing,
)
from specdistill.targets.frozen import FrozenTarget


def mistakes(head: Eagle3Draft, target: FrozenTarget) -> Iterator[Mistake]:
    """Every mistake that an EAGLE-3 head can have, one at a time."""
    changed = undoing(head, target)
    yield from _of_eagle3(head, target, changed)
    yield from mistakes_of_shape(head, target, changed)
    yield from mistakes_of_layers(head, changed)


def _of_eagle3(head: Eagle3Draft, target: FrozenTarget, changed: Changed) -> Iterator[Mistake]:
    config = head.config

    def residual(repaired: Any) -> None:
        repaired.layers[0].norm_before_residual = not config.norm_before_residual

    yield changed(f"norm_before_residual is {config.norm_before_residual}: it was trained with the other", residual)
    yield changed(
        f"norm_output is {config.norm_output}: it was trained with the other", configure(norm_output=not config.norm_output)
    )
    for layers in _other_layers(config.aux_layers, target.num_layers):
        cause = f"it reads the target after layers {list(config.aux_layers)}: it was trained on {list(layers)}"
        yield changed(cause, configure(aux_layers=layers))
    blocks = head.fc.weight.chunk(len(config.aux_layers), dim=1)
    orders = itertools.permutations(range(len(blocks))) if len(blocks) <= 3 else [tuple(range(len(blocks)))[::-1]]
    for order in orders:
        if list(order) != sorted(order):
            cause = f"fc reads the auxiliary states in another order than it was trained on: {[index + 1 for index in order]}"
            yield changed(cause, set_weight("fc.weight", torch.cat([blocks[index] for index in order], dim=1)))
    for one, other in itertools.combinations(("input_layernorm", "hidden_norm", "post_attention_layernorm"), 2):
        yield changed(f"the first layer's {one} and {other} are swapped", swap(f"layers.0.{one}", f"layers.0.{other}"))
    yield changed(
        "the halves that the first layer's q, k and v read, embedding and hidden state, are swapped",
        swap_halves_of(*(f"layers.0.self_attn.{part}_proj" for part in "qkv")),
    )
    if config.prunes_vocabulary:
        yield from _of_vocabulary(head, changed)
    if config.own_embedding:
        own = target.model.get_input_embeddings().weight
        yield changed("its embedding is not the target's: it was trained with that", set_weight("embed_tokens.weight", own))


def _other_layers(layers: Sequence[int], depth: int) -> list[tuple[int, ...]]:
    """Layers that a draft may have been trained on instead: one more, one less, the engines' default."""
    default = tuple(engine_aux_layers(depth)) if len(layers) == 3 else tuple(layers)
    others = [tuple(layer + 1 for layer in layers), tuple(layer - 1 for layer in layers), default]
    valid = [other for other in others if all(0 <= layer <= depth for layer in other) and other != tuple(layers)]
    return list(dict.fromkeys(valid))


def _of_vocabulary(head: Eagle3Draft, changed: Changed) -> Iterator[Mistake]:
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
