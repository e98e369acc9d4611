"""Overlaps of rows with prompts of suites: what the rule says, and what a search through every place finds."""

import random
from itertools import pairwise

import pytest

from specdistill.errors import ResourceError
from specdistill.produce.cleaning.decontamination import NGRAM, SuiteIndex, load_suites
from specdistill.suites.suite import Suite, SuiteRow
from tests.produce.row_sets import chat
from tests.refusals import refused


def suite(*prompts: str, name: str = "mine") -> Suite:
    rows = tuple(SuiteRow(str(number), "", "prompt", prompt) for number, prompt in enumerate(prompts))
    return Suite(name, "1", "", "", name, rows)


def text(said: str) -> dict[str, object]:
    return {"text": said, "messages": None}


def turns(*said: str) -> dict[str, object]:
    return {"text": None, **chat(*said)}


LONG = "Janet’s ducks lay 16 eggs per day, she eats three for breakfast every morning and bakes muffins with four."


@pytest.mark.parametrize(
    ("row", "overlaps"),
    [
        (text("So: JANET’S DUCKS lay (16) eggs per day. She eats three for breakfast every lunch"), True),
        (text("So: Janet’s ducks lay 16 eggs per day, she eats three for lunch"), False),  # twelve words
        (turns("hello", f"quoting: {LONG[8:]}"), True),
        (turns(LONG[:40], LONG[40:]), False),  # thirteen words, but of two turns
    ],
)
def test_thirteen_words_in_a_row_overlap(row: dict[str, object], overlaps: bool) -> None:
    found = SuiteIndex([suite("Something else.", LONG)]).overlap(row)
    assert (found is not None) == overlaps
    assert found is None or (found.suite, found.prompt, len(found.words.split())) == ("mine", "1", NGRAM)


@pytest.mark.parametrize(
    ("prompt", "row", "overlaps"),
    [
        ("Write a poem about ducks", text("Please write a poem: about ducks, and geese"), True),
        ("Write a poem about ducks", text("Please write a poem about geese"), False),
        ("Hello there", turns("hello there!", "Hi"), True),
        ("Hello there", turns("Hello there, how are you today?", "Fine"), False),  # two words are in much that is said
        ("你好请写一首关于鸭子的诗", text("问：你好，请写一首关于鸭子的诗。"), True),
        ("...", text("anything"), False),
        ("...", text("..."), False),
    ],
)
def test_a_shorter_prompt_overlaps_where_all_of_it_is(prompt: str, row: dict[str, object], overlaps: bool) -> None:
    assert (SuiteIndex([suite(prompt)]).overlap(row) is not None) == overlaps


def test_random_texts_overlap_as_a_search_through_every_place_says() -> None:
    generator = random.Random(0)

    def said(least: int, most: int) -> str:
        return " ".join(generator.choices("abc", weights=(8, 1, 1), k=generator.randint(least, most)))

    prompts, rows = [said(5, 30) for _ in range(20)], [said(1, 60) for _ in range(2000)]
    index = SuiteIndex([suite(*prompts)])
    pieces = [
        f" {' '.join(words[start : start + NGRAM])} "
        for words in map(str.split, prompts)
        for start in range(max(1, len(words) - NGRAM + 1))
    ]
    expected = [any(piece in f" {row} " for piece in pieces) for row in rows]
    assert [index.overlap(text(row)) is not None for row in rows] == expected
    assert 200 < sum(expected) < 1800


def test_of_a_conversation_only_what_the_user_says_is_a_prompt() -> None:
    said = [{"role": "system", "content": f"system {LONG}"}, {"role": "user", "content": LONG[::-1]}]
    index = SuiteIndex([Suite("chats", "1", "", "", "", (SuiteRow("a", "", "messages", said),))])
    assert [index.overlap(text(turn["content"])) is not None for turn in said] == [False, True]


def test_all_are_the_suites_at_hand_and_those_that_are_measured() -> None:
    suites, missing = load_suites(["all"], ["pico", "gsm8k"])  # offline, as every test
    names = [made.name for made in suites]
    assert {"pico", "pico-dev"} < set(names) and len(set(names)) == len(names)
    assert {"gsm8k", "mt-bench"} < set(missing) and not set(missing) & set(names)
    assert all(a < b for a, b in pairwise(missing))
    assert load_suites([], ["pico"]) == ([], [])
    with refused("data.decontaminate", "picco"):
        load_suites(["picco"], [])
    with pytest.raises(ResourceError, match="could not be fetched"):
        load_suites(["gsm8k"], [])
