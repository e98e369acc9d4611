"""A head drafts: a chain or a tree, from the target's features and its own hidden states.

Shapes: F freshly committed positions, H draft hidden size, K draft tokens, V target vocabulary, W draft vocabulary.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdistill.decoding.batch_proposer import BatchProposer
from specdistill.decoding.kv_cache import DraftKVCache
from specdistill.decoding.proposer import DecodingState, Proposal
from specdistill.decoding.sampling import Sampling, draw
from specdistill.decoding.tree import DynamicTree, StaticTree, Step, candidates_are_drawn
from specdistill.methods.heads.head import Head
from specdistill.methods.layers import check_window


class HeadProposer:
    """A chain or a tree of a head: true features for committed positions, its own hidden state for the drafted ones."""

    def __init__(self, head: Head) -> None:
        module: Any = head
        self.head = head
        module.eval()
        self.aux_layers = head.aux_layers
        shipped = [parameter for name, parameter in module.named_parameters() if name not in head.shared]
        self.num_parameters = sum(parameter.numel() for parameter in shipped)
        self.num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in shipped)
        self.target_ids_W = head.target_ids_W
        self._like = shipped[0]  # for dtype and device
        self.cache: DraftKVCache

    @property
    def vocabulary(self) -> frozenset[int]:
        return frozenset(self.target_ids_W.tolist())

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    def draws(self, sampling: Sampling, tree: StaticTree | DynamicTree | None) -> bool:
        return candidates_are_drawn(sampling, tree)

    def passes(self, k: int) -> int:
        return k

    def begin(self, max_length: int) -> None:
        config, rotary = self.head.config, partial(self.head.rotary, self._like)
        self.cache = DraftKVCache(config.num_layers, rotary, self._like.device, config.sliding_window)

    def propose(self, state: DecodingState, k: int, sampling: Sampling, generator: torch.Generator | None) -> Proposal:
        check_window(self.head.config, k, key="eval.num_speculative_tokens")
        next_ids, hidden, committed = self._fresh(state)
        device = self.target_ids_W.device
        tokens: list[Tensor] = []
        distributions: list[Tensor] = []
        for step in range(k):
            normed, next_hidden = self.head(next_ids, hidden, self.cache.next_rotary(next_ids.shape[1]), self.cache)
            logits_W = self.head.lm_head(normed[0, -1])
            if sampling.is_greedy:
                token = self.target_ids_W[logits_W.argmax()]
            else:
                probs_V = self._over_target_vocabulary(sampling.probabilities(logits_W.unsqueeze(0)))[0]
                uniform = torch.rand(1, generator=generator, dtype=torch.float64).to(device)
                token = draw(probs_V.unsqueeze(0), uniform)[0]
                distributions.append(probs_V)
            tokens.append(token)
            next_ids, hidden = token.view(1, 1), next_hidden[:, -1:]
            if step == 0:
                assert self.cache.length == committed
        self.cache.length = committed  # drafted positions used the head's own states: forget them
        return Proposal(torch.stack(tokens).tolist(), torch.stack(distributions) if distributions else None)

    def propose_tree(
        self, state: DecodingState, shape: StaticTree | DynamicTree, sampling: Sampling, generator: torch.Generator | None
    ) -> Proposal:
        check_window(self.head.config, shape.depth, key="eval.tree.depth")
        next_ids, hidden, committed = self._fresh(state)
        normed, next_hidden = self.head(next_ids, hidden, self.cache.next_rotary(next_ids.shape[1]), self.cache)
        assert self.cache.length == committed
        next_hidden, step = next_hidden[:, -1:], Step.before(committed, self.target_ids_W.device)

        def expand(index_T: Tensor, rows_T: Tensor) -> Tensor:
            nonlocal next_hidden, step
            step = step.descend(rows_T)
            rotary, kv_cache = self.cache.level(step)
            normed, next_hidden = self.head(self.target_ids_W[index_T].unsqueeze(0), next_hidden[:, rows_T], rotary, kv_cache)
            logits_TW: Tensor = self.head.lm_head(normed[0])
            return logits_TW

        grown = shape.grow(self.head.lm_head(normed[:, -1]), expand, sampling, generator)
        self.cache.length = committed
        probs_NV = None if grown.probs_NW is None else self._over_target_vocabulary(grown.probs_NW)
        return Proposal(self.target_ids_W[grown.index_N].tolist(), probs_NV, grown.tree)

    def batched(self) -> BatchProposer:
        from specdistill.methods.heads.batch_proposer import BatchHead  # which is made of this class

        return BatchHead(self)

    def _fresh(self, state: DecodingState) -> tuple[Tensor, Tensor, int]:
        """What the first step reads: next tokens [1, F] and hidden states [1, F, H] of what was committed; and how much that is in all."""
        assert state.fresh is not None
        fresh = state.fresh.last_hidden.shape[1]
        committed = len(state.token_ids) - 1  # pairs (x_{t+1}, g_t) exist for t < committed
        assert self.cache.length == committed - fresh, (self.cache.length, committed, fresh)
        next_ids = torch.tensor([state.token_ids[-fresh:]], device=self.target_ids_W.device)
        return next_ids, self.head.fuse(state.fresh), committed

    def _over_target_vocabulary(self, probs_TW: Tensor) -> Tensor:
        probs_TV = probs_TW.new_zeros(len(probs_TW), self.head.config.vocab_size)
        probs_TV[:, self.target_ids_W] = probs_TW
        return probs_TV
