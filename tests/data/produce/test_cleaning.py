"""What is filtered of sources: rows that overlap prompts of suites, as a search through every place
finds."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from specdistill.cli.main import main
from specdistill.common.errors import ResourceError
from specdistill.data.produce.cleaning import (
    SUITE_NGRAM,
    SuiteIndex,
    load_suites,
    remove_overlaps,
)
from specdistill.data.produce.sources import load_sources
from specdistill.evaluation.suites.suite import Suite, SuiteRow
from specdistill.recipe.sections import DataConfig
from tests.data.produce.row_sets import chat
from tests.refusals import refused, refused_key
from tests.tiny import input_keys, tiny_tokenizer, write_target


def suite(*prompts: str, name: str = "mine") -> Suite:
    rows = tuple(
        SuiteRow(str(number), "", "prompt", prompt) for number, prompt in enumerate(prompts)
    )
    return Suite(name, "1", "", "", name, rows)


def text(said: str) -> dict[str, object]:
    return {"text": said, "messages": None}


def turns(*said: str) -> dict[str, object]:
    return {"text": None, **chat(*said)}


LONG = (
    "Janet’s ducks lay 16 eggs per day, she eats three for breakfast every morning and bakes"
    " muffins with four."
)


@pytest.mark.parametrize(
    ("row", "overlaps"),
    [
        (
            text(
                "So: JANET’S DUCKS lay (16) eggs per day. She eats three for breakfast every lunch"
            ),
            True,
        ),
        # twelve words
        (text("So: Janet’s ducks lay 16 eggs per day, she eats three for lunch"), False),
        (turns("hello", f"quoting: {LONG[8:]}"), True),
        (turns(LONG[:40], LONG[40:]), False),  # thirteen words, but of two turns
    ],
)
def test_thirteen_words_in_a_row_overlap(row: dict[str, object], overlaps: bool) -> None:
    found = SuiteIndex([suite("Something else.", LONG)]).find_overlap(row)
    assert (found is not None) == overlaps
    assert found is None or (found[0], len(found[1].split())) == ("mine: 1", SUITE_NGRAM)


@pytest.mark.parametrize(
    ("prompt", "row", "overlaps"),
    [
        ("Write a poem about ducks", text("Please write a poem: about ducks, and geese"), True),
        ("Write a poem about ducks", text("Please write a poem about geese"), False),
        ("Hello there", turns("hello there!", "Hi"), True),
        # two words are in much that is said
        ("Hello there", turns("Hello there, how are you today?", "Fine"), False),
        ("你好请写一首关于鸭子的诗", text("问：你好，请写一首关于鸭子的诗。"), True),
        ("...", text("anything"), False),
        ("...", text("..."), False),
    ],
)
def test_a_shorter_prompt_overlaps_where_all_of_it_is(
    prompt: str, row: dict[str, object], overlaps: bool
) -> None:
    assert (SuiteIndex([suite(prompt)]).find_overlap(row) is not None) == overlaps


def test_random_texts_overlap_as_a_search_through_every_place_says() -> None:
    generator = random.Random(0)

    def said(least: int, most: int) -> str:
        return " ".join(
            generator.choices("abc", weights=(8, 1, 1), k=generator.randint(least, most))
        )

    prompts, rows = [said(5, 30) for _ in range(20)], [said(1, 60) for _ in range(2000)]
    index = SuiteIndex([suite(*prompts)])
    pieces = [
        f" {' '.join(words[start : start + SUITE_NGRAM])} "
        for words in map(str.split, prompts)
        for start in range(max(1, len(words) - SUITE_NGRAM + 1))
    ]
    expected = [any(piece in f" {row} " for piece in pieces) for row in rows]
    assert [index.find_overlap(text(row)) is not None for row in rows] == expected
    assert 200 < sum(expected) < 1800


def test_of_a_conversation_only_what_the_user_says_is_a_prompt() -> None:
    said = [
        {"role": "system", "content": f"system {LONG}"},
        {"role": "user", "content": LONG[::-1]},
    ]
    index = SuiteIndex([Suite("chats", "1", "", "", "", (SuiteRow("a", "", "messages", said),))])
    assert [index.find_overlap(text(turn["content"])) is not None for turn in said] == [False, True]


def test_all_are_the_suites_at_hand_and_those_that_are_measured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # offline, as every test
    names = [made.name for made in load_suites(["all"], ["pico", "gsm8k"])]
    assert {"pico", "pico-dev"} < set(names) and len(set(names)) == len(names)
    missing = (
        caplog.messages[-1].removeprefix("data.decontaminate: ").partition(" could")[0].split(", ")
    )
    assert (
        {"gsm8k", "mt-bench"} < set(missing)
        and not set(missing) & set(names)
        and missing == sorted(set(missing))
    )
    assert load_suites([], ["pico"]) == []
    with refused("data.decontaminate", "picco"):
        load_suites(["picco"], [])
    with pytest.raises(ResourceError, match="could not be fetched"):
        load_suites(["gsm8k"], [])


PROMPTS = [
    f"What is the sum of {n} and {n + 1}, if every number is counted twice and {n} is odd?"
    for n in (3, 5, 7)
]
CHECKED = "the answer is given"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny target, twenty texts, four of which hold a prompt of suite.jsonl."""
    write_target(tmp_path / "model", num_layers=1)
    texts = [f"Text number {n} says {n * n}, and after it there is more of {n}." for n in range(14)]
    texts += [
        PROMPTS[0],
        f"Asked: {PROMPTS[1].upper()} Then {CHECKED}.",
        PROMPTS[1],
        f"{PROMPTS[2][:70]} …",
    ]
    texts += [" ".join(map(str, range(100, 140))), " ".join(map(str, range(101, 140)))]
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8"
    )
    (tmp_path / "suite.jsonl").write_text(
        "\n".join(json.dumps({"prompt": text}) for text in PROMPTS), encoding="utf-8"
    )
    return tmp_path


