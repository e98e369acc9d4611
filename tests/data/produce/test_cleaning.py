"""Filtering of rows that overlap prompts of suites, compared with an exhaustive search."""

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


def make_suite(*prompts: str, name: str = "mine") -> Suite:
    rows = tuple(
        SuiteRow(str(number), "", "prompt", prompt) for number, prompt in enumerate(prompts)
    )
    return Suite(name, "1", "", "", name, rows)


def make_text_row(text: str) -> dict[str, object]:
    return {"text": text, "messages": None}


def make_chat_row(*texts: str) -> dict[str, object]:
    return {"text": None, **chat(*texts)}


LONG = (
    "Janet’s ducks lay 16 eggs per day, she eats three for breakfast every morning and bakes"
    " muffins with four."
)


@pytest.mark.parametrize(
    ("row", "overlaps"),
    [
        (
            make_text_row(
                "So: JANET’S DUCKS lay (16) eggs per day. She eats three for breakfast every lunch"
            ),
            True,
        ),
        # twelve words
        (make_text_row("So: Janet’s ducks lay 16 eggs per day, she eats three for lunch"), False),
        (make_chat_row("hello", f"quoting: {LONG[8:]}"), True),
        (make_chat_row(LONG[:40], LONG[40:]), False),  # thirteen words, but of two turns
    ],
)
def test_thirteen_words_in_a_row_overlap(row: dict[str, object], overlaps: bool) -> None:
    overlap = SuiteIndex([make_suite("Something else.", LONG)]).find_overlap(row)
    assert (overlap is not None) == overlaps
    assert overlap is None or (overlap[0], len(overlap[1].split())) == ("mine: 1", SUITE_NGRAM)


@pytest.mark.parametrize(
    ("prompt", "row", "overlaps"),
    [
        (
            "Write a poem about ducks",
            make_text_row("Please write a poem: about ducks, and geese"),
            True,
        ),
        ("Write a poem about ducks", make_text_row("Please write a poem about geese"), False),
        ("Hello there", make_chat_row("hello there!", "Hi"), True),
        # two words are too common, unless they are the whole turn
        ("Hello there", make_chat_row("Hello there, how are you today?", "Fine"), False),
        ("你好请写一首关于鸭子的诗", make_text_row("问：你好，请写一首关于鸭子的诗。"), True),
        ("...", make_text_row("anything"), False),
        ("...", make_text_row("..."), False),
    ],
)
def test_a_shorter_prompt_overlaps_a_row_that_holds_all_of_it(
    prompt: str, row: dict[str, object], overlaps: bool
) -> None:
    assert (SuiteIndex([make_suite(prompt)]).find_overlap(row) is not None) == overlaps


def test_random_texts_overlap_where_an_exhaustive_search_finds_it() -> None:
    generator = random.Random(0)

    def make_words(least: int, most: int) -> str:
        return " ".join(
            generator.choices("abc", weights=(8, 1, 1), k=generator.randint(least, most))
        )

    prompts, rows = [make_words(5, 30) for _ in range(20)], [make_words(1, 60) for _ in range(2000)]
    index = SuiteIndex([make_suite(*prompts)])
    pieces = [
        f" {' '.join(words[start : start + SUITE_NGRAM])} "
        for words in map(str.split, prompts)
        for start in range(max(1, len(words) - SUITE_NGRAM + 1))
    ]
    expected = [any(piece in f" {row} " for piece in pieces) for row in rows]
    assert [index.find_overlap(make_text_row(row)) is not None for row in rows] == expected
    assert 200 < sum(expected) < 1800


def test_only_the_user_s_turns_of_a_conversation_are_prompts() -> None:
    messages = [
        {"role": "system", "content": f"system {LONG}"},
        {"role": "user", "content": LONG[::-1]},
    ]
    index = SuiteIndex(
        [Suite("chats", "1", "", "", "", (SuiteRow("a", "", "messages", messages),))]
    )
    assert [
        index.find_overlap(make_text_row(turn["content"])) is not None for turn in messages
    ] == [False, True]


def test_all_loads_the_suites_at_hand_and_names_the_missing_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Tests are offline, so that suites of the Hub are missing.
    names = [loaded_suite.name for loaded_suite in load_suites(["all"], ["pico", "gsm8k"])]
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
    """A folder with a tiny target and twenty texts, four of which overlap suite.jsonl."""
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


def run_data(folder: Path, *keys: str) -> int:
    settings = [
        "data.decontaminate=[all]",
        "data.max_length=128",
        "data.regenerate=null",
        f"eval.suite={folder / 'suite.jsonl'}",
    ]
    return main(["data", "recipe=small/eagle3", *input_keys(folder), *settings, *keys])


def read_filtered_rows(folder: Path) -> list[dict[str, Any]]:
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
    assert run_data(folder) == 0
    printed = capsys.readouterr()
    rows = [(row["row"], row["of"]) for row in read_filtered_rows(folder)]
    assert rows == [
        (row, f"suite: {prompt}") for row, prompt in ((14, 1), (15, 2), (16, 2), (17, 3))
    ]
    assert (
        "Removed 4 of 20 rows that overlap evaluation prompts (4 with prompts of suite); they are"
        " listed in" in printed.err
    )
    assert "gsm8k, humaneval, mt-bench, spec-bench, speed-bench could not be fetched" in caplog.text
    counts = printed.out
    assert run_data(folder) == 0
    again = capsys.readouterr()
    assert (
        again.out == counts
        and "filtered: 4 contaminated" in counts
        and "listed in" not in again.err
    )
    assert run_data(folder, "data.decontaminate=[]") == 0
    without = capsys.readouterr()
    assert without.out != counts and "filtered" not in without.err


def test_the_suites_that_filter_a_source_change_its_fingerprint(folder: Path) -> None:
    config = DataConfig(source=str(folder / "rows.jsonl"), cache_dir=str(folder / "cache"))
    sources, suite = load_sources(config, tiny_tokenizer()), str(folder / "suite.jsonl")

    def filter_rows(*suites: str) -> tuple[int, str]:
        (source,), filtered = remove_overlaps(
            sources, config.model_copy(update={"decontaminate": [*suites]})
        )
        assert filtered.total() == 20 - len(source.rows)
        return len(source.rows), source.rows._fingerprint

    results = [filter_rows(), filter_rows(suite)]
    assert [count for count, _ in results] == [20, 16] and results[0][1] != results[1][1]
    assert filter_rows(suite) == results[1]


def test_a_source_of_which_every_row_is_a_prompt_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "rows.jsonl").write_text(
        "\n".join(json.dumps({"text": text}) for text in PROMPTS), encoding="utf-8"
    )
    assert run_data(folder) == 2 and refused_key(capsys.readouterr().err) == "data.source"
