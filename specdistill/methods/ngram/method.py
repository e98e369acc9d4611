"""N-gram lookup as a row of the table; `specdistill.methods.ngram.lookup` says what it drafts."""

from pathlib import Path
from typing import Any

from specdistill.decoding.proposer import Proposer
from specdistill.methods import sizes
from specdistill.methods.lookups import LookupProposer, lookup_method
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


class NgramProposer(LookupProposer):
    """With the arguments of `NgramLookup`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(NgramLookup(*arguments, **options))


def load_proposer(folder: Path | None, target: FrozenTarget, *, key: str, ngram: NgramConfig = DEFAULTS) -> Proposer:
    return NgramProposer(ngram.min, ngram.max, ngram.lookup, ngram.rule)


NOTE = "looks the last tokens up in the sequence so far"
METHOD = lookup_method(load_proposer, NgramProposer, note=NOTE, published=PUBLISHED)
