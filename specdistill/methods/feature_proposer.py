"""The common code of proposers that run a neural draft.

`TokenProposer` drafts chains of tokens from a draft's logits. `FeatureProposer` adds the KV cache
of a draft that reads the target's features.

Shapes: B rows, K draft tokens, N nodes of a tree, V target vocabulary, W draft vocabulary.
"""

from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Generic

import torch
from torch import Tensor

from specdistill.decoding.kv_cache import DraftKVCache
from specdistill.decoding.proposer import DecodingState, Proposal
from specdistill.decoding.readers import CachedTarget
from specdistill.decoding.sampling import Generators, Sampling, draw_tokens, draw_uniforms
from specdistill.decoding.tree import Tree, has_drawn_candidates
from specdistill.methods.layers import DraftT, ModuleT


class TokenProposer(Generic[DraftT]):
    """A proposer that runs a neural draft.

    The draft takes one pass for each token, unless a subclass overrides `count_passes`.
    """

    # Defaults of the attributes that `Proposer` (specdistill.decoding.proposer) asks for: the draft
    # reads no auxiliary layers, drafts the same whatever K is, and does not replace the reader of
    # the target.
    aux_layers: tuple[int, ...] = ()
    depends_on_width = False
    has_drawn_candidates = staticmethod(has_drawn_candidates)
    reader: CachedTarget | None = None

    def __init__(
        self,
        draft: DraftT,
        target_ids_W: Tensor | None = None,
        target_vocab_size: int = 0,
        shared: Set[str] = frozenset(),
    ) -> None:
        """Prepare a draft for decoding.

        Args:
            draft: the draft.
            target_ids_W: the target's ids of the tokens that the draft has logits for; None if the
                ids are the same.
            target_vocab_size: V.
            shared: names of the draft's parameters that belong to the target.
        """
        self.draft = draft.eval()
        self.settings: dict[str, object] = {}

        # Count what is shipped with the draft, which excludes copies of the target's weights.
        shipped = [parameter for name, parameter in draft.named_parameters() if name not in shared]
        self.num_parameters = sum(parameter.numel() for parameter in shipped)
        self.num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in shipped)

        # The tokens of the target that the draft can propose; None for all of them.
        self.target_ids_W = target_ids_W
        self.target_vocab_size = target_vocab_size
        self.vocabulary = None if target_ids_W is None else frozenset(target_ids_W.tolist())

    def count_passes(self, k: int) -> int:
        """Return how many forward passes the draft runs for k draft tokens: one for each token."""
        return k

    def chains(
        self,
        k: int,
        sampling: Sampling,
        generators: Generators,
        next_logits: Callable[[int, Tensor | None], Tensor],
        lengths: Sequence[int] | None = None,
    ) -> list[Proposal]:
        """Draft a chain of tokens for each row, all rows together.

        Args:
            k: the most draft tokens of a chain.
            sampling: temperature, top-p and top-k.
            generators: the random generator of each row.
            next_logits: runs one step of the draft: (step, tokens) -> logits [B, W] for B rows and
                the draft's W tokens. `tokens` [B] are those that the previous step drafted, as
                indices among the W tokens; None in the first step.
            lengths: the number of draft tokens of each row, if some rows have room for fewer than
                k.

        Returns:
            The proposal of each row. It is empty for a row of length 0.
        """
        # All random numbers are drawn at the start, so that a row's numbers do not depend on the
        # lengths of other rows. Greedy drafting needs none.
        uniforms_BK = None if sampling.is_greedy else draw_uniforms(k, generators)
        lengths = lengths or [k] * len(generators)

        # Draft one token of every row in each step: the most probable one, or one that is drawn.
        tokens_by_step: list[Tensor] = []
        distributions: list[Tensor] = []
        for step in range(max(lengths)):
            logits_BW = next_logits(step, tokens_by_step[-1] if tokens_by_step else None)
            if uniforms_BK is None:
                tokens_by_step.append(logits_BW.argmax(-1))
            else:
                probs_BW = sampling.compute_probabilities(logits_BW)
                tokens_by_step.append(
                    draw_tokens(probs_BW, uniforms_BK[:, step].to(probs_BW.device))
                )
                distributions.append(probs_BW)

        # Cut each row's chain to its length. Verification needs the distributions that tokens were
        # drawn from, [K, W] for each row.
        proposals = [Proposal([])] * len(lengths)
        for b, length in enumerate(lengths):
            if length:
                index_K = torch.stack([index_B[b] for index_B in tokens_by_step[:length]])
                probs_KW = None
                if distributions:
                    probs_KW = torch.stack([probs_BW[b] for probs_BW in distributions[:length]])
                proposals[b] = self.build_proposal(index_K, probs_KW)
        return proposals

    def build_proposal(
        self, index_N: Tensor, probs_NW: Tensor | None, tree: Tree | None = None
    ) -> Proposal:
        """Build a proposal in the target's ids from tokens of the draft vocabulary.

        Args:
            index_N: the N draft tokens, as indices among the draft's W tokens.
            probs_NW: the distributions [N, W] that the tokens were drawn from; None if they were
                not drawn.
            tree: the tree that the tokens form; None for a chain.
        """
        # Spread distributions over the target's vocabulary: tokens that the draft does not have get
        # the probability 0.
        if self.target_ids_W is not None and probs_NW is not None:
            probs_NV = probs_NW.new_zeros(len(probs_NW), self.target_vocab_size)
            probs_NW = probs_NV.index_copy_(1, self.target_ids_W, probs_NW)
        return Proposal(self.map_to_target(index_N).tolist(), probs_NW, tree)

    def map_to_target(self, index: Tensor) -> Tensor:
        """Convert indices among the draft's tokens to token ids of the target."""
        return index if self.target_ids_W is None else self.target_ids_W[index]


