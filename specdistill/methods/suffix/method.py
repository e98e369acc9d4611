"""Suffix decoding as a method; `specdistill.methods.suffix.lookup` says what it drafts."""

from specdistill.methods import sizes
from specdistill.methods.lookups.method import LookupAdvice, LookupMethod
from specdistill.methods.suffix.lookup import SuffixLookup

PUBLISHED_FIGURES = sizes.MethodFigures(
    None, "none published for a suite and K alone", 0, "nothing to train"
)


class Suffix(LookupMethod):
    """Suffix decoding: it drafts what most often followed the last tokens, in past outputs too."""

    name = "suffix"
    lookup = SuffixLookup
    advice = LookupAdvice(
        PUBLISHED_FIGURES, "looks the last tokens up in the sequence so far and in earlier outputs"
    )


METHOD = Suffix()
