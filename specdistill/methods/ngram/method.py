"""N-gram look-up as a row of the table."""

from pathlib import Path
from typing import Any

from specdistill.decoding.proposer import Proposer
from specdistill.methods.contract import Implementation
from specdistill.methods.ngram.config import Ngram
from specdistill.methods.ngram.proposer import NgramProposer
from specdistill.methods.sizes import Described, Parts, PlannedDraft, Published
from specdistill.statistics.theory import alpha_from_acceptance_length
from specdistill.targets.frozen import FrozenTarget

DEFAULTS = Ngram()
PUBLISHED = Published(
    (alpha_from_acceptance_length(1.54, 10), alpha_from_acceptance_length(1.75, 10)),
    "AL 1.54 (Vicuna-33B) to 1.75 (Vicuna-7B), prompt look-up on Spec-Bench, K taken as 10",
    0,
    "nothing to train",
)


def load_proposer(folder: Path | None, target: FrozenTarget, *, key: str, ngram: Ngram = DEFAULTS) -> Proposer:
    return NgramProposer(ngram.min, ngram.max, ngram.lookup)


def planned(target: Described, given: Described | None, settings: dict[str, Any]) -> PlannedDraft:
    """No weights, and nothing to train."""
    note = "looks the last tokens up in the sequence so far"
    return PlannedDraft(Parts(0, 0, 0), None, target.text.vocab_size, note, PUBLISHED)


METHOD = Implementation(load_proposer=load_proposer, planned=planned, num_layers=lambda config: None)
