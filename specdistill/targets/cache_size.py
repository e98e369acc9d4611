"""Compute the size of a model's KV cache from its config, without loading weights.

The model runs on the meta device, where tensors have shapes but no content. It fills transformers'
own cache once with two tokens and once with three. The difference is what grows with the sequence.
This works for grouped heads, latent attention, sliding windows and recurrent layers without a
formula for each. `tests/targets/test_cache_size.py` compares the sizes with caches of real models.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from specdistill.targets.anatomy import CLASS_ERRORS


@dataclass(frozen=True)
class LayerCache:
    """The size of one layer's cache.

    Attributes:
        heads: heads that can be divided between devices; 1 for latent attention.
        size: numbers kept per token, over all heads.
        window: the most tokens that are kept; None for all.
        state: bytes kept per sequence, whatever its length.
    """

    heads: int
    size: int
    window: int | None = None
    state: int = 0


@dataclass(frozen=True)
class CacheSize:
    """The size of a model's KV cache, by layer. Layers that keep nothing are left out."""

    layers: tuple[LayerCache, ...]

    def num_bytes(
        self, context: int, batch_size: int, itemsize: int, tensor_parallel: int = 1
    ) -> int:
        """Return the bytes of the cache on each of the devices that share the model.

        Inference engines divide the cache by heads, and each device has at least one head.

        Args:
            context: tokens of each sequence.
            batch_size: the number of sequences.
            itemsize: bytes of one number of a key or a value.
            tensor_parallel: devices that share the model.
        """
        total = 0
        for layer in self.layers:
            # Keys and values: `layer.size` counts the numbers of one token, over all heads. A
            # device keeps those of its own heads: its share, rounded up (-(-a // b)).
            device_heads = -(-layer.heads // tensor_parallel)
            tokens = context if layer.window is None else min(context, layer.window)
            device_numbers = tokens * layer.size // layer.heads * device_heads
            total += device_numbers * itemsize
            # A recurrent layer's state: `layer.state` counts its bytes, whatever the context. A
            # device keeps its share, rounded up.
            total += -(-layer.state // tensor_parallel)
        return batch_size * total

    def count_bytes_per_token(self, itemsize: int) -> int:
        """Return the bytes that each further token of a long context adds to the cache.

        Layers with a sliding window add nothing once the window is full.

        Args:
            itemsize: bytes of one number of a key or a value.
        """
        return itemsize * sum(layer.size for layer in self.layers if layer.window is None)


def build_attention_cache_size(
    num_layers: int, num_key_value_heads: int, head_dim: int, window: int | None = None
) -> CacheSize:
    """Return the cache size of attention layers like Llama's.

    Args:
        num_layers: layers.
        num_key_value_heads: key/value heads of a layer.
        head_dim: size of a head.
        window: tokens that a query sees, itself included; None for all.
    """
    # The window includes the query itself, so the cache keeps one token less than the window. The
    # factor of two is for keys and values.
    num_kept = None if window is None else window - 1
    layer = LayerCache(
        heads=num_key_value_heads, size=2 * num_key_value_heads * head_dim, window=num_kept
    )
    return CacheSize((layer,) * num_layers)


def cache_size(model: PreTrainedModel) -> CacheSize | None:
    """Compute the size of a model's KV cache by running the model on the meta device.

    Args:
        model: a causal language model on the meta device.

    Returns:
        The size; None for a class that cannot run on the meta device, or that keeps nothing in the
        cache of transformers.
    """
    config = model.config.get_text_config(decoder=True)
    try:
        # Mixtures of experts: in this implementation no shape depends on which experts the tokens
        # are sent to, which the meta device cannot know.
        model.set_experts_implementation("batched_mm")
        # What differs after one more token is what a token adds to the cache.
        short_cache = _build_cache_after(model, config, 2)
        long_cache = _build_cache_after(model, config, 3)
    except CLASS_ERRORS:  # The class cannot compute something on the meta device.
        return None
    layers = map(_measure_layer, short_cache.layers, long_cache.layers)
    filled_layers = tuple(layer for layer in layers if layer.size or layer.state)
    return CacheSize(filled_layers) if filled_layers else None


@torch.no_grad()
def _build_cache_after(
    model: PreTrainedModel, config: PreTrainedConfig, length: int
) -> DynamicCache:
    """Return the cache after one pass over `length` tokens on the meta device."""
    cache = DynamicCache(config=config)
    model(
        input_ids=torch.zeros(1, length, dtype=torch.long, device="meta"),
        past_key_values=cache,
        use_cache=True,
    )
    return cache


def _list_tensors(layer: object) -> list[Tensor]:
    """Return the tensors that a layer of a KV cache keeps for the sequence.

    Tensors without dimensions are left out: they are flags and lengths that control the layer.
    """
    # Some layers keep their tensors as attributes, and some in dictionaries.
    values: list[object] = []
    for value in vars(layer).values():
        values.extend(value.values() if isinstance(value, dict) else [value])
    return [part for part in values if isinstance(part, Tensor) and part.ndim]


def _measure_layer(layer: object, longer_layer: object) -> LayerCache:
    """Return the cache size of a layer, found by comparing its cache at two lengths.

    Args:
        layer: the layer's cache after two tokens.
        longer_layer: the layer's cache after three tokens.
    """
    # Tensors that grew by the third token hold keys and values. The size of all other tensors does
    # not depend on the length.
    numbers_per_token = 0
    state_bytes = 0
    for tensor, longer in zip(_list_tensors(layer), _list_tensors(longer_layer), strict=True):
        growth = longer.numel() - tensor.numel()
        numbers_per_token += growth
        if growth == 0:
            state_bytes += tensor.nbytes

    # Only keys of shape [batch, heads, tokens, size] can be divided between devices by heads. A
    # sliding window includes the query itself, so the cache keeps one token less than the window.
    keys = getattr(layer, "keys", None)
    is_sliding = getattr(layer, "is_sliding", False)
    return LayerCache(
        heads=int(keys.shape[1]) if isinstance(keys, Tensor) and keys.ndim == 4 else 1,
        size=numbers_per_token,
        window=int(vars(layer)["sliding_window"]) - 1 if is_sliding else None,
        state=state_bytes,
    )
