"""A draft's KV cache for one sequence: keys, values and rotary tables, in buffers that double. Trimming sets a number.

Shapes: N query heads, G key/value heads, S allocated positions, d head size, T positions of one step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdistill.decoding.tree import Step

FIRST_SIZE = 512  # positions allocated at first


class DraftKVCache:
    """A `KVCache` (see specdistill.methods.layers) for one sequence: causal attention over what is cached, or the last `window` of it.

    `length` counts the positions held. The first layer of a step advances it, so that all layers of the step see one position.
    `rotary`: position ids [1, S] -> (cos, sin) [1, S, d], computed for many positions at once: doing it in each step would cost a fifth
    of the step.
    """

    def __init__(
        self,
        num_layers: int,
        rotary: Callable[[Tensor], tuple[Tensor, Tensor]],
        device: torch.device,
        window: int | None = None,
    ) -> None:
        self.window = window
        self.length = 0
        self._rotary = rotary
        self._device = device
        self._size = 0
        self._tables: tuple[Tensor, Tensor]
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers  # keys and values [1, G, S, d] of each layer
        self._grow(FIRST_SIZE)

    def next_rotary(self, count: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) [1, count, d] of the next step's positions."""
        end = self.length + count
        if end > self._size:
            self._grow(end)
        cos, sin = self._tables
        return cos[:, self.length : end], sin[:, self.length : end]

    def level(self, step: Step) -> "tuple[tuple[Tensor, Tensor], TreeLevel]":
        """(cos, sin) [1, T, d] of a level of a tree, all at one position, and the kv_cache that keeps its branches apart."""
        position, count = step.positions_T[0], len(step.positions_T)
        assert position == step.positions_T[-1] and self.length == step.num_text + len(step.positions) - count, step.positions
        if self.length + count > self._size:
            self._grow(self.length + count)
        cos, sin = (table[:, position : position + 1].expand(-1, count, -1) for table in self._tables)
        return (cos, sin), TreeLevel(self, step.visible(self.window))

    def attend(
        self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor, mask_TS: Tensor | None = None
    ) -> Tensor:
        """As in `KVCache`. mask_TS: what each position attends to among all that is cached; None: what comes before it."""
        steps = query_BNTd.shape[2]
        if layer == 0:
            self.length += steps
        start, end = self.length - steps, self.length
        buffers = self._buffers[layer]
        if buffers is None:  # the first step determines shape and dtype
            buffers = self._buffers[layer] = (self._like(key_BGTd), self._like(value_BGTd))
        keys, values = buffers
        keys[:, :, start:end], values[:, :, start:end] = key_BGTd, value_BGTd
        # The first position that the first query attends to
        first = max(0, start - self.window + 1) if self.window is not None and mask_TS is None else 0
        mask = mask_TS
        if mask is None and steps > 1:  # query i is at position start + i: causal attention
            mask = torch.ones(steps, end - first, dtype=torch.bool, device=keys.device).tril(start - first)
            if self.window is not None:
                mask = mask.triu(start - first - self.window + 1)
        return F.scaled_dot_product_attention(
            query_BNTd, keys[:, :, first:end], values[:, :, first:end], attn_mask=mask, enable_gqa=True
        )

    def _like(self, x_BGTd: Tensor) -> Tensor:
        return x_BGTd.new_empty(*x_BGTd.shape[:2], self._size, x_BGTd.shape[3])

    def _grow(self, least: int) -> None:
        """Room for `least` positions or twice as many as now."""
        held = self._size
        self._size = max(least, 2 * held)
        self._tables = self._rotary(torch.arange(self._size, device=self._device).unsqueeze(0))
        for index, buffers in enumerate(self._buffers):
            if buffers is not None:
                keys, values = (self._like(buffer) for buffer in buffers)
                keys[:, :, :held], values[:, :, :held] = buffers
                self._buffers[index] = (keys, values)


@dataclass(frozen=True)
class TreeLevel:
    """A `KVCache` for one level of a tree: a draft's cache under a mask."""

    cache: DraftKVCache
    mask_TS: Tensor

    def attend(self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor) -> Tensor:
        return self.cache.attend(layer, query_BNTd, key_BGTd, value_BGTd, self.mask_TS)
