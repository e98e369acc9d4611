"""N-gram look-up in front of a draft: where the last tokens occurred before, what followed them is drafted; elsewhere the draft drafts.

A cascade: a small head copies badly, and a look-up does nothing else and costs no forward pass, so each drafts what it is better at
(SuffixDecoding, arXiv 2411.04975, has EAGLE behind its suffix tree in the same way). An agreement of one token says less than the draft
does: look-up asks for two and more.
"""

from dataclasses import replace
from typing import Any

from specdistill.decoding.proposer import BatchProposer, DecodingState, Proposal, Proposer
from specdistill.decoding.sampling import Random, Sampling
from specdistill.decoding.tree import TreeShape
from specdistill.errors import UserError
from specdistill.methods.ngram.config import LookupFirst
from specdistill.methods.ngram.method import NgramProposer
from specdistill.targets.frozen import Features


class LookupFirstProposer:
    """Chains: of K tokens that were looked up, or of the draft's own length. Its output is the target's, whichever of them drafts."""

    vocabulary: None = None  # a look-up proposes any token

    def __init__(self, draft: Proposer, config: LookupFirst) -> None:
        self.draft = draft
        self.lookup = NgramProposer(config.min, config.max)
        self.draft_tokens = config.draft_tokens
        self.aux_layers = draft.aux_layers
        self.num_parameters, self.num_bytes = draft.num_parameters, draft.num_bytes
        self.settings: dict[str, Any] = {
            **draft.settings,
            "lookup_first": [config.min, config.max],
            "draft_tokens": self.draft_tokens,
        }
        self._unread: list[Features] = []  # of positions that were committed since the draft drafted last

    def draws(self, sampling: Sampling, tree: TreeShape | None) -> bool:
        return self.draft.draws(sampling, tree)

    def passes(self, k: int) -> int:
        """None in a round of a look-up, which alone gives more tokens than the draft may."""
        return self.draft.passes(k) if k <= self.draft_tokens else 0

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
        return self.draft.propose(replace(state, fresh=fresh), min(k, self.draft_tokens), sampling, generator)

    def batched(self) -> BatchProposer:
        raise UserError("batch_size", got="more than 1 with a look-up in front of a draft", expected="1")  # not built
