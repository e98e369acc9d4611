"""A head's passes over few tokens as graphs (`eval.compile`): one over K + 1 of them, which reads what was committed, and one over one.

As the target's (specdistill.decoding.readers): the KV cache is allocated whole, the graph is told how many positions are held, and fewer
committed tokens are padded, whose slots the next pass writes over.

Shapes: T positions of a pass, H draft hidden size, W draft vocabulary.
"""

import torch
from torch import Tensor

from specdistill.decoding.kv_cache import DraftKVCache
from specdistill.methods.chains.head import Head
from specdistill.targets.compiled import allow_graphs


class CompiledSteps:
    """Passes over a KV cache of `size` positions, after a prompt was read, uncompiled, into it."""

    def __init__(self, head: Head, cache: DraftKVCache, size: int) -> None:
        self.head, self.logits, self.cache = head, head.logits, cache
        cache.reserve(size)
        allow_graphs()
        mode = "reduce-overhead" if head.target_ids_W.is_cuda else None
        self._graph = torch.compile(self._pass, fullgraph=True, dynamic=False, mode=mode)

    def read(self, next_ids_1T: Tensor, hidden_1TH: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Logits [1, W] and the next hidden state [1, H] after T <= `width` tokens; `width` is the pass's."""
        count, device = next_ids_1T.shape[1], next_ids_1T.device
        # Not padded views: a graph is made for each layout that it meets.
        ids, hidden = next_ids_1T.new_zeros(1, width), hidden_1TH.new_zeros(1, width, hidden_1TH.shape[-1])
        ids[:, :count], hidden[:, :count] = next_ids_1T, hidden_1TH
        for buffer in self.cache.buffers if device.type == "cuda" else ():
            torch._dynamo.mark_static_address(buffer)  # which a CUDA graph may write to
        held, last = (torch.tensor(number, device=device) for number in (self.cache.length, count - 1))
        logits_1W, next_hidden_1H = self._graph(ids, hidden, held, last)
        self.cache.length += count
        return logits_1W, next_hidden_1H

    def _pass(self, ids_1T: Tensor, hidden_1TH: Tensor, held: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        rotary, slots = self.cache.slots(held, ids_1T.shape[1])
        normed, next_hidden = self.head(ids_1T, hidden_1TH, rotary, slots)
        normed_1H, next_hidden_1H = (x.index_select(1, last.unsqueeze(0)).squeeze(1) for x in (normed, next_hidden))
        return self.logits(normed_1H), next_hidden_1H
