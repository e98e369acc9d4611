"""A head drafts: a chain or a tree, or chains for several sequences at once, from the target's features and its own hidden states.

Shapes: B rows, F freshly committed positions, H draft hidden size, K draft tokens, V target vocabulary, W draft vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdistill.decoding.kv_cache import DraftKVCache, RaggedKVCache
from specdistill.decoding.proposer import BatchProposer, BatchState, DecodingState, Proposal, Proposer
from specdistill.decoding.readers import cache_size
from specdistill.decoding.sampling import Generators, Sampling, draw, uniforms
from specdistill.decoding.transformers_models import last_of, padded
from specdistill.decoding.tree import DynamicTree, StaticTree, Step, candidates_are_drawn
from specdistill.methods.chains.compiled import CompiledSteps
from specdistill.methods.chains.head import Head
from specdistill.methods.layers import check_window
from specdistill.targets.frozen import FrozenTarget


def proposer_loader(load: Callable[..., Any]) -> Callable[..., Proposer]:
    """From a method's `load(folder, target, key=)` to its `load_proposer`: the head in the target's dtype, on its device."""

    def load_proposer(folder: Path, target: FrozenTarget, *, key: str) -> Proposer:
        return HeadProposer(load(folder, target, key=key).to(device=target.device, dtype=target.model.dtype))

    return load_proposer


class HeadProposer:
    """A chain or a tree of a head: true features for committed positions, its own hidden state for the drafted ones."""

    draws = staticmethod(candidates_are_drawn)
    depends_on_width = False

    def __init__(self, head: Head) -> None:
        module: Any = head
        self.head = head
        module.eval()
        self.aux_layers = head.aux_layers
        self.settings: dict[str, Any] = {}
        shipped = [parameter for name, parameter in module.named_parameters() if name not in head.shared]
        self.num_parameters = sum(parameter.numel() for parameter in shipped)
        self.num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in shipped)
        self.target_ids_W = head.target_ids_W
        self.vocabulary = frozenset(self.target_ids_W.tolist())
        config, self.device = head.config, shipped[0].device
        self.cache_options = (partial(head.rotary, shipped[0]), self.device, config.sliding_window)
        self.cache: DraftKVCache
        self.compiled = False
        self._graphs: dict[int, CompiledSteps] = {}  # by positions of the KV cache
        self.is_enough: Callable[[Tensor], bool] | None = None  # see `ConfidentProposer`

    def passes(self, k: int) -> int:
        return k

    def begin(self, max_length: int) -> None:
        if not self.compiled:
            self.cache = DraftKVCache(*self.cache_options)
            return
        size = cache_size(max_length)
        if size not in self._graphs:
            self._graphs[size] = CompiledSteps(self.head, DraftKVCache(*self.cache_options), size)
        self._graph = self._graphs[size]
        self.cache = self._graph.cache
        self.cache.length = 0

    def propose(self, state: DecodingState, k: int, sampling: Sampling, generator: torch.Generator | None) -> Proposal:
        next_ids, hidden, committed = self._fresh(state)

        def forward(next_ids_1T: Tensor, hidden_1TH: Tensor) -> tuple[Tensor, Tensor]:
            count = next_ids_1T.shape[1]
            if self.compiled and count <= 1 + k:  # not a prompt
                return self._graph.read(next_ids_1T, hidden_1TH, 1 if count == 1 else 1 + k)
            normed, next_hidden = self.head(next_ids_1T, hidden_1TH, self.cache.next_rotary(count), self.cache)
            return self.head.logits(normed[:, -1]), next_hidden[:, -1]

        (proposal,) = self.chains(forward, next_ids, hidden, k, sampling, [generator])
        self.cache.length = committed  # drafted positions used the head's own states: forget them
        return proposal

    def propose_tree(
        self, state: DecodingState, shape: StaticTree | DynamicTree, sampling: Sampling, generator: torch.Generator | None
    ) -> Proposal:
        check_window(self.head.config, shape.depth, key="eval.tree.depth")
        next_ids, hidden, committed = self._fresh(state)
        normed, next_hidden = self.head(next_ids, hidden, self.cache.next_rotary(next_ids.shape[1]), self.cache)
        next_hidden, step = next_hidden[:, -1:], Step.before(committed, self.device)

        def expand(index_T: Tensor, rows_T: Tensor) -> Tensor:
            nonlocal next_hidden, step
            step = step.descend(rows_T)
            next_ids, rotary = self.target_ids_W[index_T].unsqueeze(0), self.cache.level(step)
            normed, next_hidden = self.head(next_ids, next_hidden[:, rows_T], rotary, self.cache)
            logits_TW: Tensor = self.head.logits(normed[0])
            return logits_TW

        index_N, tree, probs_NW = shape.grow(self.head.logits(normed[:, -1]), expand, sampling, generator)
        self.cache.length = committed
        probs_NV = None if probs_NW is None else self._over_target_vocabulary(probs_NW)
        return Proposal(self.target_ids_W[index_N].tolist(), probs_NV, tree)

    def batched(self) -> BatchProposer:
        return BatchHead(self)

    def chains(
        self,
        forward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        next_ids: Tensor,
        hidden: Tensor,
        k: int,
        sampling: Sampling,
        generators: Generators,
    ) -> list[Proposal]:
        """Chains of K draft tokens, or as many as are enough, for B sequences, which continue next ids [B, F] and hidden states [B, F, H].

        forward: one draft step over such -> logits [B, W] and the next hidden state [B, H] at each row's last position.
        """
        check_window(self.head.config, k, key="eval.num_speculative_tokens")
        uniforms_BK = None if sampling.is_greedy else uniforms(k, generators).to(self.device)
        tokens: list[Tensor] = []
        distributions: list[Tensor] = []
        for step in range(k):
            logits_BW, hidden_BH = forward(next_ids, hidden)
            if uniforms_BK is None:
                token_B = self.target_ids_W[logits_BW.argmax(-1)]
            else:
                distributions.append(self._over_target_vocabulary(sampling.probabilities(logits_BW)))
                token_B = draw(distributions[-1], uniforms_BK[:, step])
            tokens.append(token_B)
            if self.is_enough and self.is_enough(sampling.confidence(logits_BW)):
                break
            next_ids, hidden = token_B.unsqueeze(1), hidden_BH.unsqueeze(1)
        probs_BKV = torch.stack(distributions, dim=1) if distributions else [None] * len(generators)
        return [Proposal(row, probs) for row, probs in zip(torch.stack(tokens, dim=1).tolist(), probs_BKV, strict=True)]

    def _fresh(self, state: DecodingState) -> tuple[Tensor, Tensor, int]:
        """What the first step reads: next tokens [1, F] and hidden states [1, F, H] of what was committed; and how much that is in all."""
        assert state.fresh is not None
        fresh = state.fresh.last_hidden.shape[1]
        committed = len(state.token_ids) - 1  # pairs (x_{t+1}, g_t) exist for t < committed
        assert self.cache.length == committed - fresh, (self.cache.length, committed, fresh)
        return torch.tensor([state.token_ids[-fresh:]], device=self.device), self.head.fuse(state.fresh), committed

    def _over_target_vocabulary(self, probs_TW: Tensor) -> Tensor:
        probs_TV = probs_TW.new_zeros(len(probs_TW), self.head.config.vocab_size)
        probs_TV[:, self.target_ids_W] = probs_TW
        return probs_TV


class BatchHead:
    """`HeadProposer` for B sequences: one forward a step for all rows."""

    def __init__(self, proposer: HeadProposer) -> None:
        self.proposer = proposer
        self.aux_layers = proposer.aux_layers
        self.cache: RaggedKVCache

    def begin(self, max_lengths: Sequence[int]) -> None:
        self.cache = RaggedKVCache(len(max_lengths), *self.proposer.cache_options)

    def propose(self, state: BatchState, k: int, sampling: Sampling, generators: Generators) -> list[Proposal]:
        head, counts = self.proposer.head, state.num_fresh
        committed = [len(ids) - 1 for ids in state.token_ids]
        assert self.cache.lengths == [length - count for length, count in zip(committed, counts, strict=True)]
        fresh_ids = padded([ids[-count:] for ids, count in zip(state.token_ids, counts, strict=True)], self.proposer.device)

        def forward(next_ids_BT: Tensor, hidden_BTH: Tensor) -> tuple[Tensor, Tensor]:
            new = counts if next_ids_BT is fresh_ids else [1] * len(counts)
            normed, next_hidden = head(next_ids_BT, hidden_BTH, self.cache.extend(new), self.cache)
            return head.logits(last_of(normed, new)), last_of(next_hidden, new)

        hidden = head.fuse(state.fresh.first(max(counts)))
        proposals = self.proposer.chains(forward, fresh_ids, hidden, k, sampling, generators)
        self.cache.truncate(committed)
        return proposals

    def keep(self, rows: Sequence[int]) -> None:
        self.cache.keep(rows)
