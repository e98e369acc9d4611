"""How large a KV cache is, before there are weights: what a class keeps of a sequence, found by running it over tensors without
content.

Two passes over transformers' own cache, of two tokens and of three, tell what grows and what does not. So grouped heads, latent
attention, sliding windows and recurrent layers need no formula each. `tests/targets/test_cache_size.py` compares the sizes with
caches that are full.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specdistill.targets.anatomy import CLASS_ERRORS


@dataclass(frozen=True)
class LayerCache:
    """heads: that a device can have a part of; 1 for latent attention. size: numbers kept of a token. window: tokens that are
    kept at most, None for all. state: bytes kept of a sequence whatever its length.
    """

    heads: int
    size: int
    window: int | None = None
    state: int = 0


@dataclass(frozen=True)
class CacheSize:
    """Of a model's layers that keep anything."""

    layers: tuple[LayerCache, ...]

    def num_bytes(
        self, context: int, batch_size: int, itemsize: int, tensor_parallel: int = 1
    ) -> int:
        """Of `batch_size` sequences of `context` tokens, on each of the devices that share the model.

        itemsize: bytes of a key's and a value's numbers. A device has whole heads, and at least one, as inference engines
        divide them.
        """
        total = 0
        for layer in self.layers:
            heads = -(-layer.heads // tensor_parallel)
            tokens = context if layer.window is None else min(context, layer.window)
            total += tokens * layer.size // layer.heads * heads * itemsize + -(
                -layer.state // tensor_parallel
            )
        return batch_size * total

    def per_token(self, itemsize: int) -> int:
        """Bytes that a token of context takes for good: of layers without a window."""
        return itemsize * sum(layer.size for layer in self.layers if layer.window is None)


def of_attention(
    num_layers: int, num_key_value_heads: int, head_dim: int, window: int | None = None
) -> CacheSize:
    """Of layers as Llama's. window: tokens that a query sees, itself included."""
    kept = None if window is None else window - 1
    return CacheSize(
        (LayerCache(num_key_value_heads, 2 * num_key_value_heads * head_dim, kept),) * num_layers
    )


def cache_size(model: Any) -> CacheSize | None:
    """Of a causal language model on the meta device. None for a class that cannot run there, or that keeps its cache elsewhere."""
    config = model.config.get_text_config(decoder=True)
    try:
        model.set_experts_implementation(
            "batched_mm"
        )  # the one whose shapes do not depend on where tokens are sent
        two, three = (_after(model, config, length) for length in (2, 3))
    except CLASS_ERRORS:  # of what it is asked to do on the meta device
        return None
    layers = map(_layer, two.layers, three.layers)
    found = tuple(layer for layer in layers if layer.size or layer.state)
    return CacheSize(found) if found else None


@torch.no_grad()
def _after(model: Any, config: Any, length: int) -> DynamicCache:
    cache = DynamicCache(config=config)
    model(
        input_ids=torch.zeros(1, length, dtype=torch.long, device="meta"),
        past_key_values=cache,
        use_cache=True,
    )
    return cache


def _tensors(layer: Any) -> list[Tensor]:
    """Of a layer. What steers it (flags, a window's length) has no dimensions."""
    held = [
        part
        for value in vars(layer).values()
        for part in (value.values() if isinstance(value, dict) else [value])
    ]
    return [part for part in held if isinstance(part, Tensor) and part.ndim]


def _layer(layer: Any, longer: Any) -> LayerCache:
    tensors = zip(_tensors(layer), _tensors(longer), strict=True)
    grown = [(more.numel() - less.numel(), less.nbytes) for less, more in tensors]
    keys = getattr(layer, "keys", None)
    return LayerCache(
        heads=int(keys.shape[1]) if isinstance(keys, Tensor) and keys.ndim == 4 else 1,
        size=sum(numbers for numbers, _ in grown),
        window=int(layer.sliding_window) - 1 if getattr(layer, "is_sliding", False) else None,
        state=sum(size for numbers, size in grown if not numbers),
    )
