"""A draft model drafts for several sequences at once: one forward a step for all rows.

Shapes: B rows, T positions of one step, H hidden size, K draft tokens, W tokens both vocabularies hold.
"""

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specdistill.decoding.kv_cache import RaggedKVCache
from specdistill.decoding.proposer import BatchState, Proposal
from specdistill.decoding.sampling import Generators, Sampling, draw, uniforms
from specdistill.decoding.transformers_models import TransformersBatch, check_batchable, last_of, padded
from specdistill.methods.draft_model.proposer import DraftModelProposer, LlamaLayers


class LlamaBatch:
    """`TransformersBatch` of a plain Llama, faster."""

    def __init__(self, layers: LlamaLayers, num_rows: int) -> None:
        self.stack = layers.stack
        self.cache = RaggedKVCache(num_rows, len(self.stack.layers), self.stack.rotary, layers.device)

    def __call__(self, ids_BT: Tensor, counts: Sequence[int]) -> Tensor:
        hidden: Tensor = self.stack(ids_BT, self.cache.extend(counts), self.cache)
        return hidden


class NoLayers:
    """What a row of `BatchDraftModel` has for layers: the batch's, which are told once for all rows what to forget."""

    def restart(self) -> None:
        pass

    def crop(self, count: int) -> None:
        pass


class BatchDraftModel:
    """`DraftModelProposer` for B sequences: each row has one, which reads its sequence and says what to feed; the passes are shared.

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
        distributions: list[Tensor] = []
        num_passes, num_drafted = [0] * num_rows, [0] * num_rows
        for step in range(max(steps)):
            logits_BW = self._logits(last_of(self.layers(next_ids, counts), counts))
            if uniforms_KB is None:
                index_B = logits_BW.argmax(-1)
            else:
                distributions.append(sampling.probabilities(logits_BW))
                index_B = draw(distributions[-1], uniforms_KB[step])
            chosen.append(index_B)
            for row in range(num_rows):
                if counts[row]:
                    num_passes[row] += 1
                    sure = not draft._is_unsure(logits_BW[row : row + 1], sampling)
                    num_drafted[row] += sure
                    counts[row] = int(sure and step + 1 < steps[row])
            if not any(counts):
                break
            next_ids = (index_B if draft.shared_vocabulary is None else draft._draft_ids_W[index_B]).unsqueeze(1)
        return [
            row._proposal(
                [index[b : b + 1] for index in chosen[:drafted]],
                [distribution[b : b + 1] for distribution in distributions[:drafted]],
                passes - 1,
            )
            for b, (row, drafted, passes) in enumerate(zip(self.rows, num_drafted, num_passes, strict=True))
        ]

    def keep(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
        self.layers.cache.keep(rows)

    def _read(self, sequences: Sequence[Sequence[int]], k: int) -> tuple[list[list[int]], list[int]]:
        """What each row feeds first, and how many tokens it can draft; nothing and 0 where its sequence has none of the draft's tokens."""
        feeds: list[list[int]] = []
        steps: list[int] = []
        for row, sequence in zip(self.rows, sequences, strict=True):
            unchanged = row._read(sequence)
            steps.append(row._make_room(k) if row._context else 0)
            feeds.append(row._uncached(unchanged) if row._context else [])
        return feeds, steps

    def _logits(self, hidden_BH: Tensor) -> Tensor:
        """[B, W]"""
        logits_BV: Tensor = self.proposer.head(hidden_BH)
        return logits_BV if self.proposer.shared_vocabulary is None else logits_BV[:, self.proposer._draft_ids_W]
