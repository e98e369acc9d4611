"""Attention of a batch's blocks, each to what comes before its anchor and to its own slots.

Shapes: S tokens of the flattened batch, the context; N blocks of P slots; h query heads, G key/value heads, d head size.

Slot k of the block with the anchor a sees the context positions < a of its document, all that is known when it is drafted, and the slots of
its own block: all of them, or in causal layers those up to itself. With a window of M positions it sees those after a + k - M.

On a GPU it is one call of flex attention, whose kernel leaves out what no slot sees. On a CPU some blocks at a time attend to the context
from the first of their documents to the last of their anchors, and to one another under a mask: no mask spans all blocks and all context.
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
class BlockMemory:
    """A `KVCache` of one training step: each layer's context enters by `append`, and its blocks then `attend`."""

    anchors_N: Tensor  # flattened positions, ascending, each after the first of its document
    starts_N: Tensor  # where their documents begin
    spans: Sequence[tuple[int, int, int, int]]  # of specdistill.methods.blocks.anchors
    block_size: int
    window: int | None
    is_causal: bool
    _context: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # by layer: keys and values [G, S, d]
    _mask: BlockMask | None = None
    # Blocks, the context that one of them sees, and what each of their slots sees of that and of their own slots.
    _chunks: list[tuple[slice, slice, Tensor]] = field(default_factory=list)

    def append(self, layer: int, key_BGTd: Tensor, value_BGTd: Tensor) -> None:
        """Of all tokens of the batch."""
        key_GSd, value_GSd = (
            x.transpose(0, 1).flatten(1, 2).to(value_BGTd.dtype) for x in (key_BGTd, value_BGTd)
        )
        self._context[layer] = key_GSd, value_GSd

    def attend(
        self, layer: int, query_NhPd: Tensor, key_NGPd: Tensor, value_NGPd: Tensor
    ) -> Tensor:
        """[N, h, P, d]."""
        dtype = value_NGPd.dtype  # float32 rotary tables widen queries and keys under autocast
        inputs = (query_NhPd.to(dtype), key_NGPd.to(dtype), value_NGPd, *self._context[layer])
        return self.in_one_call(*inputs) if query_NhPd.is_cuda else self.in_chunks(*inputs)

    def in_chunks(
        self, query: Tensor, key: Tensor, value: Tensor, key_GSd: Tensor, value_GSd: Tensor
    ) -> Tensor:
        num_tokens = key_GSd.shape[1]
        for first, last, start, end in () if self._chunks else self.spans:
            slot = torch.arange(first * self.block_size, last * self.block_size, device=key.device)
            context = torch.arange(start, end, device=key.device)
            mask = self.sees(slot.unsqueeze(1), torch.cat((context, num_tokens + slot)), num_tokens)
            self._chunks.append((slice(first, last), slice(start, end), mask))
        groups = key.shape[1]
        heads = query.shape[1] // groups
        found = []
        for blocks, seen, mask in self._chunks:
            q = (
                query[blocks].unflatten(1, (groups, heads)).permute(1, 2, 0, 3, 4).flatten(2, 3)
            )  # [G, h / G, slots, d]
            k, v = (
                torch.cat((context[:, seen], own[blocks].transpose(0, 1).flatten(1, 2)), 1)
                .unsqueeze(1)
                .expand(-1, heads, -1, -1)
                for context, own in ((key_GSd, key), (value_GSd, value))
            )
            output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            found.append(
                output.unflatten(2, (-1, self.block_size)).permute(2, 0, 1, 3, 4).flatten(1, 2)
            )
        return torch.cat(found)

    def in_one_call(
        self, query: Tensor, key: Tensor, value: Tensor, key_GSd: Tensor, value_GSd: Tensor
    ) -> Tensor:
        num_tokens = key_GSd.shape[1]
        if self._mask is None:

            def mask_mod(batch: Tensor, head: Tensor, slot: Tensor, index: Tensor) -> Tensor:
                return self.sees(slot, index, num_tokens)

            num_slots = query.shape[0] * self.block_size
            make = compiled(create_block_mask) if query.is_cuda else create_block_mask
            self._mask = make(
                mask_mod, None, None, num_slots, num_tokens + num_slots, device=query.device
            )
        q, own_key, own_value = (x.transpose(0, 1).flatten(1, 2) for x in (query, key, value))
        k, v = torch.cat((key_GSd, own_key), 1), torch.cat((value_GSd, own_value), 1)
        attend = compiled(flex_attention) if query.is_cuda else flex_attention
        output_hSd = attend(
            q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), block_mask=self._mask, enable_gqa=True
        )[0]
        output: Tensor = output_hSd.unflatten(1, (-1, self.block_size)).transpose(0, 1)
        return output

    def sees(self, slot: Tensor, index: Tensor, num_tokens: int) -> Tensor:
        """Whether a slot, of N P, sees the context position `index`, or from `num_tokens` on the slot `index - num_tokens`."""
        block, k = slot // self.block_size, slot % self.block_size
        other, anchor = index - num_tokens, self.anchors_N[block]
        own = (other >= 0) & (other // self.block_size == block)
        if self.is_causal:
            own = own & (other <= slot)
        known = (index >= self.starts_N[block]) & (index < anchor)
        if self.window is not None:
            known = known & (index > anchor + k - self.window)
        return own | known


@cache
def compiled(function: Any) -> Any:
    return torch.compile(function)
