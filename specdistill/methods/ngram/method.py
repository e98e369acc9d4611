"""N-gram lookup as a method; `specdistill.methods.ngram.lookup` says what it drafts."""

from specdistill.evaluation.statistics.theory import alpha_from_acceptance_length
from specdistill.methods import sizes
from specdistill.methods.lookups.method import LookupAdvice, LookupMethod
from specdistill.methods.ngram.lookup import NgramLookup

PUBLISHED_FIGURES = sizes.MethodFigures(
    (alpha_from_acceptance_length(1.54, 10), alpha_from_acceptance_length(1.75, 10)),
    "AL 1.54 (Vicuna-33B) to 1.75 (Vicuna-7B), prompt lookup on Spec-Bench, K taken as 10",
    0,
    "nothing to train",
)


class Ngram(LookupMethod):
    """N-gram lookup: it drafts what followed the last tokens when they occurred before."""

    name = "ngram"
    lookup = NgramLookup
    advice = LookupAdvice(PUBLISHED_FIGURES, "looks the last tokens up in the sequence so far")


METHOD = Ngram()
