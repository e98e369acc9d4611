"""Proposers: who guesses the next tokens. Each keeps what it needs between rounds and is told what was committed.

Shapes: D target hidden size, F freshly committed positions, K drafted tokens, V vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from specdistill.decoding.cache import DraftCache
from specdistill.decoding.sampling import Sampling, draw
from specdistill.decoding.tree import DynamicTree, StaticTree, Step, Tree
from specdistill.drafts.head import Head
from specdistill.drafts.layers import check_window
from specdistill.targets.frozen import Features


@dataclass
class DecodingState:
    """The text so far, as a proposer sees it.

    token_ids: prompt and emitted tokens. The target has processed all but the last.
    fresh: the target's features [1, F, D] of the F positions processed since the last proposal.
    """

    token_ids: list[int]
    fresh: Features | None = None


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens [K] and the laws [K, V] they were drawn from; None where each is a certain guess (one-hot).

    tree: whose nodes the tokens are, siblings drawn from one law without replacement; None for a chain.
    """

    tokens: list[int]
    probabilities: Tensor | None = None
    tree: Tree | None = None


class Proposer(Protocol):
    aux_layers: tuple[int, ...]
    num_parameters: int
    num_bytes: int

    def begin(self, max_length: int) -> None:
        """Forget the last text; the next one has at most `max_length` tokens, drafted ones included."""
        ...

    def propose(self, state: DecodingState, k: int, sampling: Sampling, generator: torch.Generator | None) -> Proposal:
        """Guess up to k tokens that follow `state.token_ids`."""
        ...


@runtime_checkable
class TreeProposer(Protocol):
    """A proposer that can also guess several ways at once."""

    def propose_tree(
        self, state: DecodingState, shape: StaticTree | DynamicTree, sampling: Sampling, generator: torch.Generator | None
    ) -> Proposal:
        """Guess a tree of tokens that follow `state.token_ids`; each of its levels is one draft step."""
        ...


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
        self.cache: DraftCache

    def begin(self, max_length: int) -> None:
        config, rotary = self.head.config, partial(self.head.rotary, self._like)
        self.cache = DraftCache(config.num_layers, rotary, self._like.device, config.sliding_window)

    def propose(self, state: DecodingState, k: int, sampling: Sampling, generator: torch.Generator | None) -> Proposal:
        check_window(self.head.config, k, key="eval.num_speculative_tokens")
        next_ids, hidden, committed = self._fresh(state)
        device = self.target_ids_W.device
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        for step in range(k):
            normed, recycled = self.head(next_ids, hidden, self.cache.next_rotary(next_ids.shape[1]), self.cache)
            logits_W = self.head.lm_head(normed[0, -1])
            if sampling.is_greedy:
                token = self.target_ids_W[logits_W.argmax()]
            else:
                law_V = self._over_target_vocabulary(sampling.probabilities(logits_W.unsqueeze(0)))[0]
                uniform = torch.rand(1, generator=generator, dtype=torch.float64).to(device)
                token = draw(law_V.unsqueeze(0), uniform)[0]
                laws.append(law_V)
            tokens.append(token)
            next_ids, hidden = token.view(1, 1), recycled[:, -1:]
            if step == 0:
                assert self.cache.length == committed
        self.cache.length = committed  # drafted positions used guessed features: forget them
        return Proposal(torch.stack(tokens).tolist(), torch.stack(laws) if laws else None)

    def propose_tree(
        self, state: DecodingState, shape: StaticTree | DynamicTree, sampling: Sampling, generator: torch.Generator | None
    ) -> Proposal:
        check_window(self.head.config, shape.depth, key="eval.tree.depth")
        next_ids, hidden, committed = self._fresh(state)
        normed, recycled = self.head(next_ids, hidden, self.cache.next_rotary(next_ids.shape[1]), self.cache)
        assert self.cache.length == committed
        recycled, step = recycled[:, -1:], Step.before(committed, self.target_ids_W.device)

        def expand(index_T: Tensor, rows_T: Tensor) -> Tensor:
            nonlocal recycled, step
            step = step.descend(rows_T)
            rotary, memory = self.cache.level(step)
            normed, recycled = self.head(self.target_ids_W[index_T].unsqueeze(0), recycled[:, rows_T], rotary, memory)
            logits_TW: Tensor = self.head.lm_head(normed[0])
            return logits_TW

        grown = shape.grow(self.head.lm_head(normed[:, -1]), expand, sampling, generator)
        self.cache.length = committed
        laws_NV = None if grown.laws_NW is None else self._over_target_vocabulary(grown.laws_NW)
        return Proposal(self.target_ids_W[grown.index_N].tolist(), laws_NV, grown.tree)

    def _fresh(self, state: DecodingState) -> tuple[Tensor, Tensor, int]:
        """What the first step reads: next tokens [1, F] and hidden states [1, F, H] of what was committed; and how much that is in all."""
        assert state.fresh is not None
        fresh = state.fresh.last_hidden.shape[1]
        committed = len(state.token_ids) - 1  # pairs (x_{t+1}, g_t) exist for t < committed
        assert self.cache.length == committed - fresh, (self.cache.length, committed, fresh)
        next_ids = torch.tensor([state.token_ids[-fresh:]], device=self.target_ids_W.device)
        return next_ids, self.head.fuse(state.fresh), committed

    def _over_target_vocabulary(self, laws_TW: Tensor) -> Tensor:
        laws_TV = laws_TW.new_zeros(len(laws_TW), self.head.config.vocab_size)
        laws_TV[:, self.target_ids_W] = laws_TW
        return laws_TV
