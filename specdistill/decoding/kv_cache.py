"""KV caches: of drafts whose layers use a `KVCache` (see specdistill.methods.layers; heads and plain Llamas), and of several sequences at
once, for transformers' models too.

Slot s holds position s. What was rejected is forgotten by setting a length, and the next tokens overwrite it.

Shapes: B rows, N query heads, G key/value heads, S allocated positions, d head size, T positions of one step.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from specdistill.decoding.tree import Step
from specdistill.targets.cache import LEAST_SPARE
from specdistill.targets.packed_attention import cached_attention

FIRST_SIZE = 512  # positions allocated at first

RotaryFunction = Callable[[Tensor], tuple[Tensor, Tensor]]  # position ids [1, S] -> (cos, sin) [1, S, d]


class RotaryTables:
    """cos, sin [1, S, d] of the first S positions; S doubles when more is needed.

    They are computed for many positions at once: doing it in each step would cost a fifth of the step.
    """

    def __init__(self, rotary: RotaryFunction, device: torch.device) -> None:
        self.device = device
        self.size = 0
        self._rotary = rotary
        self.reserve(FIRST_SIZE)

    def reserve(self, positions: int) -> None:
        if positions > self.size:
            self.size = max(positions, 2 * self.size)
            self.cos, self.sin = self._rotary(torch.arange(self.size, device=self.device).unsqueeze(0))


def grown(buffer: Tensor | None, new_BGTd: Tensor, size: int) -> Tensor:
    """The buffer [B, G, S, d] of a layer, or a longer one of `size` positions; the first new keys or values determine shape and dtype."""
    if buffer is not None and buffer.shape[2] >= size:
        return buffer
    # Zeros: masked slots are multiplied by zero, and uninitialized memory may hold NaN.
    longer = new_BGTd.new_zeros(*new_BGTd.shape[:2], size, new_BGTd.shape[3])
    if buffer is not None:
        longer[:, :, : buffer.shape[2]] = buffer
    return longer


class DraftKVCache:
    """A `KVCache` for one sequence, used as `RaggedKVCache` is: causal attention over what is cached, or the last `window` of it.

    `length` counts the positions held. Each step begins with its rotary tables, from `extend` or `level`; its first layer advances
    `length`, so that all layers of the step see one position.
    """

    def __init__(self, rotary: RotaryFunction, device: torch.device, window: int | None = None) -> None:
        self.window = window
        self.length = 0
        self._tables = RotaryTables(rotary, device)
        self.reserve = self._tables.reserve  # positions, all at once: a graph's buffers must stay where they are
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}  # by layer
        self._first = 0  # the first position that the step's first query attends to
        self._mask_TS: Tensor | None = None  # what each query attends to from there on; None: itself and all before it

    @property
    def lengths(self) -> list[int]:
        return [self.length]

    def extend(self, counts: Sequence[int], *, is_causal: bool = True) -> tuple[Tensor, Tensor]:
        """(cos, sin) [1, count, d] of the next step's positions, each of which sees those up to itself, or all."""
        (count,) = counts
        start, end = self.length, self.length + count
        self._tables.reserve(end)
        self._first, self._mask_TS = 0 if self.window is None else max(0, start - self.window + 1), None
        if count > 1 and not is_causal:  # query i is at position start + i
            mask_TS = torch.ones(count, end - self._first, dtype=torch.bool, device=self._tables.device)
            self._mask_TS = mask_TS if self.window is None else mask_TS.triu(start - self._first - self.window + 1)
        return self._tables.cos[:, start:end], self._tables.sin[:, start:end]

    def level(self, step: Step) -> tuple[Tensor, Tensor]:
        """(cos, sin) [1, T, d] of the next step, a level of a tree: all at one position, with its branches kept apart."""
        (start,), (positions,), count = step.num_text, step.positions, step.seen_BTF.shape[1]
        position = positions[-1]
        assert position == positions[-count] and self.length == start + len(positions) - count, positions
        self._tables.reserve(self.length + count)
        self._first, self._mask_TS = 0, step.visible(self.window)[0]
        cos, sin = (table[:, position : position + 1].expand(-1, count, -1) for table in (self._tables.cos, self._tables.sin))
        return cos, sin

    def truncate(self, lengths: Sequence[int]) -> None:
        (self.length,) = lengths

    def append(self, layer: int, key_BGTd: Tensor, value_BGTd: Tensor) -> None:
        if layer == 0:
            self.length += key_BGTd.shape[2]
        start, end = self.length - key_BGTd.shape[2], self.length
        keys, values = self._buffers.get(layer, (None, None))
        keys, values = grown(keys, key_BGTd, self._tables.size), grown(values, value_BGTd, self._tables.size)
        keys[:, :, start:end], values[:, :, start:end] = key_BGTd, value_BGTd
        self._buffers[layer] = keys, values

    def attend(self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor) -> Tensor:
        self.append(layer, key_BGTd, value_BGTd)
        keys, values = self._buffers[layer]
        keys, values = (held[:, :, self._first : self.length] for held in (keys, values))
        if self._mask_TS is None and query_BNTd.shape[2] > 1:
            return cached_attention(query_BNTd, keys, values, self.window).transpose(1, 2)
        return F.scaled_dot_product_attention(query_BNTd, keys, values, attn_mask=self._mask_TS, enable_gqa=True)

    def slots(self, held: Tensor, count: int) -> tuple[tuple[Tensor, Tensor], "Slots"]:
        """(cos, sin) [1, T, d] of T = `count` positions from `held`, a scalar, on, and a `KVCache` for a graph's pass over them."""
        position_T = held + torch.arange(count, device=held.device)
        cos, sin = (tables.index_select(1, position_T) for tables in (self._tables.cos, self._tables.sin))
        return (cos, sin), Slots(self._buffers, position_T, self._tables.size, self.window)

    @property
    def buffers(self) -> list[Tensor]:
        return [buffer for of_layer in self._buffers.values() for buffer in of_layer]


