"""A head drafts: chains or trees, for one sequence or several, from the target's features and its own hidden states.

Shapes: B rows, T positions of a pass, F freshly committed positions, H draft hidden size, K draft tokens, V target vocabulary, W draft
vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdistill.decoding.kv_cache import DraftKVCache
from specdistill.decoding.proposer import DecodingState, Proposal
from specdistill.decoding.readers import cache_size
from specdistill.decoding.sampling import Generators, Sampling
from specdistill.decoding.transformers_models import last_of, padded
from specdistill.decoding.tree import Step, TreeShape, at_nodes
from specdistill.methods.chains.head import Head
from specdistill.methods.feature_proposer import FeatureProposer
from specdistill.methods.layers import check_window
from specdistill.targets.frozen import allow_graphs


class CompiledSteps:
    """A head's passes over few tokens as graphs (`eval.compile`): one over K + 1 of them, which reads what was committed, and one over one.

    As the target's (specdistill.decoding.readers): the KV cache of `size` positions is allocated whole, after a prompt was read into it,
    uncompiled; the graph is told how many positions are held, and fewer committed tokens are padded, whose slots the next pass writes over.
    """

    def __init__(self, head: Head, cache: DraftKVCache, size: int) -> None:
        self.head, self.logits, self.cache = head, head.logits, cache
        cache.allocate(size)
        allow_graphs()
        mode = "reduce-overhead" if self.logits.linear.weight.is_cuda else None
        self._graph = torch.compile(self._pass, fullgraph=True, dynamic=False, mode=mode)

    def read(self, next_ids_1T: Tensor, hidden_1TH: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Logits [1, W] and the next hidden state [1, H] after T <= `width` tokens; `width` is the pass's."""
        count, device = next_ids_1T.shape[1], next_ids_1T.device
        # Not padded views: a graph is made for each layout that it meets.
        ids, hidden = (
            next_ids_1T.new_zeros(1, width),
            hidden_1TH.new_zeros(1, width, hidden_1TH.shape[-1]),
        )
        ids[:, :count], hidden[:, :count] = next_ids_1T, hidden_1TH
        for buffer in self.cache.buffers if device.type == "cuda" else ():
            torch._dynamo.mark_static_address(buffer)  # which a CUDA graph may write to
        (length,) = self.cache.lengths
        held, last = (torch.tensor(number, device=device) for number in (length, count - 1))
        logits_1W, next_hidden_1H = self._graph(ids, hidden, held, last)
        self.cache.truncate([length + count])
        return logits_1W, next_hidden_1H

    def _pass(
        self, ids_1T: Tensor, hidden_1TH: Tensor, held: Tensor, last: Tensor
    ) -> tuple[Tensor, Tensor]:
        rotary, slots = self.cache.slots(held, ids_1T.shape[1])
        normed, next_hidden = self.head(ids_1T, hidden_1TH, rotary, slots)
        normed_1H, next_hidden_1H = (
            x.index_select(1, last.unsqueeze(0)).squeeze(1) for x in (normed, next_hidden)
        )
        return self.logits(normed_1H), next_hidden_1H


class HeadProposer(FeatureProposer):
    """Chains or trees: true features for committed positions, the head's own hidden state for the drafted ones."""

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self.compiled = False  # whether passes for one sequence are graphs
        self._graphs: dict[int, CompiledSteps] = {}  # by positions of the KV cache
        self._graph: CompiledSteps | None = None

    def begin(self, max_lengths: Sequence[int]) -> None:
        self._graph = None
        if not (self.compiled and len(max_lengths) == 1):
            super().begin(max_lengths)
            return
        size = cache_size(*max_lengths)
        if size not in self._graphs:
            cache = DraftKVCache(1, self.rotary, self.device, self.config.sliding_window)
            self._graphs[size] = CompiledSteps(self.draft, cache, size)
        self._graph = self._graphs[size]
        self.cache = self._graph.cache
        self.cache.truncate([0])

    def propose(
        self, state: DecodingState, k: int, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        check_window(self.draft.config, k, key="eval.num_speculative_tokens")
        next_ids, hidden, committed = self._fresh(state)
        counts = state.num_fresh

        def next_logits(step: int, index_B: Tensor | None) -> tuple[Tensor, None]:
            nonlocal next_ids, hidden, counts
            if index_B is not None:
                next_ids, counts = self.in_target(index_B).unsqueeze(1), [1] * len(counts)
            logits_BW, hidden_BH = self._step(next_ids, hidden, counts, 1 + k)
            hidden = hidden_BH.unsqueeze(1)
            return logits_BW, None

        proposals = self.chains(k, sampling, generators, next_logits)
        self.cache.truncate(committed)  # drafted positions used the head's own states: forget them
        return proposals

    def propose_tree(
        self, state: DecodingState, shape: TreeShape, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        check_window(self.draft.config, shape.depth, key="eval.tree.depth")
        next_ids, hidden, committed = self._fresh(state)
        logits_BW, hidden_BH = self._step(next_ids, hidden, state.num_fresh, 0)
        hidden_BTH, step = hidden_BH.unsqueeze(1), Step.before(committed, self.device)

        def expand(index_BT: Tensor, rows_BT: Tensor) -> Tensor:
            nonlocal hidden_BTH, step
            step = step.descend(rows_BT)
            rotary, above_BTH = self.cache.level(step), at_nodes(hidden_BTH, rows_BT)
            normed, hidden_BTH = self.draft(self.in_target(index_BT), above_BTH, rotary, self.cache)
            return self.draft.logits(normed)

        drafts = shape.grow(logits_BW, expand, sampling, generators)
        self.cache.truncate(committed)
        return [self.proposal(index_N, probs_NW, tree) for index_N, tree, probs_NW in drafts]

    def _step(
        self, next_ids_BT: Tensor, hidden_BTH: Tensor, counts: Sequence[int], width: int
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, W] and the next hidden state [B, H] at each row's last position. width: of the wider graph; a prompt has none."""
        if self._graph is not None and self.cache.lengths != [0] and max(counts) <= width:
            return self._graph.read(next_ids_BT, hidden_BTH, 1 if max(counts) == 1 else width)
        normed, next_hidden = self.draft(
            next_ids_BT, hidden_BTH, self.cache.extend(counts), self.cache
        )
        return self.draft.logits(last_of(normed, counts)), last_of(next_hidden, counts)

    def _fresh(self, state: DecodingState) -> tuple[Tensor, Tensor, list[int]]:
        """What the first step reads: next tokens [B, F] and hidden states [B, F, H] of what was committed; and how much that is in all."""
        counts, committed = (
            state.num_fresh,
            self.committed(state),
        )  # pairs (x_{t+1}, g_t) exist for t < committed
        next_ids = padded(
            [ids[-count:] for ids, count in zip(state.token_ids, counts, strict=True)], self.device
        )
        return next_ids, self.draft.fuse(state.fresh.first(max(counts))), committed
