"""A lookup in front of a draft: where the last tokens occurred before, what followed them is drafted; elsewhere the draft drafts.

A cascade: a small head copies badly, and a lookup does nothing else and costs no forward pass, so each drafts what it is better at
(SuffixDecoding, arXiv 2411.04975, has EAGLE behind its suffix tree in the same way). An agreement of one token says less than the draft
does: by default the lookup asks for two and more.

Its output is the target's, whichever drafts. What was looked up is certain (one-hot), and whether it is used depends on committed tokens
alone, so above temperature 0 each round is verified by the rule of the one that drafted, and every token follows the target's distribution.
"""

from collections.abc import Sequence

import torch

from specdistill.decoding.proposer import (
    DecodingState,
    PausingProposer,
    Proposal,
    Proposer,
    Remembering,
    TreeProposer,
)
from specdistill.decoding.sampling import Generators, Sampling
from specdistill.decoding.tree import TreeShape, tree_shape
from specdistill.errors import UserError
from specdistill.recipe.sections import LookupFirstConfig


class LookupFirstProposer(PausingProposer):
    """A chain of K tokens that were looked up, or a chain or a tree of the draft's own size.

    The draft runs in a round in which a row needs it, for all rows: they share its passes.

    lookup: a proposer that reads tokens alone. Raises UserError for a tree of a draft that drafts chains only.
    """

    def __init__(self, draft: Proposer, lookup: Proposer, config: LookupFirstConfig) -> None:
        self.tree = tree_shape(config.draft_tree) if config.draft_tree else None
        if self.tree and not isinstance(draft, TreeProposer):
            got = "a tree of a draft that drafts chains only"
            raise UserError("eval.lookup_first.draft_tree", got=got, expected="null")
        super().__init__(draft, lookup_first=config.described)
        self.lookup, self.levels = lookup, config.levels
        self.vocabulary = None  # a lookup proposes any token

    def draws(self, sampling: Sampling, tree: TreeShape | None) -> bool:
        return self.draft.draws(sampling, self.tree)

    def passes(self, k: int) -> int:
        """None in a round of a lookup, which alone goes further than the draft may."""
        return self.draft.passes(k) if k <= self.levels else 0

    def remember(self, outputs: Sequence[Sequence[int]]) -> None:
        if isinstance(self.lookup, Remembering):
            self.lookup.remember(outputs)

    def begin(self, max_lengths: Sequence[int]) -> None:
        super().begin(max_lengths)
        self.lookup.begin(max_lengths)

    def propose(
        self, state: DecodingState, k: int, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        found = self.lookup.propose(state, k, sampling, generators)
        if all(proposal.tokens for proposal in found):
            self.pause(state)
            return found
        read, levels = self.resume(state), min(k, self.levels)
        # A row whose tokens were looked up draws none of its own numbers for the draft's.
        drawn = [
            torch.Generator() if proposal.tokens else generator
            for proposal, generator in zip(found, generators, strict=True)
        ]
        if self.tree:
            assert isinstance(self.draft, TreeProposer)
            drafted = self.draft.propose_tree(read, self.tree.cut(levels), sampling, drawn)
        else:
            drafted = self.draft.propose(read, levels, sampling, drawn)
        return [
            looked_up if looked_up.tokens else own
            for looked_up, own in zip(found, drafted, strict=True)
        ]

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self.lookup.keep(rows)
