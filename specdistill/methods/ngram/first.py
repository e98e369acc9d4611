"""N-gram lookup in front of a draft: where the last tokens occurred before, what followed them is drafted; elsewhere the draft drafts.

A cascade: a small head copies badly, and a lookup does nothing else and costs no forward pass, so each drafts what it is better at
(SuffixDecoding, arXiv 2411.04975, has EAGLE behind its suffix tree in the same way). An agreement of one token says less than the draft
does: the lookup asks for two and more.
"""

from dataclasses import replace
from typing import Any

from specdistill.decoding.proposer import BatchProposer, DecodingState, Proposal, Proposer, TreeProposer
from specdistill.decoding.sampling import Random, Sampling
from specdistill.decoding.tree import TreeShape, tree_shape
from specdistill.errors import UserError
from specdistill.methods.ngram.config import LookupFirstConfig
from specdistill.methods.ngram.method import NgramProposer
from specdistill.targets.frozen import Features


class LookupFirstProposer:
    """A chain of K tokens that were looked up, or a chain or a tree of the draft's own size. Its output is the target's, whichever drafts.

    Raises UserError for a tree of a draft that drafts chains only.
    """

    vocabulary: None = None  # a lookup proposes any token

    def __init__(self, draft: Proposer, config: LookupFirstConfig) -> None:
        self.tree = tree_shape(**vars(config.draft_tree)) if config.draft_tree else None
        if self.tree and not isinstance(draft, TreeProposer):
            raise UserError("lookup_first.draft_tree", got="a tree of a draft that drafts chains only", expected="null")
        self.draft = draft
        self.lookup = NgramProposer(config.min, config.max)
        self.levels = config.levels
        self.aux_layers, self.depends_on_width = draft.aux_layers, draft.depends_on_width
        self.num_parameters, self.num_bytes = draft.num_parameters, draft.num_bytes
        self.settings: dict[str, Any] = {
            **draft.settings,
            "lookup_first": [config.min, config.max],
            **({"draft_tree": self.tree.settings} if self.tree else {"draft_tokens": config.draft_tokens}),
        }
        self._unread: list[Features] = []  # of positions that were committed since the draft drafted last

    def draws(self, sampling: Sampling, tree: TreeShape | None) -> bool:
        return self.draft.draws(sampling, self.tree)

    def passes(self, k: int) -> int:
        """None in a round of a lookup, which alone goes further than the draft may."""
        return self.draft.passes(k) if k <= self.levels else 0

    def begin(self, max_length: int) -> None:
        self.draft.begin(max_length)
        self.lookup.begin(max_length)
        self._unread = []

    def propose(self, state: DecodingState, k: int, sampling: Sampling, generator: Random) -> Proposal:
        assert state.fresh is not None
        found = self.lookup.propose(state, k, sampling, generator)
        if found.tokens:
            # A copy: a compiled target's next pass may write over its features.
            self._unread.append(Features.joined([state.fresh]))
            return found
        fresh, self._unread = Features.joined([*self._unread, state.fresh]), []
        read, levels = replace(state, fresh=fresh), min(k, self.levels)
        if self.tree is None:
            return self.draft.propose(read, levels, sampling, generator)
        assert isinstance(self.draft, TreeProposer)
        return self.draft.propose_tree(read, self.tree.cut(levels), sampling, generator)

    def batched(self) -> BatchProposer:
        raise UserError("batch_size", got="more than 1 with a lookup in front of a draft", expected="1")  # not built
