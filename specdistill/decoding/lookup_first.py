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
        self.tree = None
        if config.draft_tree:
            self.tree = build_tree_shape(config.draft_tree, "eval.lookup_first.draft_tree")
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
        """Return whether draft tokens are drawn at random, in rounds in which the draft proposes.

        Looked-up tokens are never drawn. The draft proposes in its own shape, `self.tree` or a
        chain, so the argument `tree` of the interface is not used.
        """
        return self.draft.has_drawn_candidates(sampling, self.tree)

    def count_passes(self, k: int) -> int:
        """Return how many forward passes of the draft a proposal of k tokens takes.

        For a tree, k is its number of levels. The draft proposes at most `self.levels` tokens or
        levels, so a larger k means a proposal of the lookup, which takes no pass. A proposal of at
        most `self.levels` is counted as one of the draft.
        """
        is_from_lookup = k > self.levels
        return 0 if is_from_lookup else self.draft.count_passes(k)

    def set_past_outputs(self, outputs: Sequence[Sequence[int]]) -> None:
        """Give the lookup the outputs of earlier requests to search.

        Does nothing if the lookup searches only the current sequence.
        """
        if isinstance(self.lookup, UsesPastOutputs):
            self.lookup.set_past_outputs(outputs)

    def begin(self, max_lengths: Sequence[int]) -> None:
        """Start new sequences in both proposers: the draft and the lookup.

        Args:
            max_lengths: the most tokens of each sequence, draft tokens included.
        """
        self.draft.begin(max_lengths)
        # For each row, the target features of the rounds in which the draft did not run.
        self._unread: list[list[Features]] = [[] for _ in max_lengths]
        self.lookup.begin(max_lengths)

    def propose(
        self, state: DecodingState, k: int, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        """Propose a looked-up chain for each row that has one, and ask the draft for other rows.

        Args:
            state: the sequences so far, with the target features of their latest tokens.
            k: the most draft tokens of a looked-up chain. The draft proposes at most `levels`
                tokens, or levels of a tree.
            sampling: temperature, top-p and top-k.
            generators: the random generator of each row.
        """
        # If every row has a looked-up chain, the draft does not run. Then the features of this
        # round are kept, and the draft reads them when it runs again.
        lookups = self.lookup.propose(state, k, sampling, generators)
        if all(proposal.tokens for proposal in lookups):
            self._keep_unread(state)
            return lookups

        # Otherwise the draft runs for all rows of the batch. In rows with a looked-up chain its
        # proposal is not used, so it draws from another generator there: each row must use the
        # same random numbers as it would alone.
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
        """Keep only the rows with these indices, and drop the finished ones."""
        self.draft.keep(rows)
        self._unread = [self._unread[row] for row in rows]
        self.lookup.keep(rows)

    def _keep_unread(self, state: DecodingState) -> None:
        """Store the features of this round's tokens, for the next time that the draft runs.

        `Features.rows` copies the features. They must be copied, because the next pass of a
        compiled target may overwrite the originals.
        """
        for row, (unread, count) in enumerate(zip(self._unread, state.num_fresh, strict=True)):
            unread.append(state.fresh.rows([row]).first(count))

    def _take_unread(self, state: DecodingState) -> DecodingState:
        """Return the state with the features of all tokens that the draft has not read yet.

        These are the fresh features, preceded by those stored while the draft did not run. The
        stored features are cleared.
        """
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
