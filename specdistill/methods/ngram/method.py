"""The method `ngram`: `specdistill.methods.ngram.lookup` says what it drafts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdistill.decoding.proposer import BatchProposer, DecodingState, Proposal, Proposer, RowByRow
from specdistill.decoding.sampling import Sampling
from specdistill.decoding.tree import DynamicTree, StaticTree
from specdistill.methods import sizes
from specdistill.methods.contract import Implementation
from specdistill.methods.ngram.config import NgramConfig
from specdistill.methods.ngram.lookup import NgramLookup
from specdistill.statistics.theory import alpha_from_acceptance_length
from specdistill.targets.frozen import FrozenTarget

DEFAULTS = NgramConfig()
PUBLISHED = sizes.PublishedFigures(
    (alpha_from_acceptance_length(1.54, 10), alpha_from_acceptance_length(1.75, 10)),
    "AL 1.54 (Vicuna-33B) to 1.75 (Vicuna-7B), prompt lookup on Spec-Bench, K taken as 10",
    0,
    "nothing to train",
)


@dataclass
class NgramProposer(NgramLookup):
    """Draft tokens are certain (one-hot) at any temperature, so verification needs no distribution of theirs."""

    vocabulary: None = None
    depends_on_width: bool = False
    aux_layers: tuple[int, ...] = ()
    num_parameters: int = 0
    num_bytes: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        own = {"lookup": self.lookup} if self.rule == "specdistill" else {"rule": self.rule}
        return {"min": self.min_ngram, "max": self.max_ngram, **own}

    def draws(self, sampling: Sampling, tree: StaticTree | DynamicTree | None) -> bool:
        return False

    def passes(self, k: int) -> int:
        return 0

    def begin(self, max_length: int) -> None:
        self._after = {}
        self._indexed = 0

    def propose(self, state: DecodingState, k: int, sampling: Sampling, generator: torch.Generator | None) -> Proposal:
        return Proposal(self.find(state.token_ids, k))

    def batched(self) -> BatchProposer:
        return RowByRow(self)


def load_proposer(folder: Path | None, target: FrozenTarget, *, key: str, ngram: NgramConfig = DEFAULTS) -> Proposer:
    return NgramProposer(ngram.min, ngram.max, ngram.lookup, ngram.rule)


def planned(target: sizes.Described, given: sizes.Described | None, settings: dict[str, Any]) -> sizes.PlannedDraft:
    """No weights, and nothing to train."""
    note = "looks the last tokens up in the sequence so far"
    return sizes.PlannedDraft(sizes.ParameterCounts(0, 0, 0), None, target.text.vocab_size, note, PUBLISHED)


METHOD = Implementation(load_proposer=load_proposer, lookup=NgramProposer, planned=planned, num_layers=lambda config: None)
