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

RotaryFunction = Callable[
    [Tensor], tuple[Tensor, Tensor]
]  # position ids [1, S] -> (cos, sin) [1, S, d]


def grown(buffer: Tensor | None, new_BGTd: Tensor, size: int) -> Tensor:
    """The buffer [B, G, S, d] of a layer, or a longer one of `size` positions; the first new keys or values determine shape and dtype."""
    if buffer is not None and buffer.shape[2] >= size:
        return buffer
    # Zeros: masked slots are multiplied by zero, and uninitialized memory may hold NaN.
    longer = new_BGTd.new_zeros(*new_BGTd.shape[:2], size, new_BGTd.shape[3])
    if buffer is not None:
        longer[:, :, : buffer.shape[2]] = buffer
    return longer


class Slots:
    """A `KVCache` over the buffers of a `DraftKVCache`: slot s holds position s, and a query sees its own and those before it."""

    def __init__(
        self,
        buffers: dict[int, tuple[Tensor, Tensor]],
        position_T: Tensor,
        size: int,
        window: int | None,
    ) -> None:
        self._buffers, self._position_T = buffers, position_T
        key_S, query_T1 = torch.arange(size, device=position_T.device), position_T.unsqueeze(1)
        self._mask_TS = (
            key_S <= query_T1
            if window is None
            else (key_S <= query_T1) & (key_S > query_T1 - window)
        )

    def append(self, layer: int, key_BGTd: Tensor, value_BGTd: Tensor) -> None:
        for buffer, new_BGTd in zip(self._buffers[layer], (key_BGTd, value_BGTd), strict=True):
            buffer.index_copy_(2, self._position_T, new_BGTd)

    def attend(
        self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor
    ) -> Tensor:
        self.append(layer, key_BGTd, value_BGTd)
        keys, values = self._buffers[layer]
        return F.scaled_dot_product_attention(
            query_BNTd, keys, values, attn_mask=self._mask_TS, enable_gqa=True
        )


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
        self._slot_BT: Tensor = torch.empty(
            num_rows, 0, dtype=torch.long, device=device
        )  # of the current pass
        self._held = self._end = 0  # positions before and after it
        self._size = 0  # positions allocated

    def place(
        self, counts: Sequence[int], *, is_causal: bool = True, step: Step | None = None
    ) -> Tensor:
        """Positions [B, T] of the next pass, in which row b gets counts[b] new tokens, each of which sees those up to itself, or all.

        step: of trees, if the tokens are nodes: a slot is then not its node's position until `keep_paths`.
        """
        self._is_causal, self._step = is_causal, step
        device = self._slot_BT.device
        self._slot_BT = torch.tensor(self.lengths, device=device).unsqueeze(1) + torch.arange(
            max(counts), device=device
        )
        self._advance(counts)
        return self._slot_BT if step is None else torch.tensor(step.new_positions, device=device)

    def _advance(self, counts: Sequence[int]) -> None:
        self._held, self._end = max(self.lengths), max(self.lengths) + max(counts)
        if self._end > self._size:
            self._size = self._end + max(LEAST_SPARE, self._end // 4)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def visible(self, window: int | None) -> Tensor:
        """[B, 1, T, S] bool: what each query of the pass attends to, within the last `window` positions, its own included."""
        if self._step:
            return self._step.visible(window).unsqueeze(1)
        key, query = (
            torch.arange(self._end, device=self._slot_BT.device),
            self._slot_BT[:, None, :, None],
        )
        last = (
            query
            if self._is_causal
            else torch.tensor(self.lengths, device=key.device).view(-1, 1, 1, 1) - 1
        )
        return key <= last if window is None else (key <= last) & (key > query - window)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._held

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_options: Any
    ) -> tuple[Tensor, Tensor]:
        """Take in a layer's new keys and values [B, G, T, d], and return all that the pass may attend to [B, G, S, d]."""
        keys, values = self._buffers.get(layer_idx, (None, None))
        keys, values = grown(keys, key_states, self._size), grown(values, value_states, self._size)
        self._buffers[layer_idx] = keys, values
        if len(self.lengths) == 1:
            keys[:, :, self._held : self._end], values[:, :, self._held : self._end] = (
                key_states,
                value_states,
            )
        else:
            row_B1 = torch.arange(len(self.lengths), device=key_states.device).unsqueeze(1)
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
            path_BN = torch.tensor(
                [[*path, *[0] * (width - len(path))] for path in paths], device=row_B1.device
            )
            for kept in itertools.chain(*self._buffers.values()):
                kept[row_B1, :, first_B1 + torch.arange(width, device=row_B1.device)] = kept[
                    row_B1, :, first_B1 + path_BN
                ]
        self.truncate([length + len(path) for length, path in zip(lengths, paths, strict=True)])

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        index = torch.tensor(rows, device=self._slot_BT.device)
        self.lengths = [self.lengths[row] for row in rows]
        self._buffers = {
            layer: (keys[index], values[index]) for layer, (keys, values) in self._buffers.items()
        }


