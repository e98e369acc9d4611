"""KV caches of drafts whose layers use a `KVCache` (see specdistill.methods.layers): heads and plain Llamas.

Slot s holds position s. What was rejected is forgotten by setting a length, and the next tokens overwrite it.

Shapes: B rows, N query heads, G key/value heads, S allocated positions, d head size, T positions of one step.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specdistill.decoding.tree import Step

FIRST_SIZE = 512  # positions allocated at first

RotaryTables = Callable[[Tensor], tuple[Tensor, Tensor]]  # position ids [1, S] -> (cos, sin) [1, S, d]


class Buffers:
    """Rotary tables (cos, sin) [1, S, d], and keys and values [B, G, S, d] of each layer; S doubles when more is needed.

    The tables are computed for many positions at once: doing it in each step would cost a fifth of the step.
    """

    def __init__(self, num_layers: int, rotary: RotaryTables, device: torch.device) -> None:
        self.device = device
        self.tables: tuple[Tensor, Tensor]
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self._rotary = rotary
        self._size = 0
        self.reserve(FIRST_SIZE)

    def reserve(self, positions: int) -> None:
        if positions <= self._size:
            return
        held, self._size = self._size, max(positions, 2 * self._size)
        self.tables = self._rotary(torch.arange(self._size, device=self.device).unsqueeze(0))
        for index, buffers in enumerate(self.layers):
            if buffers is not None:
                keys, values = (self._like(buffer) for buffer in buffers)
                keys[:, :, :held], values[:, :, :held] = buffers
                self.layers[index] = (keys, values)

    def of(self, layer: int, key_BGTd: Tensor, value_BGTd: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values; its first ones determine shape and dtype."""
        buffers = self.layers[layer]
        if buffers is None:
            buffers = self.layers[layer] = (self._like(key_BGTd), self._like(value_BGTd))
        return buffers

    def _like(self, x_BGTd: Tensor) -> Tensor:
        # Zeros: masked slots are multiplied by zero, and uninitialized memory may hold NaN.
        return x_BGTd.new_zeros(*x_BGTd.shape[:2], self._size, x_BGTd.shape[3])


class DraftKVCache:
    """A `KVCache` for one sequence: causal attention over what is cached, or the last `window` of it.

    `length` counts the positions held. Each step begins with its rotary tables, from `next_rotary` or `level`; its first layer advances
    `length`, so that all layers of the step see one position.
    """

    def __init__(self, num_layers: int, rotary: RotaryTables, device: torch.device, window: int | None = None) -> None:
        self.window = window
        self.length = 0
        self._buffers = Buffers(num_layers, rotary, device)
        self._first = 0  # the first position that the step's first query attends to
        self._mask_TS: Tensor | None = None  # what each query attends to from there on; None: all

    def next_rotary(self, count: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) [1, count, d] of the next step's positions."""
        start, end = self.length, self.length + count
        self._buffers.reserve(end)
        self._first, self._mask_TS = 0 if self.window is None else max(0, start - self.window + 1), None
        if count > 1:  # query i is at position start + i: causal attention
            mask_TS = torch.ones(count, end - self._first, dtype=torch.bool, device=self._buffers.device)
            self._mask_TS = mask_TS.tril(start - self._first)
            if self.window is not None:
                self._mask_TS = self._mask_TS.triu(start - self._first - self.window + 1)
        cos, sin = self._buffers.tables
        return cos[:, start:end], sin[:, start:end]

    def level(self, step: Step) -> tuple[Tensor, Tensor]:
        """(cos, sin) [1, T, d] of the next step, a level of a tree: all at one position, with its branches kept apart."""
        position, count = step.positions_T[0], len(step.positions_T)
        assert position == step.positions_T[-1] and self.length == step.num_text + len(step.positions) - count, step.positions
        self._buffers.reserve(self.length + count)
        self._first, self._mask_TS = 0, step.visible(self.window)
        cos, sin = (table[:, position : position + 1].expand(-1, count, -1) for table in self._buffers.tables)
        return cos, sin

    def append(self, layer: int, key_BGTd: Tensor, value_BGTd: Tensor) -> None:
        """As in `KVCache`."""
        if layer == 0:
            self.length += key_BGTd.shape[2]
        start, end = self.length - key_BGTd.shape[2], self.length
        keys, values = self._buffers.of(layer, key_BGTd, value_BGTd)
        keys[:, :, start:end], values[:, :, start:end] = key_BGTd, value_BGTd

    def attend(self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor) -> Tensor:
        """As in `KVCache`."""
        self.append(layer, key_BGTd, value_BGTd)
        keys, values = self._buffers.of(layer, key_BGTd, value_BGTd)
        seen = slice(self._first, self.length)
        return F.scaled_dot_product_attention(
            query_BNTd, keys[:, :, seen], values[:, :, seen], attn_mask=self._mask_TS, enable_gqa=True
        )


class RaggedKVCache:
    """A `KVCache` for B sequences that advance by different lengths. Used as `MaskedKVCache` is: `extend` by each row's number of new
    tokens, run the layers, `truncate` each row to the tokens it keeps, and `keep` the rows that continue.

    lengths: tokens held of each row. Rows shorter than the longest of a step are padded on the right.
    """

    def __init__(
        self, num_rows: int, num_layers: int, rotary: RotaryTables, device: torch.device, window: int | None = None
    ) -> None:
        self.lengths = [0] * num_rows
        self._window = window
        self._buffers = Buffers(num_layers, rotary, device)
        self._position_BT: Tensor  # of the current step
        self._mask_B1TS: Tensor

    def extend(self, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(cos, sin) [B, T, d] of the next step, in which row b gets counts[b] new tokens; its layers then call `attend`."""
        device, end = self._buffers.device, max(self.lengths) + max(counts)
        self._buffers.reserve(end)
        position_BT = torch.tensor(self.lengths, device=device).unsqueeze(1) + torch.arange(max(counts), device=device)
        key, query = torch.arange(end, device=device), position_BT[:, None, :, None]
        mask_B1TS = key <= query
        if self._window is not None:
            mask_B1TS &= key > query - self._window
        self._position_BT, self._mask_B1TS = position_BT, mask_B1TS
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        cos, sin = self._buffers.tables
        return cos[0, position_BT], sin[0, position_BT]

    def append(self, layer: int, key_BGTd: Tensor, value_BGTd: Tensor) -> None:
        row_B1 = torch.arange(len(self.lengths), device=key_BGTd.device).unsqueeze(1)
        buffers = self._buffers.of(layer, key_BGTd, value_BGTd)
        for buffer, new_BGTd in zip(buffers, (key_BGTd, value_BGTd), strict=True):
            buffer[row_B1, :, self._position_BT] = new_BGTd.transpose(1, 2)

    def attend(self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor) -> Tensor:
        self.append(layer, key_BGTd, value_BGTd)
        buffers = self._buffers.of(layer, key_BGTd, value_BGTd)
        keys, values = (buffer[:, :, : self._mask_B1TS.shape[-1]] for buffer in buffers)
        return F.scaled_dot_product_attention(query_BNTd, keys, values, attn_mask=self._mask_B1TS, enable_gqa=True)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Drop all but the first lengths[b] tokens of each row."""
        self.lengths = list(lengths)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        index = torch.tensor(rows, device=self._buffers.device)
        self.lengths = [self.lengths[row] for row in rows]
        self._buffers.layers = [buffers and (buffers[0][index], buffers[1][index]) for buffers in self._buffers.layers]