def data(folder: Path, *keys: str) -> int:
    own = [
        "data.decontaminate=[all]",
        "data.max_length=128",
        "data.regenerate=null",
        f"eval.suite={folder / 'suite.jsonl'}",
    ]
    return main(["data", "recipe=small/eagle3", *input_keys(folder), *own, *keys])


def listed(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("cache/filtered/*.json")
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def test_rows_that_overlap_what_the_draft_is_measured_on_are_filtered_and_listed(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert data(folder) == 0
    said = capsys.readouterr()
    rows = [(row["row"], row["of"]) for row in listed(folder)]
    assert rows == [
        (row, f"suite: {prompt}") for row, prompt in ((14, 1), (15, 2), (16, 2), (17, 3))
    ]
    assert (
        "Removed 4 of 20 rows that overlap evaluation prompts (4 with prompts of suite); they are"
        " listed in" in said.err
    )
    assert "gsm8k, humaneval, mt-bench, spec-bench, speed-bench could not be fetched" in caplog.text
    counts = said.out
    assert data(folder) == 0
    again = capsys.readouterr()
    assert (
        again.out == counts
        and "filtered: 4 contaminated" in counts
        and "listed in" not in again.err
    )
    assert data(folder, "data.decontaminate=[]") == 0
    without = capsys.readouterr()
    assert without.out != counts and "filtered" not in without.err


def test_what_is_filtered_changes_the_fingerprint(folder: Path) -> None:
    config = DataConfig(source=str(folder / "rows.jsonl"), cache_dir=str(folder / "cache"))
    sources, suite = load_sources(config, tiny_tokenizer()), str(folder / "suite.jsonl")

    def made(*suites: str) -> tuple[int, str]:
        (source,), filtered = remove_overlaps(
            sources, config.model_copy(update={"decontaminate": [*suites]})
        )
        assert filtered.total() == 20 - len(source.rows)
        return len(source.rows), source.rows._fingerprint

    found = [made(), made(suite)]
    assert [count for count, _ in found] == [20, 16] and found[0][1] != found[1][1]
    assert made(suite) == found[1]


def test_a_source_that_is_all_prompts_cannot_be_used(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "rows.jsonl").write_text(
        "\n".join(json.dumps({"text": text}) for text in PROMPTS), encoding="utf-8"
    )
    assert data(folder) == 2 and refused_key(capsys.readouterr().err) == "data.source"
