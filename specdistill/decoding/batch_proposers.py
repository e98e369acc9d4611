"""Proposers for batches: heads and draft models take a step for all rows in one forward, whatever else there is drafts row by row.

Each is made of the proposer that drafts for one text, and guesses what that one would: only rounding may differ.

Shapes: B rows, F freshly committed positions of the row that has most, H draft hidden size, K drafted tokens, V target vocabulary,
W draft vocabulary.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from specdistill.decoding.batch_cache import RaggedCache
from specdistill.decoding.batch_layers import LlamaBatch, TransformersBatch, check_batchable, last_of, padded
from specdistill.decoding.draft_model import DraftModelProposer, LlamaLayers
from specdistill.decoding.proposers import DecodingState, HeadProposer, Proposal, Proposer
from specdistill.decoding.sampling import Sampling, draw
from specdistill.drafts.layers import check_window
from specdistill.targets.frozen import Features

Generators = Sequence[torch.Generator | None]


@dataclass
class BatchState:
    """The texts so far, as a proposer sees them: `DecodingState` of B rows.

    token_ids: of each row. fresh: features [B, F, D], of which the first num_fresh[b] of row b count.
    """

    token_ids: list[list[int]]
    fresh: Features
    num_fresh: list[int]


class BatchProposer(Protocol):
    aux_layers: tuple[int, ...]

    def begin(self, max_lengths: Sequence[int]) -> None:
        """Forget the last texts; row b of the next ones has at most max_lengths[b] tokens, drafted ones included."""
        ...

    def propose(self, state: BatchState, k: int, sampling: Sampling, generators: Generators) -> list[Proposal]:
        """Guess up to k tokens that follow each row; row b draws from generators[b] alone, as much as it would on its own."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Forget all rows but these."""
        ...


def batched(proposer: Proposer) -> BatchProposer:
    """The proposer for several texts at once. Raises UserError for a draft model that cannot hold several."""
    if isinstance(proposer, HeadProposer):
        return BatchHead(proposer)
    if isinstance(proposer, DraftModelProposer):
        return BatchDraftModel(proposer)
    return RowByRow(proposer)


def uniforms(count: int, generators: Generators) -> Tensor:
    """[B, count] in [0, 1), each row from its own generator."""
    return torch.stack([torch.rand(count, generator=generator, dtype=torch.float64) for generator in generators])


class BatchHead:
    """`HeadProposer` for B texts."""

    def __init__(self, proposer: HeadProposer) -> None:
        module: Any = proposer.head
        self.head = proposer.head
        self.aux_layers = proposer.aux_layers
        self.target_ids_W = proposer.target_ids_W
        self._like = next(tensor for name, tensor in module.named_parameters() if name not in self.head.shared)
        self.cache: RaggedCache

    def begin(self, max_lengths: Sequence[int]) -> None:
        config, rotary = self.head.config, partial(self.head.rotary, self._like)
        self.cache = RaggedCache(len(max_lengths), config.num_layers, rotary, self._like.device, config.sliding_window)

    def propose(self, state: BatchState, k: int, sampling: Sampling, generators: Generators) -> list[Proposal]:
        check_window(self.head.config, k, key="eval.num_speculative_tokens")
        device, counts = self._like.device, state.num_fresh
        committed = [len(text) - 1 for text in state.token_ids]  # pairs (x_{t+1}, g_t) exist for t < committed
        assert self.cache.lengths == [length - count for length, count in zip(committed, counts, strict=True)]
        uniforms_KB = None if sampling.is_greedy else uniforms(k, generators).to(device).T
        next_ids = padded([text[-count:] for text, count in zip(state.token_ids, counts, strict=True)], device)
        hidden = self.head.fuse(state.fresh.first(max(counts)))
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        for step in range(k):
            normed, recycled = self.head(next_ids, hidden, self.cache.extend(counts), self.cache)
            logits_BW = self.head.lm_head(last_of(normed, counts))
            if uniforms_KB is None:
                token_B = self.target_ids_W[logits_BW.argmax(-1)]
            else:
                law_BV = torch.zeros(len(counts), self.head.config.vocab_size, device=device)
                law_BV[:, self.target_ids_W] = sampling.probabilities(logits_BW)
                token_B = draw(law_BV, uniforms_KB[step])
                laws.append(law_BV)
            tokens.append(token_B)
            next_ids, hidden = token_B.unsqueeze(1), last_of(recycled, counts).unsqueeze(1)
            counts = [1] * len(counts)
        self.cache.truncate(committed)  # drafted positions used guessed features: forget them
        law_BKV = torch.stack(laws, dim=1) if laws else [None] * len(counts)
        return [Proposal(row, law) for row, law in zip(torch.stack(tokens, dim=1).tolist(), law_BKV, strict=True)]

    def keep(self, rows: Sequence[int]) -> None:
        self.cache.keep(rows)


