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

    A block is a known token, its anchor, followed by masks. Its P positions are called slots. The
    context is all tokens of the flattened batch. A slot sees those of its document before the
    anchor, and the slots of its own block.

    In each layer, the context enters by `append` first. Then the blocks `attend`.

    Attributes:
        anchors_N: positions of the anchors of the N blocks in the flattened batch, ascending.
        starts_N: where the document of each anchor begins, likewise.
        spans: the chunks of blocks on a CPU (see `objective.split_blocks`).
        block_size: P, the slots of a block.
        window: the size of the sliding window in positions; None for no window.
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
        """Store a layer's keys and values of all tokens of the batch: the context of the blocks.

        Args:
            layer: the index of the layer.
            key_BGTd: keys [B, G, T, d]: rows, key/value heads, positions, head size.
            value_BGTd: values of the same shape.
        """
        # Lay the rows one after another: [B, G, T, d] becomes [G, S, d]. Under autocast, float32
        # rotary tables widen the keys, so they are converted back to the dtype of the values.
        key_GSd, value_GSd = (
            x.transpose(0, 1).flatten(1, 2).to(value_BGTd.dtype) for x in (key_BGTd, value_BGTd)
        )
        self._context[layer] = key_GSd, value_GSd

    def attend(
        self, layer: int, query_NhPd: Tensor, key_NGPd: Tensor, value_NGPd: Tensor
    ) -> Tensor:
        """Compute the attention of N blocks of P slots to the context and to their own slots.

        Args:
            layer: the index of the layer, whose context `append` has stored.
            query_NhPd: queries [N, h, P, d] of the slots, for h query heads of size d.
            key_NGPd: keys [N, G, P, d] of the slots, for G key/value heads.
            value_NGPd: values of the slots, of the same shape.

        Returns:
            The attention output [N, h, P, d].
        """
        # Under autocast, float32 rotary tables widen queries and keys, so they are converted back.
        dtype = value_NGPd.dtype
        inputs = (query_NhPd.to(dtype), key_NGPd.to(dtype), value_NGPd, *self._context[layer])
        # On a GPU one kernel call skips all pairs that the mask hides. That kernel has no backward
        # pass on a CPU, so there the blocks attend in chunks.
        if query_NhPd.is_cuda:
            return self.attend_in_one_call(*inputs)
        return self.attend_in_chunks(*inputs)

    def attend_in_chunks(
        self, query: Tensor, key: Tensor, value: Tensor, key_GSd: Tensor, value_GSd: Tensor
    ) -> Tensor:
        """Compute the attention output [N, h, P, d] chunk by chunk, for a CPU.

        Args:
            query: queries [N, h, P, d] of N blocks of P slots, for h query heads.
            key: keys [N, G, P, d] of the slots, for G key/value heads.
            value: values [N, G, P, d] of the slots.
            key_GSd: keys of the S tokens of the context.
            value_GSd: values of the S tokens of the context.
        """
        # The first layer builds the masks for all layers.
        if not self._chunks:
            self._build_chunks(key_GSd.shape[1], key.device)

        # Attend chunk by chunk. The slots of a chunk are the queries. Its context and its own slots
        # are the keys.
        num_groups = key.shape[1]
        heads_per_group = query.shape[1] // num_groups
        outputs = []
        for blocks, context_span, mask in self._chunks:
            # Queries [G, h / G, slots, d]: the heads that share keys and values stand together.
            q = query[blocks].unflatten(1, (num_groups, heads_per_group))
            q = q.permute(1, 2, 0, 3, 4).flatten(2, 3)
            # Keys and values [G, h / G, context and slots, d], without copies for the h / G heads.
            k = _join_context_and_slots(key_GSd[:, context_span], key[blocks]).unsqueeze(1)
            v = _join_context_and_slots(value_GSd[:, context_span], value[blocks]).unsqueeze(1)
            k, v = (x.expand(-1, heads_per_group, -1, -1) for x in (k, v))
            output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            # Back to blocks: [blocks of the chunk, h, P, d].
            outputs.append(
                output.unflatten(2, (-1, self.block_size)).permute(2, 0, 1, 3, 4).flatten(1, 2)
            )
        return torch.cat(outputs)

    def _build_chunks(self, num_tokens: int, device: torch.device) -> None:
        """Build the attention mask of each chunk of blocks, and store it with the chunk's ranges.

        The rows of a mask are the chunk's slots (positions of its blocks). The columns are the
        keys: those tokens of the batch that any of these slots sees, then the chunk's slots. A key
        below `num_tokens` is a token of the batch, and slot s is the key num_tokens + s.

        Args:
            num_tokens: the number of tokens of the flattened batch.
            device: where the masks are made.
        """
        for first_block, end_block, first_token, end_token in self.spans:
            slot = torch.arange(
                first_block * self.block_size, end_block * self.block_size, device=device
            )
            context = torch.arange(first_token, end_token, device=device)
            mask = self.is_visible(
                slot.unsqueeze(1), torch.cat((context, num_tokens + slot)), num_tokens
            )
            self._chunks.append(
                (slice(first_block, end_block), slice(first_token, end_token), mask)
            )

    def attend_in_one_call(
        self, query: Tensor, key: Tensor, value: Tensor, key_GSd: Tensor, value_GSd: Tensor
    ) -> Tensor:
        """Compute the attention output [N, h, P, d] by one call of flex attention, for a GPU.

        Args:
            query: queries [N, h, P, d] of N blocks of P slots, for h query heads.
            key: keys [N, G, P, d] of the slots, for G key/value heads.
            value: values [N, G, P, d] of the slots.
            key_GSd: keys of the S tokens of the context.
            value_GSd: values of the S tokens of the context.
        """
        # Build the mask [N P, S + N P], one for all heads (None, None: batch and heads). The first
        # layer does this for all layers. On a CPU, where only tests call this function, nothing is
        # compiled.
        num_tokens = key_GSd.shape[1]
        if self._mask is None:

            def mask_mod(batch: Tensor, head: Tensor, slot: Tensor, index: Tensor) -> Tensor:
                """Return whether a slot sees a key; flex attention asks for each pair of them.

                The answer is the same for all heads.
                """
                return self.is_visible(slot, index, num_tokens)

            num_slots = query.shape[0] * self.block_size
            build_mask = compile_once(create_block_mask) if query.is_cuda else create_block_mask
            self._mask = build_mask(
                mask_mod, None, None, num_slots, num_tokens + num_slots, device=query.device
            )

        # Lay the slots of all blocks in a row: they are the queries [h, N P, d]. The context and
        # then all slots are the keys and values [G, S + N P, d].
        q = query.transpose(0, 1).flatten(1, 2)
        k = _join_context_and_slots(key_GSd, key)
        v = _join_context_and_slots(value_GSd, value)
        attend = compile_once(flex_attention) if query.is_cuda else flex_attention
        output_hSd = attend(
            q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), block_mask=self._mask, enable_gqa=True
        )[0]
        output_NhPd: Tensor = output_hSd.unflatten(1, (-1, self.block_size)).transpose(0, 1)
        return output_NhPd

    def is_visible(self, slot: Tensor, index: Tensor, num_tokens: int) -> Tensor:
        """Return which keys each slot sees: the text before its anchor, and its own block.

        Slots are the positions of a block. The first of them is the anchor, a known token of the
        text. The keys are all tokens of the flattened batch (the context), and then all slots.

        Args:
            slot: indices of slots, counted over all blocks.
            index: indices of keys. Below `num_tokens` an index is a token of the context, from
                there on it is the slot `index - num_tokens`.
            num_tokens: the number of tokens of the context.

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


def _join_context_and_slots(context_GSd: Tensor, blocks_NGPd: Tensor) -> Tensor:
    """Return the keys (or values) of the context followed by those of all slots.

    Args:
        context_GSd: [G, S, d]: key/value heads, tokens of the context, head size.
        blocks_NGPd: [N, G, P, d] of N blocks of P slots.

    Returns:
        [G, S + N P, d].
    """
    return torch.cat((context_GSd, blocks_NGPd.transpose(0, 1).flatten(1, 2)), 1)


@cache
def compile_once(function: Any) -> Any:
    """Compile a function; later calls with this function return the same compiled one."""
    return torch.compile(function)
