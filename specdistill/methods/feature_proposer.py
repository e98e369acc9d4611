"""What proposers have in common whose draft reads the target's features: its weights, its vocabulary and its KV cache.

Shapes: B rows, K draft tokens, T distributions, V target vocabulary, W draft vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdistill.decoding.kv_cache import DraftKVCache, RaggedKVCache, kv_cache_of
from specdistill.decoding.proposer import DecodingState, Proposal, Proposer
from specdistill.decoding.sampling import Generators, Sampling, draw, uniforms
from specdistill.decoding.tree import TreeDraft, candidates_are_drawn
from specdistill.targets.frozen import FrozenTarget


def proposer_loader(load: Callable[..., Any], proposer: Callable[[Any], Proposer]) -> Callable[..., Proposer]:
    """From a method's `load(folder, target, key=)` to its `load_proposer`: the draft in the target's dtype, on its device."""

    def load_proposer(folder: Path, target: FrozenTarget, *, key: str) -> Proposer:
        return proposer(load(folder, target, key=key).to(device=target.device, dtype=target.model.dtype))

    return load_proposer


class FeatureProposer:
    """draft: a module with `config`, `aux_layers`, `shared`, `target_ids_W` and `rotary`, as a `Head` has them."""

    draws = staticmethod(candidates_are_drawn)

    def __init__(self, draft: Any) -> None:
        draft.eval()
        self.config, self.aux_layers = draft.config, draft.aux_layers
        self.settings: dict[str, Any] = {}
        shipped = [parameter for name, parameter in draft.named_parameters() if name not in draft.shared]
        self.num_parameters = sum(parameter.numel() for parameter in shipped)
        self.num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in shipped)
        self.target_ids_W: Tensor = draft.target_ids_W
        self.vocabulary = frozenset(self.target_ids_W.tolist())
        self.rotary, self.device = partial(draft.rotary, shipped[0]), shipped[0].device
        self.cache: DraftKVCache | RaggedKVCache
        self.is_enough: Callable[[Tensor], bool] | None = None  # see `ConfidentProposer`

    def begin(self, max_lengths: Sequence[int]) -> None:
        self.cache = kv_cache_of(len(max_lengths), self.rotary, self.device, self.config.sliding_window)

    def keep(self, rows: Sequence[int]) -> None:
        assert isinstance(self.cache, RaggedKVCache)
        self.cache.keep(rows)

    def committed(self, state: DecodingState) -> list[int]:
        """Positions of each row that have features: all but the last. The cache holds them but for the fresh ones."""
        committed = [len(ids) - 1 for ids in state.token_ids]
        held = [length - count for length, count in zip(committed, state.num_fresh, strict=True)]
        assert self.cache.lengths == held, (self.cache.lengths, committed, state.num_fresh)
        return committed

    def chains(
        self,
        k: int,
        sampling: Sampling,
        generators: Generators,
        next_logits: Callable[[int, Tensor | None], tuple[Tensor, Tensor | None]],
    ) -> list[Proposal]:
        """Chains of k draft tokens, or as many as are enough.

        next_logits: (step, tokens [B] of the step before) -> logits [B, W], and the draft's own confidence [B] in the best token, if any.
        """
        uniforms_BK = None if sampling.is_greedy else uniforms(k, generators).to(self.device)
        tokens: list[Tensor] = []
        distributions: list[Tensor] = []
        for step in range(k):
            logits_BW, confidence_B = next_logits(step, tokens[-1] if tokens else None)
            if uniforms_BK is None:
                tokens.append(self.target_ids_W[logits_BW.argmax(-1)])
            else:
                distributions.append(self.over_target_vocabulary(sampling.probabilities(logits_BW)))
                tokens.append(draw(distributions[-1], uniforms_BK[:, step]))
            if self.is_enough and self.is_enough(sampling.confidence(logits_BW) if confidence_B is None else confidence_B):
                break
        probs_BKV = torch.stack(distributions, dim=1) if distributions else [None] * len(tokens[0])
        return [Proposal(row, probs) for row, probs in zip(torch.stack(tokens, dim=1).tolist(), probs_BKV, strict=True)]

    def trees(self, drafts: Sequence[TreeDraft]) -> list[Proposal]:
        """In the target's ids."""
        return [
            Proposal(
                self.target_ids_W[index_N].tolist(), None if probs_NW is None else self.over_target_vocabulary(probs_NW), tree
            )
            for index_N, tree, probs_NW in drafts
        ]

    def over_target_vocabulary(self, probs_TW: Tensor) -> Tensor:
        probs_TV = probs_TW.new_zeros(len(probs_TW), self.config.vocab_size)
        probs_TV[:, self.target_ids_W] = probs_TW
        return probs_TV
