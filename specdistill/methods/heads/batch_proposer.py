"""A head drafts for several sequences at once: one forward a step for all rows.

Shapes: B rows, H draft hidden size, K draft tokens, V target vocabulary, W draft vocabulary.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdistill.decoding.batch_kv_cache import RaggedKVCache
from specdistill.decoding.batch_models import last_of, padded
from specdistill.decoding.batch_proposer import BatchState, Generators, uniforms
from specdistill.decoding.proposer import Proposal
from specdistill.decoding.sampling import Sampling, draw
from specdistill.methods.heads.proposer import HeadProposer
from specdistill.methods.layers import check_window


class BatchHead:
    """`HeadProposer` for B sequences."""

    def __init__(self, proposer: HeadProposer) -> None:
        module: Any = proposer.head
        self.head = proposer.head
        self.aux_layers = proposer.aux_layers
        self.target_ids_W = proposer.target_ids_W
        self._like = next(tensor for name, tensor in module.named_parameters() if name not in self.head.shared)
        self.cache: RaggedKVCache

    def begin(self, max_lengths: Sequence[int]) -> None:
        config, rotary = self.head.config, partial(self.head.rotary, self._like)
        self.cache = RaggedKVCache(len(max_lengths), config.num_layers, rotary, self._like.device, config.sliding_window)

    def propose(self, state: BatchState, k: int, sampling: Sampling, generators: Generators) -> list[Proposal]:
        check_window(self.head.config, k, key="eval.num_speculative_tokens")
        device, counts = self._like.device, state.num_fresh
        committed = [len(text) - 1 for text in state.token_ids]  # pairs (x_{t+1}, g_t) exist for t < committed
        assert self.cache.lengths == [length - count for length, count in zip(committed, counts, strict=True)]
        uniforms_KB = None if sampling.is_greedy else uniforms(k, generators).to(device).T
        next_ids = padded([text[-count:] for text, count in zip(state.token_ids, counts, strict=True)], device)
        hidden = self.head.fuse(state.fresh.first(max(counts)))
        tokens: list[Tensor] = []
        distributions: list[Tensor] = []
        for step in range(k):
            normed, next_hidden = self.head(next_ids, hidden, self.cache.extend(counts), self.cache)
            logits_BW = self.head.lm_head(last_of(normed, counts))
            if uniforms_KB is None:
                token_B = self.target_ids_W[logits_BW.argmax(-1)]
            else:
                probs_BV = torch.zeros(len(counts), self.head.config.vocab_size, device=device)
                probs_BV[:, self.target_ids_W] = sampling.probabilities(logits_BW)
                token_B = draw(probs_BV, uniforms_KB[step])
                distributions.append(probs_BV)
            tokens.append(token_B)
            next_ids, hidden = token_B.unsqueeze(1), last_of(next_hidden, counts).unsqueeze(1)
            counts = [1] * len(counts)
        self.cache.truncate(committed)  # drafted positions used the head's own states: forget them
        probs_BKV = torch.stack(distributions, dim=1) if distributions else [None] * len(counts)
        return [
            Proposal(row, distribution)
            for row, distribution in zip(torch.stack(tokens, dim=1).tolist(), probs_BKV, strict=True)
        ]

    def keep(self, rows: Sequence[int]) -> None:
        self.cache.keep(rows)