class DraftKVCache(BatchKVCache):
    """A `KVCache` for the layers of a draft: attention over what is cached of each sequence, or the last `window` of it.

    Each step begins with its rotary tables, from `extend` or `level`. One sequence alone is written and read in slices, and without a mask
    where its queries see all that is before them.
    """

    def __init__(
        self, num_rows: int, rotary: RotaryFunction, device: torch.device, window: int | None = None
    ) -> None:
        super().__init__(num_rows, device)
        self._window, self._rotary = window, rotary
        self._first = 0  # the first position that the step's first query attends to
        self._mask: Tensor | None = (
            None  # [T, S] or [B, 1, T, S], what queries attend to from there on; None: all before them
        )
        self._num_angles = 0
        self.reserve(FIRST_SIZE)

    def reserve(self, positions: int) -> None:
        """Have cos, sin [1, S, d] of at least so many, computed for many at once: in each step it would cost a fifth of the step."""
        if positions > self._num_angles:
            self._num_angles = max(positions, 2 * self._num_angles)
            self._cos, self._sin = self._rotary(
                torch.arange(self._num_angles, device=self._slot_BT.device).unsqueeze(0)
            )

    def extend(self, counts: Sequence[int], *, is_causal: bool = True) -> tuple[Tensor, Tensor]:
        """(cos, sin) [B, T, d] of the next step's positions, each of which sees those of its row up to itself, or all."""
        if len(counts) > 1:
            return self._masked(counts, is_causal=is_causal)
        (start,), (count,), device = self.lengths, counts, self._slot_BT.device
        self._advance(counts)
        self._first, self._mask = (
            0 if self._window is None else max(0, start - self._window + 1),
            None,
        )
        # Once for all layers, but where there is a kernel without one, and where nothing is cached: of a prompt it would be [T, T].
        if count > 1 and not (
            is_causal and (device.type == "cuda" or start == 0)
        ):  # query i is at position start + i
            mask_TS = torch.ones(count, self._end - self._first, dtype=torch.bool, device=device)
            if is_causal:
                mask_TS = mask_TS.tril(start - self._first)
            self._mask = (
                mask_TS
                if self._window is None
                else mask_TS.triu(start - self._first - self._window + 1)
            )
        return self._cos[:, start : self._end], self._sin[:, start : self._end]

    def level(self, step: Step) -> tuple[Tensor, Tensor]:
        """(cos, sin) [B, T, d] of the next step, a level of each row's tree: all at one position, with its branches kept apart."""
        counts = [step.seen_BTF.shape[1]] * len(self.lengths)
        if len(counts) > 1:
            return self._masked(counts, step=step)
        position = step.positions[0][-1]
        self._advance(counts)
        self._first, self._mask = 0, step.visible(self._window)[0]
        cos, sin = (
            table[:, position : position + 1].expand(-1, counts[0], -1)
            for table in (self._cos, self._sin)
        )
        return cos, sin

    def _advance(self, counts: Sequence[int]) -> None:
        super()._advance(counts)
        self.reserve(self._end)

    def _masked(self, counts: Sequence[int], **options: Any) -> tuple[Tensor, Tensor]:
        position_BT = self.place(counts, **options)
        self._first, self._mask = 0, self.visible(self._window)
        return self._cos[0, position_BT], self._sin[0, position_BT]

    def append(self, layer: int, key_BGTd: Tensor, value_BGTd: Tensor) -> None:
        self.update(key_BGTd, value_BGTd, layer)

    def attend(
        self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor
    ) -> Tensor:
        keys, values = (
            held[:, :, self._first :] for held in self.update(key_BGTd, value_BGTd, layer)
        )
        if self._mask is None and query_BNTd.shape[2] > 1:
            return cached_attention(query_BNTd, keys, values, self._window).transpose(1, 2)
        return F.scaled_dot_product_attention(
            query_BNTd, keys, values, attn_mask=self._mask, enable_gqa=True
        )

    def allocate(self, positions: int) -> None:
        """All at once, for one sequence: a graph's buffers must stay where they are."""
        self.reserve(positions)
        self._size = positions

    def slots(self, held: Tensor, count: int) -> tuple[tuple[Tensor, Tensor], "Slots"]:
        """(cos, sin) [1, T, d] of T = `count` positions from `held`, a scalar, on, and a `KVCache` for a graph's pass over them."""
        position_T = held + torch.arange(count, device=held.device)
        cos, sin = (table.index_select(1, position_T) for table in (self._cos, self._sin))
        return (cos, sin), Slots(self._buffers, position_T, self._size, self._window)

    @property
    def buffers(self) -> list[Tensor]:
        return [*itertools.chain(*self._buffers.values())]