class Slots:
    """A `KVCache` over the buffers of a `DraftKVCache`: slot s holds position s, and a query sees its own and those before it."""

    def __init__(self, buffers: dict[int, tuple[Tensor, Tensor]], position_T: Tensor, size: int, window: int | None) -> None:
        self._buffers, self._position_T = buffers, position_T
        key_S, query_T1 = torch.arange(size, device=position_T.device), position_T.unsqueeze(1)
        self._mask_TS = key_S <= query_T1 if window is None else (key_S <= query_T1) & (key_S > query_T1 - window)

    def append(self, layer: int, key_BGTd: Tensor, value_BGTd: Tensor) -> None:
        for buffer, new_BGTd in zip(self._buffers[layer], (key_BGTd, value_BGTd), strict=True):
            buffer.index_copy_(2, self._position_T, new_BGTd)

    def attend(self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor) -> Tensor:
        self.append(layer, key_BGTd, value_BGTd)
        keys, values = self._buffers[layer]
        return F.scaled_dot_product_attention(query_BNTd, keys, values, attn_mask=self._mask_TS, enable_gqa=True)


class BatchKVCache(DynamicCache):
    """Keys and values of B sequences that advance by different lengths, as a cache of transformers' models. Each pass: `place` each
    row's new tokens, run the layers, `truncate` each row to the tokens it keeps, and `keep` the rows that continue.

    lengths: tokens held of each row. Rows shorter than the longest of a pass are padded on the right; the next pass overwrites padding.
    All layers are full, even those of sliding windows: the mask applies the window.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        super().__init__()
        self.lengths = [0] * num_rows
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}  # by layer
        self._slot_BT: Tensor = torch.empty(num_rows, 0, dtype=torch.long, device=device)  # of the current pass
        self._held = self._end = 0  # positions before and after it
        self._size = 0  # positions allocated

    def place(self, counts: Sequence[int], *, is_causal: bool = True, step: Step | None = None) -> Tensor:
        """Positions [B, T] of the next pass, in which row b gets counts[b] new tokens, each of which sees those up to itself, or all.

        step: of trees, if the tokens are nodes: a slot is then not its node's position until `keep_paths`.
        """
        self._is_causal, self._step = is_causal, step
        device = self._slot_BT.device
        self._held, self._end = max(self.lengths), max(self.lengths) + max(counts)
        if self._end > self._size:
            self._size = self._end + max(LEAST_SPARE, self._end // 4)
        self._slot_BT = torch.tensor(self.lengths, device=device).unsqueeze(1) + torch.arange(max(counts), device=device)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        return self._slot_BT if step is None else torch.tensor(step.new_positions, device=device)

    def visible(self, window: int | None) -> Tensor:
        """[B, 1, T, S] bool: what each query of the pass attends to, within the last `window` positions, its own included."""
        if self._step:
            return self._step.visible(window).unsqueeze(1)
        key, query = torch.arange(self._end, device=self._slot_BT.device), self._slot_BT[:, None, :, None]
        last = query if self._is_causal else torch.tensor(self.lengths, device=key.device).view(-1, 1, 1, 1) - 1
        return key <= last if window is None else (key <= last) & (key > query - window)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._held

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_options: Any
    ) -> tuple[Tensor, Tensor]:
        """Take in a layer's new keys and values [B, G, T, d], and return all that the pass may attend to [B, G, S, d]."""
        row_B1 = torch.arange(len(self.lengths), device=key_states.device).unsqueeze(1)
        keys, values = self._buffers.get(layer_idx, (None, None))
        keys, values = grown(keys, key_states, self._size), grown(values, value_states, self._size)
        self._buffers[layer_idx] = keys, values
        for buffer, new_BGTd in ((keys, key_states), (values, value_states)):
            buffer[row_B1, :, self._slot_BT] = new_BGTd.transpose(1, 2)
        return keys[:, :, : self._end], values[:, :, : self._end]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Drop all but the first lengths[b] tokens of each row."""
        self.lengths = list(lengths)

    def keep_paths(self, lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Drop all but the first lengths[b] tokens of each row and, of those after them, the path's, which are moved together."""
        width = max(map(len, paths))
        if any([*path] != [*range(len(path))] for path in paths):
            row_B1 = torch.arange(len(paths), device=self._slot_BT.device).unsqueeze(1)
            first_B1 = torch.tensor(lengths, device=row_B1.device).unsqueeze(1)
            path_BN = torch.tensor([[*path, *[0] * (width - len(path))] for path in paths], device=row_B1.device)
            for kept in itertools.chain(*self._buffers.values()):
                kept[row_B1, :, first_B1 + torch.arange(width, device=row_B1.device)] = kept[row_B1, :, first_B1 + path_BN]
        self.truncate([length + len(path) for length, path in zip(lengths, paths, strict=True)])

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        index = torch.tensor(rows, device=self._slot_BT.device)
        self.lengths = [self.lengths[row] for row in rows]
        self._buffers = {layer: (keys[index], values[index]) for layer, (keys, values) in self._buffers.items()}


