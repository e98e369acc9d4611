"""The attention of a batch's blocks: each to the context before its anchor and to its own slots.

Shapes: S tokens of the flattened batch, the context; N blocks of P slots; h query heads, G
key/value heads, d head size.

Slot k of the block with the anchor a sees the context positions < a of its document. This is all
that is known when the block is drafted. It also sees the slots of its own block: all of them, or in
causal layers those up to itself. With a window of M positions it sees the context positions after a
+ k - M.

On a GPU this is one call of flex attention, whose kernel skips what no slot sees. On a CPU the
blocks are processed in chunks. The blocks of a chunk attend under a mask to one another, and to the
context from the first of their documents to the last of their anchors. So no mask spans all blocks
and all context.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


@dataclass(eq=False)
class BlockKVCache:
    """The `KVCache` of one training step of a block drafter.

    In each layer, the context enters by `append` first. Then the blocks `attend`.

    Attributes:
        anchors_N: flattened positions of the anchors, ascending.
        starts_N: where the documents of the anchors begin.
        spans: the chunks of blocks on a CPU (see `objective.split_blocks`).
        block_size: P.
        window: M; None for no window.
        is_causal: whether a slot sees only the slots up to itself.
    """

    anchors_N: Tensor
    starts_N: Tensor
    spans: Sequence[tuple[int, int, int, int]]
    block_size: int
    window: int | None
    is_causal: bool
    # Keys and values [G, S, d] of the context, by layer.
    _context: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    # The mask of all slots over context and slots, for the one call on a GPU.
    _mask: BlockMask | None = None
    # For each chunk: its blocks, the context that any of them sees, and a mask of what each slot
    # sees of this context and of the chunk's own slots.
    _chunks: list[tuple[slice, slice, Tensor]] = field(default_factory=list)

    def append(self, layer: int, key_BGTd: Tensor, value_BGTd: Tensor) -> None:
        """Store the keys and values of all tokens of the batch, the context of the blocks."""
        # Lay the rows one after another: [B, G, T, d] becomes [G, S, d].
        key_GSd, value_GSd = (
            x.transpose(0, 1).flatten(1, 2).to(value_BGTd.dtype) for x in (key_BGTd, value_BGTd)
        )
        self._context[layer] = key_GSd, value_GSd

    def attend(
        self, layer: int, query_NhPd: Tensor, key_NGPd: Tensor, value_NGPd: Tensor
    ) -> Tensor:
        """Return the attention output [N, h, P, d] of the blocks."""
        # Float32 rotary tables widen queries and keys under autocast.
        dtype = value_NGPd.dtype
        inputs = (query_NhPd.to(dtype), key_NGPd.to(dtype), value_NGPd, *self._context[layer])
        # On a GPU a kernel skips what no slot sees. On a CPU the blocks attend in chunks instead.
        return (
            self.attend_in_one_call(*inputs)
            if query_NhPd.is_cuda
            else self.attend_in_chunks(*inputs)
        )

    def attend_in_chunks(
        self, query: Tensor, key: Tensor, value: Tensor, key_GSd: Tensor, value_GSd: Tensor
    ) -> Tensor:
        """Compute the attention output [N, h, P, d] chunk by chunk, for a CPU.

        Args:
            query: [N, h, P, d], of the slots.
            key: [N, G, P, d], of the slots.
            value: [N, G, P, d], of the slots.
            key_GSd: keys of the context.
            value_GSd: values of the context.
        """
        # Build the mask [slots, context and slots] of each chunk. The first layer does this for all
        # layers.
        num_tokens = key_GSd.shape[1]
        for first, last, start, end in () if self._chunks else self.spans:
            slot = torch.arange(first * self.block_size, last * self.block_size, device=key.device)
            context = torch.arange(start, end, device=key.device)
            mask = self.is_visible(
                slot.unsqueeze(1), torch.cat((context, num_tokens + slot)), num_tokens
            )
            self._chunks.append((slice(first, last), slice(start, end), mask))

        # Attend chunk by chunk. The slots of a chunk are the queries. Its context and its own slots
        # are the keys.
        groups = key.shape[1]
        heads = query.shape[1] // groups
        outputs = []
        for blocks, context_span, mask in self._chunks:
            # Queries [G, h / G, slots, d]: the heads that share keys and values stand together.
            q = query[blocks].unflatten(1, (groups, heads)).permute(1, 2, 0, 3, 4).flatten(2, 3)
            # Keys and values [G, h / G, context and slots, d], without copies for the h / G heads.
            k, v = (
                torch.cat(
                    (context[:, context_span], block_values[blocks].transpose(0, 1).flatten(1, 2)),
                    1,
                )
                .unsqueeze(1)
                .expand(-1, heads, -1, -1)
                for context, block_values in ((key_GSd, key), (value_GSd, value))
            )
            output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            # Back to blocks: [blocks of the chunk, h, P, d].
            outputs.append(
                output.unflatten(2, (-1, self.block_size)).permute(2, 0, 1, 3, 4).flatten(1, 2)
            )
        return torch.cat(outputs)

    def attend_in_one_call(
        self, query: Tensor, key: Tensor, value: Tensor, key_GSd: Tensor, value_GSd: Tensor
    ) -> Tensor:
        """Compute the attention output [N, h, P, d] by one call of flex attention, for a GPU.

        Args:
            query: [N, h, P, d], of the slots.
            key: [N, G, P, d], of the slots.
            value: [N, G, P, d], of the slots.
            key_GSd: keys of the context.
            value_GSd: values of the context.
        """
        # Build the mask [N P, S + N P]. The first layer does this for all layers.
        num_tokens = key_GSd.shape[1]
        if self._mask is None:

            def mask_mod(batch: Tensor, head: Tensor, slot: Tensor, index: Tensor) -> Tensor:
                return self.is_visible(slot, index, num_tokens)

            num_slots = query.shape[0] * self.block_size
            make = compile_once(create_block_mask) if query.is_cuda else create_block_mask
            self._mask = make(
                mask_mod, None, None, num_slots, num_tokens + num_slots, device=query.device
            )

        # Lay the slots of all blocks in a row: they are the queries [h, N P, d]. The context and
        # then all slots are the keys and values [G, S + N P, d].
        q, own_key, own_value = (x.transpose(0, 1).flatten(1, 2) for x in (query, key, value))
        k = torch.cat((key_GSd, own_key), 1)
        v = torch.cat((value_GSd, own_value), 1)
        attend = compile_once(flex_attention) if query.is_cuda else flex_attention
        output_hSd = attend(
            q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), block_mask=self._mask, enable_gqa=True
        )[0]
        context: Tensor = output_hSd.unflatten(1, (-1, self.block_size)).transpose(0, 1)
        return context

    def is_visible(self, slot: Tensor, index: Tensor, num_tokens: int) -> Tensor:
        """Return which keys each slot sees: the context before its anchor, and its own block.

        Args:
            slot: indices of slots among all N P slots.
            index: indices of keys. Below `num_tokens` this is a token of the context, from there on
                the slot `index - num_tokens`.
            num_tokens: S.

        Returns:
            Booleans of the shape that `slot` and `index` broadcast to.
        """
        # The block of the slot, and its place k in the block.
        block = slot // self.block_size
        k = slot % self.block_size

        # Slots of the same block are visible; if the draft is causal, only those up to the slot.
        slot_index = index - num_tokens
        anchor = self.anchors_N[block]
        is_visible_slot = (slot_index >= 0) & (slot_index // self.block_size == block)
        if self.is_causal:
            is_visible_slot = is_visible_slot & (slot_index <= slot)

        # Of the context, the tokens of the anchor's document before the anchor are visible. A slot
        # stands at position anchor + k, from which a window counts back.
        is_visible_context = (index >= self.starts_N[block]) & (index < anchor)
        if self.window is not None:
            is_visible_context = is_visible_context & (index > anchor + k - self.window)
        return is_visible_slot | is_visible_context


@cache
def compile_once(function: Any) -> Any:
    """Return the compiled function; it is compiled once in a process."""
    return torch.compile(function)
