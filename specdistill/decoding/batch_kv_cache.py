"""The KV caches of a batch. Rows advance by different lengths, so slots are not positions.

`MaskedKVCache` is for models of transformers, whose layers only append: what a row rejects stays as a hole that the mask hides.
`RaggedKVCache` is for draft heads and plain Llamas, whose layers use a `KVCache`: each row has its own length, and the next tokens
overwrite what it rejected.

Both are used alike: `extend` by each row's number of new tokens, run the layers, `truncate` each row to the tokens it keeps, and `keep`
the rows that continue. Rows shorter than the longest of a step are padded on the right.

Shapes: B rows, S slots, T positions of one step, N query heads, G key/value heads, d head size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from specdistill.decoding.kv_cache import FIRST_SIZE

HOLE = torch.iinfo(torch.int64).max  # the position of a hole: after every token, so that causality hides it
MOST_SPARE = 0.25  # the cache is compacted when that frees more than this share of its slots


class MaskedKVCache:
    """Keys and values of B sequences in transformers' own layers, with holes.

    lengths: tokens held of each row. position_BS: the position of the token in each slot, or HOLE.
    """

    def __init__(self, config: Any, num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        # Full layers even for sliding windows: a windowed layer could not restore what it dropped. The mask applies the window.
        self.layers = DynamicCache()
        self.lengths = [0] * num_rows
        self.position_BS = torch.empty(num_rows, 0, dtype=torch.long, device=device)
        self._kinds = set(getattr(config, "layer_types", None) or ())
        self._window: int | None = getattr(config, "sliding_window", None)
        self._dtype = dtype

    def extend(self, counts: Sequence[int]) -> tuple[Tensor, Tensor | dict[str, Tensor]]:
        """Slots for the next counts[b] tokens of each row: position ids [B, T] and attention mask of the pass that fills them."""
        device = self.position_BS.device
        step_T = torch.arange(max(counts), device=device)
        position_BT = torch.tensor(self.lengths, device=device).unsqueeze(1) + step_T
        is_token_BT = step_T < torch.tensor(counts, device=device).unsqueeze(1)
        self.position_BS = torch.cat((self.position_BS, position_BT.where(is_token_BT, HOLE)), dim=1)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        position_BT = position_BT.where(is_token_BT, 0)  # padding needs some valid position
        return position_BT, self._mask(position_BT)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Drop all but the first lengths[b] tokens of each row."""
        self.lengths = list(lengths)
        kept_B1 = torch.tensor(self.lengths, device=self.position_BS.device).unsqueeze(1)
        self.position_BS = self.position_BS.where(self.position_BS < kept_B1, HOLE)
        num_slots, needed = self.position_BS.shape[1], max(self.lengths)
        if num_slots - needed > MOST_SPARE * num_slots:
            self._compact(needed)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        index = torch.tensor(rows, device=self.position_BS.device)
        self.lengths = [self.lengths[row] for row in rows]
        self.position_BS = self.position_BS[index]
        self._replace(lambda x_BGSd: x_BGSd[index])

    def _mask(self, query_BT: Tensor) -> Tensor | dict[str, Tensor]:
        """[B, 1, T, S], added to the scores; a dict by kind of layer where there are several.

        A query attends to its own and earlier positions of its row. The least finite number hides as well as minus infinity, and gives no
        NaN in a row that is all hidden.
        """
        key, query = self.position_BS[:, None, None, :], query_BT[:, None, :, None]
        hidden = torch.finfo(self._dtype).min
        seen = key <= query
        full = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device).masked_fill(~seen, hidden)
        if self._window is None or self._kinds == {"full_attention"}:
            return full
        windowed = full.masked_fill(key <= query - self._window, hidden)
        return {"full_attention": full, "sliding_attention": windowed} if self._kinds else windowed

    def _compact(self, needed: int) -> None:
        """Move each row's tokens together, in order; the remaining holes are at the end of the shorter rows."""
        order_BS = self.position_BS.argsort(dim=1)[:, :needed]
        self.position_BS = self.position_BS.gather(1, order_BS)
        self._replace(
            lambda x_BGSd: x_BGSd.gather(2, order_BS[:, None, :, None].expand(-1, x_BGSd.shape[1], -1, x_BGSd.shape[3]))
        )

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        layer: Any  # a DynamicLayer
        for layer in self.layers.layers:
            if layer.keys is not None:  # layers that share another's keys stay empty
                layer.keys, layer.values = change(layer.keys), change(layer.values)


class RaggedKVCache:
    """A `KVCache` (see specdistill.methods.layers) for B sequences: slot s of a row holds position s, in buffers that double.

    lengths: tokens held of each row. rotary: position ids [1, S] -> (cos, sin) [1, S, d], computed for many positions at once.
    """

    def __init__(
        self,
        num_rows: int,
        num_layers: int,
        rotary: Callable[[Tensor], tuple[Tensor, Tensor]],
        device: torch.device,
        window: int | None = None,
    ) -> None:
        self.lengths = [0] * num_rows
        self._window = window
        self._rotary = rotary
        self._device = device
        self._size = 0
        self._tables: tuple[Tensor, Tensor]
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers  # keys and values [B, G, S, d] of each layer
        self._position_BT: Tensor  # of the current step
        self._mask_B1TS: Tensor
        self._grow(FIRST_SIZE)

    def extend(self, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(cos, sin) [B, T, d] of the next step, in which row b gets counts[b] new tokens; its layers then call `attend`."""
        width = max(counts)
        end = max(self.lengths) + width
        if end > self._size:
            self._grow(end)
        step_T = torch.arange(width, device=self._device)
        position_BT = torch.tensor(self.lengths, device=self._device).unsqueeze(1) + step_T
        key, query = torch.arange(end, device=self._device), position_BT[:, None, :, None]
        mask_B1TS = key <= query
        if self._window is not None:
            mask_B1TS &= key > query - self._window
        self._position_BT, self._mask_B1TS = position_BT, mask_B1TS
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        cos, sin = self._tables
        return cos[0, position_BT], sin[0, position_BT]

    def attend(self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor) -> Tensor:
        buffers = self._buffers[layer]
        if buffers is None:  # the first step determines shape and dtype
            buffers = self._buffers[layer] = (self._like(key_BGTd), self._like(value_BGTd))
        end = self._mask_B1TS.shape[-1]
        row_B1 = torch.arange(len(self.lengths), device=self._device).unsqueeze(1)
        for buffer, new_BGTd in zip(buffers, (key_BGTd, value_BGTd), strict=True):
            buffer[row_B1, :, self._position_BT] = new_BGTd.transpose(1, 2)
        keys, values = (buffer[:, :, :end] for buffer in buffers)
        return F.scaled_dot_product_attention(query_BNTd, keys, values, attn_mask=self._mask_B1TS, enable_gqa=True)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Drop all but the first lengths[b] tokens of each row."""
        self.lengths = list(lengths)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        index = torch.tensor(rows, device=self._device)
        self.lengths = [self.lengths[row] for row in rows]
        self._buffers = [buffers and (buffers[0][index], buffers[1][index]) for buffers in self._buffers]

    def _like(self, x_BGTd: Tensor) -> Tensor:
        # Zeros: masked slots are multiplied by zero, and uninitialized memory may hold NaN.
        return x_BGTd.new_zeros(*x_BGTd.shape[:2], self._size, x_BGTd.shape[3])

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
