"""KV caches whose rows advance by different lengths, for drafts and for models of transformers.

`DraftKVCache` is the cache of drafts whose layers use a `KVCache` (specdistill.methods.layers):
heads and plain Llamas. `BatchKVCache` holds several sequences of any model.

Slot s holds position s. Rejected tokens are forgotten by setting a length, and the next tokens
overwrite them.

Shapes: B rows, N query heads, G key/value heads, S allocated positions, d head size, T positions of
one step.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from specdistill.decoding.tree import TreePass
from specdistill.targets.cache import MIN_SPARE_POSITIONS
from specdistill.targets.packed_attention import attend_cached

# Positions whose rotary angles are computed at first. A larger number takes more memory, and with a
# smaller one the tables of longer sequences are computed more than once.
FIRST_SIZE = 512

# Position ids [1, S] -> (cos, sin) [1, S, d]
RotaryFunction = Callable[[Tensor], tuple[Tensor, Tensor]]


def grow_buffer(buffer: Tensor | None, new_BGTd: Tensor, size: int) -> Tensor:
    """Return a buffer with room for `size` positions, and with the content of the old buffer.

    Args:
        buffer: the old buffer, a layer's keys or values [B, G, S, d] (rows, heads, positions, head
            size); None for a layer that has none yet. A buffer that is long enough is returned as
            it is.
        new_BGTd: new keys or values. A new buffer takes its shape and dtype from them.
        size: positions that must fit.
    """
    if buffer is not None and buffer.shape[2] >= size:
        return buffer
    # Zeros: masked slots are multiplied by zero, and uninitialized memory may hold NaN.
    longer_buffer = new_BGTd.new_zeros(*new_BGTd.shape[:2], size, new_BGTd.shape[3])
    if buffer is not None:
        longer_buffer[:, :, : buffer.shape[2]] = buffer
    return longer_buffer


class GraphKVCache:
    """A `KVCache` over the buffers of a `DraftKVCache`, for one pass of a compiled graph.

    Its positions are tensors, so the same graph serves every pass. A query sees its own position
    and those before it.
    """

    def __init__(
        self,
        buffers: dict[int, tuple[Tensor, Tensor]],
        position_T: Tensor,
        size: int,
        window: int | None,
    ) -> None:
        self._buffers = buffers
        self._position_T = position_T
        key_S = torch.arange(size, device=position_T.device)
        query_T1 = position_T.unsqueeze(1)
        self._mask_TS = key_S <= query_T1
        if window is not None:
            self._mask_TS = self._mask_TS & (key_S > query_T1 - window)

    def append(self, layer: int, key_BGTd: Tensor, value_BGTd: Tensor) -> None:
        """Write the pass's new keys and values [B, G, T, d] into a layer's buffers."""
        for buffer, new_BGTd in zip(self._buffers[layer], (key_BGTd, value_BGTd), strict=True):
            buffer.index_copy_(2, self._position_T, new_BGTd)

    def attend(
        self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor
    ) -> Tensor:
        """Store new keys and values, and return the queries' attention to all cached positions.

        The result is [B, N, T, d]: rows, query heads, new positions, head size.
        """
        self.append(layer, key_BGTd, value_BGTd)
        keys, values = self._buffers[layer]
        return F.scaled_dot_product_attention(
            query_BNTd, keys, values, attn_mask=self._mask_TS, enable_gqa=True
        )


class BatchKVCache(DynamicCache):
    """Keys and values of B sequences that advance by different lengths.

    It is a cache of transformers' models. Each pass: `place` each row's new tokens, run the layers,
    `truncate` each row to the tokens it keeps, and `keep` the rows that continue.

    Rows shorter than the longest of a pass are padded on the right, and the next pass overwrites
    the padding. All layers are full, even those of sliding windows: the mask applies the window.

    Attributes:
        lengths: tokens held of each row.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        super().__init__()
        self.lengths = [0] * num_rows
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}  # by layer
        # The slots of the current pass, and the positions that the longest row holds before and
        # after it.
        self._slot_BT: Tensor = torch.empty(num_rows, 0, dtype=torch.long, device=device)
        self._num_held = 0
        self._end = 0
        self._size = 0  # positions that a buffer has room for

    def place(
        self, counts: Sequence[int], *, is_causal: bool = True, tree_pass: TreePass | None = None
    ) -> Tensor:
        """Reserve slots for the new tokens of each row; return their position ids [B, T].

        Args:
            counts: the number of new tokens of each row. T is the largest of them.
            is_causal: True: a token attends to the tokens up to itself. False: to all of its row.
            tree_pass: the nodes' ancestors and positions, if the tokens are nodes of trees. A
                node's slot then differs from its position, until `keep_paths` moves the node.
        """
        self._is_causal = is_causal
        self._tree_pass = tree_pass
        device = self._slot_BT.device
        start_B1 = torch.tensor(self.lengths, device=device).unsqueeze(1)
        self._slot_BT = start_B1 + torch.arange(max(counts), device=device)
        self._advance(counts)
        if tree_pass is None:
            return self._slot_BT
        return torch.tensor(tree_pass.new_positions, device=device)

    def _advance(self, counts: Sequence[int]) -> None:
        """Add the numbers of new tokens to the rows' lengths, and set the size of the buffers.

        `update` grows the buffers to this size. It is at least a quarter larger than needed, so
        that the buffers are not copied in every pass.
        """
        self._num_held = max(self.lengths)
        self._end = self._num_held + max(counts)
        if self._end > self._size:
            self._size = self._end + max(MIN_SPARE_POSITIONS, self._end // 4)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def build_mask(self, window: int | None) -> Tensor:
        """Return the attention mask of the pass: which of the S slots each new token attends to.

        Args:
            window: a token attends to the last `window` positions, its own included. None: to all.

        Returns:
            Bool [B, 1, T, S]: rows, all heads alike, new tokens, slots.
        """
        if self._tree_pass:
            return self._tree_pass.build_mask(window).unsqueeze(1)
        device = self._slot_BT.device
        key_S = torch.arange(self._end, device=device)
        query_B1T1 = self._slot_BT[:, None, :, None]
        # The last slot that a token attends to: its own, or without causality the row's last. The
        # lengths include the new tokens already.
        last_key = query_B1T1
        if not self._is_causal:
            last_key = torch.tensor(self.lengths, device=device).view(-1, 1, 1, 1) - 1
        mask_B1TS = key_S <= last_key
        if window is not None:
            mask_B1TS = mask_B1TS & (key_S > query_B1T1 - window)
        return mask_B1TS

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many positions the longest row held before the current pass.

        transformers calls this method of a cache.
        """
        return self._num_held

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_options: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values, and return all that the cache holds of the layer.

        The attention layers of transformers call this method. The new keys and values are [B, G, T,
        d] (rows, heads, new positions, head size). Those that are returned are [B, G, S, d], with
        all S positions.
        """
        keys, values = self._buffers.get(layer_idx, (None, None))
        keys = grow_buffer(keys, key_states, self._size)
        values = grow_buffer(values, value_states, self._size)
        self._buffers[layer_idx] = keys, values
        # A single row is written as one slice. Several rows begin at different slots, so each row
        # needs indices of its own. Indexed in this way, positions come before heads: [B, T, G, d].
        if len(self.lengths) == 1:
            keys[:, :, self._num_held : self._end] = key_states
            values[:, :, self._num_held : self._end] = value_states
        else:
            row_B1 = torch.arange(len(self.lengths), device=key_states.device).unsqueeze(1)
            for buffer, new_BGTd in ((keys, key_states), (values, value_states)):
                buffer[row_B1, :, self._slot_BT] = new_BGTd.transpose(1, 2)
        return keys[:, :, : self._end], values[:, :, : self._end]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep the first lengths[b] tokens of each row b, and forget the later ones.

        The buffers stay as they are. The next pass overwrites the forgotten tokens.
        """
        self.lengths = list(lengths)

    def keep_paths(self, lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep the accepted nodes of each row's tree, and forget the other nodes.

        The accepted nodes are moved to the slots directly after the text, where the next pass
        expects them. For a chain they are there already.

        Args:
            lengths: the number of tokens before the nodes in each row, the root included.
            paths: the indices of each row's accepted nodes, in increasing order.
        """
        # Nothing moves if each path consists of its row's first nodes. Shorter paths are padded
        # with copies of node 0, which `truncate` below forgets.
        if any([*path] != [*range(len(path))] for path in paths):
            device = self._slot_BT.device
            path_length = max(map(len, paths))
            padded_paths = [[*path, *[0] * (path_length - len(path))] for path in paths]
            row_B1 = torch.arange(len(paths), device=device).unsqueeze(1)
            first_B1 = torch.tensor(lengths, device=device).unsqueeze(1)
            old_slot_BN = first_B1 + torch.tensor(padded_paths, device=device)
            new_slot_BN = first_B1 + torch.arange(path_length, device=device)
            for buffer in self.buffers:
                # The right side is a copy, so the slots may overlap.
                buffer[row_B1, :, new_slot_BN] = buffer[row_B1, :, old_slot_BN]
        self.truncate([length + len(path) for length, path in zip(lengths, paths, strict=True)])

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only the rows with these indices, and drop the finished ones."""
        index = torch.tensor(rows, device=self._slot_BT.device)
        self.lengths = [self.lengths[row] for row in rows]
        self._buffers = {
            layer: (keys[index], values[index]) for layer, (keys, values) in self._buffers.items()
        }

    @property
    def buffers(self) -> list[Tensor]:
        """The keys and values of all layers."""
        return [*itertools.chain(*self._buffers.values())]


class DraftKVCache(BatchKVCache):
    """A `KVCache` for the layers of a draft.

    Attention is over all cached positions of a sequence, or over the last `window` of them. Each
    step begins with a call of `begin_chain` or `begin_level`, which return its rotary tables. One
    sequence alone is written and read in slices, and without a mask if its queries see all
    positions before them.
    """

    def __init__(
        self, num_rows: int, rotary: RotaryFunction, device: torch.device, window: int | None = None
    ) -> None:
        super().__init__(num_rows, device)
        self._window = window
        self._rotary = rotary
        # In each step, `attend` reads the slots from `_first_key` on. No query of the step sees an
        # earlier slot. `_mask`, [T, S] or [B, 1, T, S], says which of the slots read each query
        # sees. None: the positions up to its own, as far back as the window reaches.
        self._first_key = 0
        self._mask: Tensor | None = None
        self._num_angles = 0
        self._reserve_angles(FIRST_SIZE)

    def _reserve_angles(self, num_positions: int) -> None:
        """Compute the rotary tables cos and sin [1, S, d] for S >= `num_positions` positions.

        The tables are computed ahead for many positions, because computing them in each step would
        take a fifth of the step's time. Longer tables are at least twice as long as the old ones,
        so that they are seldom computed again.
        """
        if num_positions > self._num_angles:
            self._num_angles = max(num_positions, 2 * self._num_angles)
            self._cos, self._sin = self._rotary(
                torch.arange(self._num_angles, device=self._slot_BT.device).unsqueeze(0)
            )

    def begin_chain(
        self, counts: Sequence[int], *, is_causal: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Prepare the step that reads a chain of new tokens in each row; return their (cos, sin).

        In a chain each token follows the one before. (Nodes of trees need `begin_level`.)

        Args:
            counts: the number of new tokens of each row. T is the largest of them.
            is_causal: True: a token attends to the tokens up to itself. False: to all of its row.

        Returns:
            The rotary tables cos and sin of the new positions, each [B, T, d].
        """
        if len(counts) > 1:
            position_BT = self.place(counts, is_causal=is_causal)
            return self._begin_masked(position_BT)
        # From here on there is a single row. Its new tokens are at the positions from `start` on.
        # Skip the positions that lie before the window of the first of them.
        (start,) = self.lengths
        (count,) = counts
        device = self._slot_BT.device
        self._advance(counts)
        self._first_key = 0
        if self._window is not None:
            self._first_key = max(0, start - self._window + 1)

        # Attention is faster without a mask. Two kinds of steps need none:
        # - A step of one token, which sees all positions that were not skipped.
        # - A causal step on CUDA, or of a prompt (start = 0). For such a step `attend` calls
        #   `attend_cached`, which applies causality and the window itself.
        self._mask = None
        is_left_to_attend_cached = is_causal and (device.type == "cuda" or start == 0)
        if count > 1 and not is_left_to_attend_cached:
            # Row i is the token at position start + i. Column j is the position first_key + j.
            first_key = self._first_key
            mask_TS = torch.ones(count, self._end - first_key, dtype=torch.bool, device=device)
            if is_causal:
                mask_TS = mask_TS.tril(start - first_key)
            if self._window is not None:
                mask_TS = mask_TS.triu(start - first_key - self._window + 1)
            self._mask = mask_TS
        return self._cos[:, start : self._end], self._sin[:, start : self._end]

    def begin_level(self, tree_pass: TreePass) -> tuple[Tensor, Tensor]:
        """Prepare the step that reads one level of each row's draft tree; return its (cos, sin).

        All nodes of a level have the same position, and do not attend to each other.

        Args:
            tree_pass: the T nodes of each row, with their ancestors and positions.

        Returns:
            The rotary tables cos and sin of the nodes, each [B, T, d].
        """
        # [B, T, F]: rows, nodes of this level, tree nodes in the cache including this level.
        _, num_nodes, _ = tree_pass.ancestors_BTF.shape
        counts = [num_nodes] * len(self.lengths)
        if len(counts) > 1:
            position_BT = self.place(counts, tree_pass=tree_pass)
            return self._begin_masked(position_BT)
        # There is a single row. `positions[0]` has the positions of its tree's nodes, those of this
        # level last. All T nodes of the level have the same position. So one entry of each table is
        # repeated T times.
        position = tree_pass.positions[0][-1]
        self._advance(counts)
        self._first_key = 0  # the mask has a column for every slot, so `attend` skips none
        self._mask = tree_pass.build_mask(self._window)[0]
        cos = self._cos[:, position : position + 1].expand(-1, num_nodes, -1)
        sin = self._sin[:, position : position + 1].expand(-1, num_nodes, -1)
        return cos, sin

    def _advance(self, counts: Sequence[int]) -> None:
        super()._advance(counts)
        self._reserve_angles(self._end)

    def _begin_masked(self, position_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Build the mask for a step of several rows; return (cos, sin) of its new tokens.

        Several rows always get a mask, because their lengths may differ.

        Args:
            position_BT: [B, T], the position of each new token.

        Returns:
            The rotary tables cos and sin, each [B, T, d].
        """
        self._first_key = 0  # the mask has a column for every slot, so `attend` skips none
        self._mask = self.build_mask(self._window)
        return self._cos[0, position_BT], self._sin[0, position_BT]

    def append(self, layer: int, key_BGTd: Tensor, value_BGTd: Tensor) -> None:
        """Store a layer's keys and values of the step."""
        self.update(key_BGTd, value_BGTd, layer)

    def attend(
        self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor
    ) -> Tensor:
        """Store new keys and values, and return the queries' attention to the cached positions.

        The result is [B, N, T, d]: rows, query heads, new positions, head size.
        """
        keys, values = self.update(key_BGTd, value_BGTd, layer)
        # Skip the slots before `_first_key`, which lie before the window of every query.
        keys = keys[:, :, self._first_key :]
        values = values[:, :, self._first_key :]
        # Several queries without a mask are causal, and `attend_cached` applies the window to each.
        # A single query without a mask sees all slots that were not skipped.
        if self._mask is None and query_BNTd.shape[2] > 1:
            return attend_cached(query_BNTd, keys, values, self._window).transpose(1, 2)
        return F.scaled_dot_product_attention(
            query_BNTd, keys, values, attn_mask=self._mask, enable_gqa=True
        )

    def allocate(self, num_positions: int) -> None:
        """Set the size of the buffers to `num_positions` positions of one sequence.

        A compiled graph uses the memory addresses of the buffers, so they must not grow later. The
        rotary tables are computed here. The buffers themselves are created by `update`.
        """
        self._reserve_angles(num_positions)
        self._size = num_positions

    def begin_graph(
        self, num_held: Tensor, count: int
    ) -> tuple[tuple[Tensor, Tensor], "GraphKVCache"]:
        """Prepare a pass of a compiled graph; return its rotary tables and its KV cache.

        Args:
            num_held: scalar tensor, the number of positions that are held before the pass. A tensor
                and not an int, so that one graph serves every pass.
            count: T, the number of new positions.

        Returns:
            (cos, sin) of the new positions, each [1, T, d], and a cache over the same buffers.
        """
        position_T = num_held + torch.arange(count, device=num_held.device)
        cos = self._cos.index_select(1, position_T)
        sin = self._sin.index_select(1, position_T)
        return (cos, sin), GraphKVCache(self._buffers, position_T, self._size, self._window)
