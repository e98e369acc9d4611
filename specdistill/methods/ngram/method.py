"""N-gram lookup as a row of the table; `specdistill.methods.ngram.lookup` says what it drafts."""

from specdistill.methods import sizes
from specdistill.methods.lookups import lookup_method
from specdistill.methods.ngram.lookup import NgramLookup
from specdistill.statistics.theory import alpha_from_acceptance_length

PUBLISHED = sizes.PublishedFigures(
    (alpha_from_acceptance_length(1.54, 10), alpha_from_acceptance_length(1.75, 10)),
    "AL 1.54 (Vicuna-33B) to 1.75 (Vicuna-7B), prompt lookup on Spec-Bench, K taken as 10",
    0,
    "nothing to train",
)
METHOD = lookup_method(
    "ngram",
    NgramLookup,
    note="looks the last tokens up in the sequence so far",
    published=PUBLISHED,
)
