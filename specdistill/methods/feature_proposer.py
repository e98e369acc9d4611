"""What proposers have in common: chains of tokens from a draft's logits; and of a draft that reads the target's features, its KV cache.

Shapes: B rows, K draft tokens, N nodes of a tree, V target vocabulary, W draft vocabulary.
"""

from collections.abc import Callable, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdistill.decoding.kv_cache import DraftKVCache
from specdistill.decoding.proposer import DecodingState, Proposal, Proposer
from specdistill.decoding.sampling import Generators, Sampling, draw, uniforms
from specdistill.decoding.tree import Tree, candidates_are_drawn
from specdistill.targets.frozen import FrozenTarget


def loaded_proposer(
    load: Callable[..., Any],
    proposer: Callable[[Any], Proposer],
    folder: Path,
    target: FrozenTarget,
    *,
    key: str,
) -> Proposer:
    """Of a draft that a method's `load(folder, target, key=)` gives: in the target's dtype, on its device."""
    return proposer(
        load(folder, target, key=key).to(device=target.device, dtype=target.model.dtype)
    )


class TokenProposer:
    """A draft that takes a pass for each token, unless `passes` says otherwise.

    target_ids_W: the target's ids of the tokens that the draft has logits of, None where they are its own; target_vocab_size: V. shared:
    names of parameters that are the target's.
    """

    aux_layers: tuple[int, ...] = ()
    depends_on_width = False
    draws = staticmethod(candidates_are_drawn)
    is_enough: Callable[[Tensor], bool] | None = None  # see `OnlineLengthProposer`
    reader: Any = None

    def __init__(
        self,
        draft: Any,
        target_ids_W: Tensor | None = None,
        target_vocab_size: int = 0,
        shared: Set[str] = frozenset(),
    ) -> None:
        self.draft = draft.eval()
        self.settings: dict[str, Any] = {}
        shipped = [parameter for name, parameter in draft.named_parameters() if name not in shared]
        self.num_parameters = sum(parameter.numel() for parameter in shipped)
        self.num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in shipped)
        self.target_ids_W, self.target_vocab_size = target_ids_W, target_vocab_size
        self.vocabulary = None if target_ids_W is None else frozenset(target_ids_W.tolist())

    def passes(self, k: int) -> int:
        return k

    def chains(
        self,
        k: int,
        sampling: Sampling,
        generators: Generators,
        next_logits: Callable[[int, Tensor | None], tuple[Tensor, Tensor | None]],
        lengths: Sequence[int] | None = None,
    ) -> list[Proposal]:
        """Chains of k draft tokens, or as many as are enough. lengths: of each row, where some have room for fewer.

        next_logits: (step, indices [B] into the W tokens of the step before) -> logits [B, W], and the draft's own confidence [B] in the
        best token, if any.
        """
        uniforms_BK = None if sampling.is_greedy else uniforms(k, generators)
        lengths = lengths or [k] * len(generators)
        chosen: list[Tensor] = []
        distributions: list[Tensor] = []
        for step in range(max(lengths)):
            logits_BW, confidence_B = next_logits(step, chosen[-1] if chosen else None)
            if uniforms_BK is None:
                chosen.append(logits_BW.argmax(-1))
            else:
                distributions.append(sampling.probabilities(logits_BW))
                chosen.append(draw(distributions[-1], uniforms_BK[:, step].to(logits_BW.device)))
            if self.is_enough and self.is_enough(
                sampling.confidence(logits_BW) if confidence_B is None else confidence_B
            ):
                break
        proposals = [Proposal([])] * len(lengths)
        for b, length in enumerate(lengths):
            if length:
                index_K = torch.stack([index_B[b] for index_B in chosen[:length]])
                probs_KW = (
                    torch.stack([probs_BW[b] for probs_BW in distributions[:length]])
                    if distributions
                    else None
                )
                proposals[b] = self.proposal(index_K, probs_KW)
        return proposals

    def proposal(
        self, index_N: Tensor, probs_NW: Tensor | None, tree: Tree | None = None
    ) -> Proposal:
        """In the target's ids."""
        if self.target_ids_W is not None and probs_NW is not None:
            probs_NV = probs_NW.new_zeros(len(probs_NW), self.target_vocab_size)
            probs_NW = probs_NV.index_copy_(1, self.target_ids_W, probs_NW)
        return Proposal(self.in_target(index_N).tolist(), probs_NW, tree)

    def in_target(self, index: Tensor) -> Tensor:
        """The target's ids of tokens among the W."""
        return index if self.target_ids_W is None else self.target_ids_W[index]


class FeatureProposer(TokenProposer):
    """draft: a module with `config`, `aux_layers`, `shared`, `target_ids_W`, `rotary` and `fc`, as a `Head` has them."""

    cache: DraftKVCache

    def __init__(self, draft: Any) -> None:
        super().__init__(draft, draft.target_ids_W, draft.config.vocab_size, draft.shared)
        self.config, self.aux_layers = draft.config, draft.aux_layers
        self.rotary, self.device = partial(draft.rotary, draft.fc.weight), draft.fc.weight.device

    def begin(self, max_lengths: Sequence[int]) -> None:
        self.cache = DraftKVCache(
            len(max_lengths), self.rotary, self.device, self.config.sliding_window
        )

    def keep(self, rows: Sequence[int]) -> None:
        self.cache.keep(rows)

    def committed(self, state: DecodingState) -> list[int]:
        """Positions of each row that have features: all but the last. The cache holds them but for the fresh ones."""
        committed = [len(ids) - 1 for ids in state.token_ids]
        held = [length - count for length, count in zip(committed, state.num_fresh, strict=True)]
        assert self.cache.lengths == held, (self.cache.lengths, committed, state.num_fresh)
        return committed