class RaggedKVCache(BatchKVCache):
    """A `KVCache` for B sequences."""

    def __init__(self, num_rows: int, rotary: RotaryFunction, device: torch.device, window: int | None = None) -> None:
        super().__init__(num_rows, device)
        self._window = window
        self._tables = RotaryTables(rotary, device)
        self._mask_B1TS: Tensor

    def extend(self, counts: Sequence[int], *, is_causal: bool = True, step: Step | None = None) -> tuple[Tensor, Tensor]:
        """(cos, sin) [B, T, d] of the next step, as `place` its positions; its layers then call `attend`."""
        position_BT = self.place(counts, is_causal=is_causal, step=step)
        self._mask_B1TS = self.visible(self._window)
        self._tables.reserve(self._mask_B1TS.shape[-1])
        return self._tables.cos[0, position_BT], self._tables.sin[0, position_BT]

    def level(self, step: Step) -> tuple[Tensor, Tensor]:
        """As `DraftKVCache`'s, of each row's tree."""
        return self.extend([step.seen_BTF.shape[1]] * len(self.lengths), step=step)

    def append(self, layer: int, key_BGTd: Tensor, value_BGTd: Tensor) -> None:
        self.update(key_BGTd, value_BGTd, layer)

    def attend(self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor) -> Tensor:
        keys, values = self.update(key_BGTd, value_BGTd, layer)
        return F.scaled_dot_product_attention(query_BNTd, keys, values, attn_mask=self._mask_B1TS, enable_gqa=True)


def kv_cache_of(
    num_rows: int, rotary: RotaryFunction, device: torch.device, window: int | None = None
) -> DraftKVCache | RaggedKVCache:
    """For the layers of a draft of B sequences: one alone needs no mask of its own."""
    return DraftKVCache(rotary, device, window) if num_rows == 1 else RaggedKVCache(num_rows, rotary, device, window)
