"""A lookup in front of a draft.

If the last tokens occurred before, the lookup proposes what followed them. Otherwise the draft
proposes. Each does what it is better at: a small head copies badly, and a lookup only copies, and
costs no forward pass. SuffixDecoding (arXiv 2411.04975) combines its suffix tree with EAGLE in the
same way. A match of one token says less than the draft does, so by default the lookup needs two.

The output is the target's, whichever of the two proposes. Looked-up tokens are certain (one-hot),
and whether they are used depends only on committed tokens. So above temperature 0 each round is
verified by the rule of the one that proposed, and every token has the target's distribution.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from specdistill.common.errors import make_unused_key_error
from specdistill.decoding.proposer import (
    DecodingState,
    Proposal,
    Proposer,
    TreeProposer,
    UsesPastOutputs,
)
from specdistill.decoding.sampling import Generators, Sampling
from specdistill.decoding.tree import TreeShape, build_tree_shape
from specdistill.recipe.sections import LookupFirstConfig
from specdistill.targets.frozen import Features


class LookupFirstProposer:
    """Proposes a chain of K looked-up tokens, or else the draft's chain or tree.

    The draft runs in every round in which at least one row needs it, for all rows, because they
    share its passes. When it runs again, it first reads the tokens that were committed meanwhile.

    Args:
        lookup: a proposer that reads only tokens.

    Raises:
        UserError: for a tree, if the draft proposes only chains.
    """

    def __init__(self, draft: Proposer, lookup: Proposer, config: LookupFirstConfig) -> None:
        self.tree = build_tree_shape(config.draft_tree) if config.draft_tree else None
        if self.tree and not isinstance(draft, TreeProposer):
            raise make_unused_key_error(
                "eval.lookup_first.draft_tree",
                json.dumps(config.described["draft_tree"]),
                "this draft drafts chains only",
            )
        self.draft = draft
        self.lookup = lookup
        self.levels = config.levels
        self.aux_layers = draft.aux_layers
        self.depends_on_width = draft.depends_on_width
        self.reader = draft.reader
        self.num_parameters = draft.num_parameters
        self.num_bytes = draft.num_bytes
        self.settings: dict[str, Any] = {**draft.settings, "lookup_first": config.described}
        self.vocabulary = None  # a lookup proposes any token

    def has_drawn_candidates(self, sampling: Sampling, tree: TreeShape | None) -> bool:
        """Return whether the draft draws its tokens; looked-up tokens are certain."""
        return self.draft.has_drawn_candidates(sampling, self.tree)

    def count_passes(self, k: int) -> int:
        """Return the draft's forward passes in a round of k draft tokens or levels."""
        # A proposal with more levels than the draft may have was looked up.
        return self.draft.count_passes(k) if k <= self.levels else 0

    def set_past_outputs(self, outputs: Sequence[Sequence[int]]) -> None:
        """Replace the outputs of earlier requests that the lookup searches, if it searches any."""
        if isinstance(self.lookup, UsesPastOutputs):
            self.lookup.set_past_outputs(outputs)

    def begin(self, max_lengths: Sequence[int]) -> None:
        """Start new sequences with draft and lookup."""
        self.draft.begin(max_lengths)
        # Of each row, the features that the draft has not read yet.
        self._unread: list[list[Features]] = [[] for _ in max_lengths]
        self.lookup.begin(max_lengths)

    def propose(
        self, state: DecodingState, k: int, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        """Propose a looked-up chain for each row that has one, and the draft's for the others."""
        # The draft rests if every row was looked up.
        lookups = self.lookup.propose(state, k, sampling, generators)
        if all(proposal.tokens for proposal in lookups):
            self._keep_unread(state)
            return lookups

        # It drafts for all rows. A looked-up row must not use up random numbers of its own.
        draft_state = self._take_unread(state)
        draft_generators = []
        for proposal, generator in zip(lookups, generators, strict=True):
            draft_generators.append(torch.Generator() if proposal.tokens else generator)
        levels = min(k, self.levels)
        if self.tree:
            assert isinstance(self.draft, TreeProposer)
            drafts = self.draft.propose_tree(
                draft_state, self.tree.cut(levels), sampling, draft_generators
            )
        else:
            drafts = self.draft.propose(draft_state, levels, sampling, draft_generators)
        return [
            lookup if lookup.tokens else draft
            for lookup, draft in zip(lookups, drafts, strict=True)
        ]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        self.draft.keep(rows)
        self._unread = [self._unread[row] for row in rows]
        self.lookup.keep(rows)

    def _keep_unread(self, state: DecodingState) -> None:
        """Keep the fresh features for the draft.

        They are copied, because a compiled target's next pass may overwrite them.
        """
        for row, (unread, count) in enumerate(zip(self._unread, state.num_fresh, strict=True)):
            unread.append(state.fresh.rows([row]).first(count))

    def _take_unread(self, state: DecodingState) -> DecodingState:
        """Return the state with all unread features as its fresh ones; none are left unread."""
        if not any(self._unread):
            return state
        self._keep_unread(state)
        rows = [Features.concatenate(unread) for unread in self._unread]
        self._unread = [[] for _ in rows]
        return replace(
            state,
            fresh=Features.pad_and_stack(rows),
            num_fresh=[row.last_hidden.shape[1] for row in rows],
        )
