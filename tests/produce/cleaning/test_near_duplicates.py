"""Near duplicates: those that a comparison of all pairs finds."""

import random

import pytest

from specdistill.produce.cleaning.near_duplicates import NearDuplicates, Place, jaccard, shingles
from tests.produce.row_sets import chat


def texts(count: int, generator: random.Random) -> list[str]:
    """Every third is an earlier one with some of its words changed, up to a quarter."""
    made: list[list[str]] = []
    for number in range(count):
        said = [f"word{generator.randrange(500)}" for _ in range(60)]
        if number % 3 == 2:
            said = list(made[generator.randrange(number)])
            for place in generator.sample(range(60), generator.randrange(15)):
                said[place] = "other"
        made.append(said)
    return [" ".join(said) for said in made]


@pytest.mark.parametrize("threshold", [0.5, 0.8, 1.0])
def test_nearly_all_pairs_that_are_alike_are_found_and_no_others(threshold: float) -> None:
    rows = [{"text": text, "messages": None} for text in texts(400, random.Random(0))]
    duplicates = NearDuplicates(threshold, lambda place: rows[place[1]])
    kept: list[set[tuple[str, ...]]] = []
    alike = found = 0
    for number, row in enumerate(rows):
        own = shingles(row)
        nearest = max((jaccard(own, other) for other in kept), default=0.0)
        made = duplicates.original(row, (0, number))
        if made is None:
            kept.append(own)
        else:
            assert threshold <= made[0] == jaccard(own, shingles(rows[made[1][1]])) <= nearest
        alike, found = alike + (nearest >= threshold), found + (made is not None)
    assert alike > 5 and found >= 0.95 * alike


def test_short_rows_conversations_and_rows_without_words() -> None:
    said = ["Is it?", "is it", "Is this?", "Is this one?", "Is it?", "?", "!"]
    rows = [
        *({"text": None, **chat(words, "Yes.")} for words in said[:5]),
        *({"text": text, "messages": None} for text in said[5:]),
    ]
    places: list[Place] = [(0, number) for number in range(len(rows))]
    duplicates = NearDuplicates(0.8, lambda place: rows[place[1]])
    made = [duplicates.original(row, place) for row, place in zip(rows, places, strict=True)]
    assert made == [None, (1.0, places[0]), None, None, (1.0, places[0]), None, None]
