"""Rows that are nearly the same as an earlier one: candidates by MinHash (Broder 1997), each then compared exactly.

Two rows are as similar as the Jaccard index of their sets of word 5-grams: those that both have, over those that either has. A row of
fewer words has one n-gram, all of them.
"""

from collections.abc import Callable, Mapping
from typing import Any

from specdistill.produce.cleaning.decontamination import Words, ngrams, words

NGRAM = 5
HASHES = 128
MISSED, ALIKE = 0.9, 0.1  # what a pair that is missed weighs, and one that is compared for nothing
MOST = 0.95  # above, there would be a single band

Place = tuple[int, int]  # a source, and a row of it


class NearDuplicates:
    """row_at: gives back a row that was shown before; of each of them only bands of hashes are kept."""

    def __init__(self, threshold: float, row_at: Callable[[Place], Mapping[str, Any]]) -> None:
        from datasketch import MinHashLSH  # slow to import

        self.threshold = threshold
        self.row_at = row_at
        self.bands = MinHashLSH(min(threshold, MOST), HASHES, weights=(ALIKE, MISSED))

    def original(self, row: Mapping[str, Any], place: Place) -> tuple[float, Place] | None:
        """The most similar row that was shown before, with its similarity, if that reaches the threshold; one like no other is kept."""
        from datasketch import MinHash

        own = shingles(row)
        if not own:
            return None
        hashes = MinHash(HASHES)
        hashes.update_batch([" ".join(shingle).encode() for shingle in own])
        compared = [(jaccard(own, shingles(self.row_at(other))), other) for other in sorted(self.bands.query(hashes))]
        similarity, other = max(compared, default=(0.0, place), key=lambda pair: pair[0])
        if similarity >= self.threshold:
            return similarity, other
        self.bands.insert(place, hashes)
        return None


def shingles(row: Mapping[str, Any]) -> set[Words]:
    """The word n-grams of a row in one of the common forms of `sources`, of a conversation those of all that is said."""
    said = words(row["text"] if row["text"] is not None else "\n".join(turn["content"] for turn in row["messages"]))
    return set(ngrams(said, min(NGRAM, max(1, len(said)))))


def jaccard(a: set[Words], b: set[Words]) -> float:
    return len(a & b) / len(a | b)
