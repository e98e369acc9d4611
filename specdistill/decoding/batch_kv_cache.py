"""What a batch keeps of its texts between rounds. Rows move on by different lengths, so a slot number is no position.

`MaskedKVCache` is for models of transformers, whose layers only append: what a row does not keep stays behind as a hole that the mask hides.
`RaggedKVCache` is for draft heads and plain Llamas, whose layers ask a `KVCache`: each row has its own length, and the next tokens overwrite
what it does not keep.

Both are used alike: `extend` by the number of tokens each row takes in, run the layers, `truncate` to what each row keeps, and `keep` the
rows that go on. Rows shorter than the longest in a step are padded on the right.

Shapes: B rows, S slots, T positions of one step, N query heads, G key/value heads, d head size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from specdistill.decoding.kv_cache import FIRST_SIZE

HOLE = torch.iinfo(torch.int64).max  # the position of what stands in a hole: after every token, so that causality hides it
MOST_SPARE = 0.25  # share of the slots that compacting would free, above which it is done


class MaskedKVCache:
    """Keys and values of B texts in transformers' own layers, some of whose slots are holes.

    lengths: tokens held of each row. position_BS: the position in its text of the token in each slot, or HOLE.
    """

    def __init__(self, config: Any, num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        # Plain layers even for sliding windows, whose own would not give back what they dropped; the mask does the rest.
        self.layers = DynamicCache()
        self.lengths = [0] * num_rows
        self.position_BS = torch.empty(num_rows, 0, dtype=torch.long, device=device)
        self._kinds = set(getattr(config, "layer_types", None) or ())
        self._window: int | None = getattr(config, "sliding_window", None)
        self._dtype = dtype

    def extend(self, counts: Sequence[int]) -> tuple[Tensor, Tensor | dict[str, Tensor]]:
        """Slots for the next counts[b] tokens of each row: position ids [B, T] and the mask of the pass that is to fill them."""
        device = self.position_BS.device
        step_T = torch.arange(max(counts), device=device)
        position_BT = torch.tensor(self.lengths, device=device).unsqueeze(1) + step_T
        is_token_BT = step_T < torch.tensor(counts, device=device).unsqueeze(1)
        self.position_BS = torch.cat((self.position_BS, position_BT.where(is_token_BT, HOLE)), dim=1)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        position_BT = position_BT.where(is_token_BT, 0)  # padding must stand somewhere
        return position_BT, self._mask(position_BT)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget all but the first lengths[b] tokens of each row."""
        self.lengths = list(lengths)
        kept_B1 = torch.tensor(self.lengths, device=self.position_BS.device).unsqueeze(1)
        self.position_BS = self.position_BS.where(self.position_BS < kept_B1, HOLE)
        num_slots, needed = self.position_BS.shape[1], max(self.lengths)
        if num_slots - needed > MOST_SPARE * num_slots:
            self._compact(needed)

    def keep(self, rows: Sequence[int]) -> None:
        """Forget all rows but these."""
        index = torch.tensor(rows, device=self.position_BS.device)
        self.lengths = [self.lengths[row] for row in rows]
        self.position_BS = self.position_BS[index]
        self._replace(lambda x_BGSd: x_BGSd[index])

    def _mask(self, query_BT: Tensor) -> Tensor | dict[str, Tensor]:
        """[B, 1, T, S], added to the scores; by kind of layer where there are several kinds.

        A query sees what stands at its position and before it in its row. The least finite number hides as well as minus infinity
        and, in a row that holds nothing yet, makes no NaN.
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
        """Move each row's tokens together, in their order; what is left of the holes stands at the end of the shorter rows."""
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
    """A `KVCache` (see specdistill.methods.layers) for B texts: slot s of a row holds its position s, in buffers that double.

    lengths: tokens held of each row. `rotary`: position ids [1, S] -> (cos, sin) [1, S, d], asked once for many positions.
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
        self._position_BT: Tensor  # of the step under way
        self._mask_B1TS: Tensor
        self._grow(FIRST_SIZE)

    def extend(self, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(cos, sin) [B, T, d] of the next step, in which each row takes in counts[b] tokens; its layers then ask `attend`."""
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
        if buffers is None:  # the first step says what shape and dtype they have
            buffers = self._buffers[layer] = (self._like(key_BGTd), self._like(value_BGTd))
        end = self._mask_B1TS.shape[-1]
        row_B1 = torch.arange(len(self.lengths), device=self._device).unsqueeze(1)
        for buffer, new_BGTd in zip(buffers, (key_BGTd, value_BGTd), strict=True):
            buffer[row_B1, :, self._position_BT] = new_BGTd.transpose(1, 2)
        keys, values = (buffer[:, :, :end] for buffer in buffers)
        return F.scaled_dot_product_attention(query_BNTd, keys, values, attn_mask=self._mask_B1TS, enable_gqa=True)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget all but the first lengths[b] tokens of each row."""
        self.lengths = list(lengths)

    def keep(self, rows: Sequence[int]) -> None:
        """Forget all rows but these."""
        index = torch.tensor(rows, device=self._device)
        self.lengths = [self.lengths[row] for row in rows]
        self._buffers = [buffers and (buffers[0][index], buffers[1][index]) for buffers in self._buffers]

    def _like(self, x_BGTd: Tensor) -> Tensor:
        # Zeros, since the mask multiplies what is there by zero, and kv_cache as it comes may hold NaN.
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