class FeatureProposer(TokenProposer[ModuleT]):
    """A proposer whose draft reads the target's features and has a KV cache.

    The proposer reads the draft's `config`, `aux_layers`, `shared`, `target_ids_W`, `rotary` and
    `fc`, which every `DraftModule` has.
    """

    cache: DraftKVCache

    def __init__(self, draft: ModuleT) -> None:
        """Prepare a draft for decoding."""
        super().__init__(draft, draft.target_ids_W, draft.config.vocab_size, draft.shared)
        self.config = draft.config
        self.aux_layers = draft.aux_layers
        # Rotary tables are computed in the dtype and on the device of the draft's weights.
        self.rotary = partial(draft.rotary, draft.fc.weight)
        self.device = draft.fc.weight.device

    def begin(self, max_lengths: Sequence[int]) -> None:
        """Create an empty KV cache for a new batch of sequences.

        Args:
            max_lengths: the most tokens of each sequence. Only their number is used.
        """
        self.cache = DraftKVCache(
            len(max_lengths), self.rotary, self.device, self.config.sliding_window
        )

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only the rows with these indices in the KV cache; the other sequences have ended."""
        self.cache.keep(rows)

    def count_committed(self, state: DecodingState) -> list[int]:
        """Return how many tokens of each row the target has read: all but the last.

        Also checks that the draft's KV cache holds all of these tokens except the fresh ones: those
        that the target has read since the last proposal. The draft reads them after this check. For
        example, if a row has 10 tokens, the target has read 9. If 3 of the 9 are fresh, the cache
        must hold 6.

        Args:
            state: the sequences so far, with the number of fresh tokens of each (`num_fresh`).
        """
        # The target reads the last token of a row only in the next pass.
        num_committed = [len(ids) - 1 for ids in state.token_ids]
        num_cached = [
            count - fresh for count, fresh in zip(num_committed, state.num_fresh, strict=True)
        ]
        assert self.cache.lengths == num_cached, (
            self.cache.lengths,
            num_committed,
            state.num_fresh,
        )
        return num_committed
