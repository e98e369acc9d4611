"""N-gram look-up as a row of the table."""

from pathlib import Path

from specdistill.decoding.proposer import Proposer
from specdistill.methods.contract import Implementation
from specdistill.methods.ngram.config import Ngram
from specdistill.methods.ngram.plan import planned
from specdistill.methods.ngram.proposer import NgramProposer
from specdistill.targets.frozen import FrozenTarget

DEFAULTS = Ngram()


def load_proposer(folder: Path | None, target: FrozenTarget, *, key: str, ngram: Ngram = DEFAULTS) -> Proposer:
    return NgramProposer(ngram.min, ngram.max, ngram.lookup)


METHOD = Implementation(load_proposer=load_proposer, planned=planned, num_layers=lambda config: None)
