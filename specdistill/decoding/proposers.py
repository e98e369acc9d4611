"""Proposers: who guesses the next tokens. Each keeps what it needs between rounds and is told what was committed.

Shapes: D target hidden size, F freshly committed positions, K drafted tokens, V vocabulary.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from specdistill.decoding.cache import DraftCache
from specdistill.decoding.sampling import Sampling, draw
from specdistill.drafts.eagle3 import Eagle3Draft


@dataclass
class DecodingState:
    """The text so far, as a proposer sees it.

    token_ids: prompt and emitted tokens. The target has processed all but the last.
    fresh_aux: auxiliary features [1, F, D] of the F positions processed since the last proposal; empty when none were asked for.
    """

    token_ids: list[int]
    fresh_aux: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens [K] and the laws [K, V] they were drawn from; None where each is a certain guess (one-hot)."""

    tokens: list[int]
    probabilities: Tensor | None = None


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


@dataclass
class NgramProposer:
    """Prompt lookup: what followed the last occurrence of the current n-gram, longest n first. Nothing to train."""

    max_ngram: int = 3
    min_ngram: int = 1
    aux_layers: tuple[int, ...] = ()
    num_parameters: int = 0
    num_bytes: int = 0
    _follows: dict[tuple[int, ...], int] = field(default_factory=dict)  # n-gram -> index of the token after its last occurrence
    _indexed: int = 0

    def begin(self, max_length: int) -> None:
        self._follows.clear()
        self._indexed = 0

    def propose(self, state: DecodingState, k: int, sampling: Sampling, generator: torch.Generator | None) -> Proposal:
        tokens = state.token_ids
        for end in range(self._indexed + 1, len(tokens)):  # n-grams that end before the last token have a follower
            for n in range(self.min_ngram, min(self.max_ngram, end) + 1):
                self._follows[tuple(tokens[end - n : end])] = end
        self._indexed = len(tokens) - 1
        for n in range(min(self.max_ngram, len(tokens)), self.min_ngram - 1, -1):
            start = self._follows.get(tuple(tokens[-n:]))
            if start is not None:
                return Proposal(tokens[start : start + k])
        return Proposal([])


class Eagle3Proposer:
    """A chain of an EAGLE-3 head: true features for committed positions, its own hidden state for the drafted ones."""

    def __init__(self, draft: Eagle3Draft) -> None:
        self.draft = draft.eval()
        self.aux_layers = draft.config.aux_layers
        shipped = [p for name, p in draft.named_parameters() if draft.config.owns_embedding or name != "embed_tokens.weight"]
        self.num_parameters = sum(parameter.numel() for parameter in shipped)
        self.num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in shipped)
        self.target_ids_W = draft.target_ids_W
        self.cache: DraftCache

    def begin(self, max_length: int) -> None:
        weight = self.draft.fc.weight
        self.cache = DraftCache.allocate(self.draft.config, max_length, weight.dtype, weight.device)

    def propose(self, state: DecodingState, k: int, sampling: Sampling, generator: torch.Generator | None) -> Proposal:
        device = self.target_ids_W.device
        fresh = state.fresh_aux[0].shape[1]
        committed = len(state.token_ids) - 1  # pairs (x_{t+1}, g_t) exist for t < committed
        assert self.cache.length == committed - fresh, (self.cache.length, committed, fresh)
        next_ids = torch.tensor([state.token_ids[-fresh:]], device=device)
        hidden = self.draft.fuse(state.fresh_aux)
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        for step in range(k):
            normed, recycled = self.draft(next_ids, hidden, self.cache.next_positions(next_ids.shape[1]), self.cache)
            logits_W = self.draft.lm_head(normed[0, -1])
            if sampling.is_greedy:
                token = self.target_ids_W[logits_W.argmax()]
            else:
                law_V = torch.zeros(self.draft.config.vocab_size, device=device)
                law_V[self.target_ids_W] = sampling.probabilities(logits_W.unsqueeze(0)).squeeze(0)
                uniform = torch.rand(1, generator=generator, dtype=torch.float64).to(device)
                token = draw(law_V.unsqueeze(0), uniform)[0]
                laws.append(law_V)
            tokens.append(token)
            next_ids, hidden = token.view(1, 1), recycled[:, -1:]
            if step == 0:
                assert self.cache.length == committed
        self.cache.length = committed  # drafted positions used guessed features: forget them
        return Proposal(torch.stack(tokens).tolist(), torch.stack(laws) if laws else None)
