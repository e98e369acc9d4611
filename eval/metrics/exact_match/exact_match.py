"""The share of texts whose answer is the reference's: the last number of both (the one after `####` in GSM8K), or, where the reference has
no number, the whole text ignoring case and white space.

Args:
    predictions: texts.
    references: answers, or texts that end in them.
"""

from specdistill.measurement.quality import is_match, share

ExactMatch = share("exact_match", __doc__, is_match)