class NoLayers:
    """What a row of `BatchDraftModel` has for layers: the batch's, which are told once for all rows what to forget."""

    def restart(self) -> None:
        pass

    def crop(self, count: int) -> None:
        pass


class BatchDraftModel:
    """`DraftModelProposer` for B texts: each row has one, which reads its text and says what to feed; the passes are shared.

    Rows that stop early, or have no more room in the draft's context, are padded until the others are done.
    """

    aux_layers: tuple[int, ...] = ()

    def __init__(self, proposer: DraftModelProposer) -> None:
        if not isinstance(proposer.layers, LlamaLayers):
            check_batchable(proposer.draft, "the draft")
        self.proposer = proposer
        self.rows: list[Any] = []  # `DraftModelProposer`s with `NoLayers`
        self.layers: LlamaBatch | TransformersBatch

    def begin(self, max_lengths: Sequence[int]) -> None:
        self.rows = [copy.copy(self.proposer) for _ in max_lengths]
        for row, max_length in zip(self.rows, max_lengths, strict=True):
            row.layers = NoLayers()
            row.begin(max_length)
        layers = self.proposer.layers
        if isinstance(layers, LlamaLayers):
            self.layers = LlamaBatch(layers, len(self.rows))
        else:
            self.layers = TransformersBatch(self.proposer.draft, len(self.rows))

    def propose(self, state: BatchState, k: int, sampling: Sampling, generators: Generators) -> list[Proposal]:
        draft, num_rows = self.proposer, len(self.rows)
        device = draft.draft.device
        uniforms_KB = None if sampling.is_greedy else uniforms(k, generators).to(device).T
        feeds, steps = self._read(state.token_ids, k)
        self.layers.cache.truncate([len(row._cached) - len(feed) for row, feed in zip(self.rows, feeds, strict=True)])
        counts, next_ids = [len(feed) for feed in feeds], padded(feeds, device)
        chosen: list[Tensor] = []  # [B] each, indices into the W tokens
        laws: list[Tensor] = []
        num_passes, num_drafted = [0] * num_rows, [0] * num_rows
        for step in range(max(steps)):
            logits_BW = self._logits(last_of(self.layers(next_ids, counts), counts))
            if uniforms_KB is None:
                index_B = logits_BW.argmax(-1)
            else:
                laws.append(sampling.probabilities(logits_BW))
                index_B = draw(laws[-1], uniforms_KB[step])
            chosen.append(index_B)
            for row in range(num_rows):
                if counts[row]:
                    num_passes[row] += 1
                    sure = not draft._is_unsure(logits_BW[row : row + 1], sampling)
                    num_drafted[row] += sure
                    counts[row] = int(sure and step + 1 < steps[row])
            if not any(counts):
                break
            next_ids = (index_B if draft.vocabulary is None else draft._draft_ids_W[index_B]).unsqueeze(1)
        return [
            row._proposal(
                [index[b : b + 1] for index in chosen[:drafted]], [law[b : b + 1] for law in laws[:drafted]], passes - 1
            )
            for b, (row, drafted, passes) in enumerate(zip(self.rows, num_drafted, num_passes, strict=True))
        ]

    def keep(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
        self.layers.cache.keep(rows)

    def _read(self, texts: Sequence[Sequence[int]], k: int) -> tuple[list[list[int]], list[int]]:
        """What each row feeds first, and how many tokens it can draft; nothing and 0 where none of its text is in the draft's tokens."""
        feeds: list[list[int]] = []
        steps: list[int] = []
        for row, text in zip(self.rows, texts, strict=True):
            unchanged = row._read(text)
            steps.append(row._make_room(k) if row._context else 0)
            feeds.append(row._uncached(unchanged) if row._context else [])
        return feeds, steps

    def _logits(self, hidden_BH: Tensor) -> Tensor:
        """[B, W]"""
        logits_BV: Tensor = self.proposer.head(hidden_BH)
        return logits_BV if self.proposer.vocabulary is None else logits_BV[:, self.proposer._draft_ids_W]


class RowByRow:
    """Any other proposer: a copy of it for each row."""

    def __init__(self, proposer: Proposer) -> None:
        assert not proposer.aux_layers, "a proposer that reads features drafts for one text"
        self.proposer = proposer
        self.aux_layers = proposer.aux_layers
        self.rows: list[Proposer] = []

    def begin(self, max_lengths: Sequence[int]) -> None:
        self.rows = [copy.copy(self.proposer) for _ in max_lengths]
        for row, max_length in zip(self.rows, max_lengths, strict=True):
            row.begin(max_length)

    def propose(self, state: BatchState, k: int, sampling: Sampling, generators: Generators) -> list[Proposal]:
        return [
            row.propose(DecodingState(text), k, sampling, generator)
            for row, text, generator in zip(self.rows, state.token_ids, generators, strict=True)
        ]

    def keep(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
