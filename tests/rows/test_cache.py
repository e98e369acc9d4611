"""Rows are made once, appear whole or not at all, and what goes wrong in making them arrives as it was raised."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from datasets import Dataset, Features, List, Value

from specdistill.errors import ResourceError, UserError
from specdistill.rows.cache import Columns, Row, cached, content_fingerprint, mapped, num_processes, tokenizer_fingerprint
from tests.tiny import tiny_tokenizer

COLUMNS = {"ids": List(Value("int32")), "name": Value("string")}


def test_equal_inputs_make_rows_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def rows() -> Iterator[Row]:
        calls.append(1)
        yield from ({"ids": list(range(count)), "name": None if count else "none"} for count in range(3))

    first, again, other = (cached(rows, COLUMNS, ["a", number], str(tmp_path)) for number in (1, 1, 2))
    assert first.to_list() == again.to_list() == [
        {"ids": [], "name": "none"}, {"ids": [0], "name": None}, {"ids": [0, 1], "name": None},
    ]  # fmt: skip
    assert len(calls) == 2
    assert first._fingerprint == again._fingerprint != other._fingerprint


def test_no_rows_is_a_dataset_too(tmp_path: Path) -> None:
    assert len(cached(list, COLUMNS, ["empty"], str(tmp_path))) == 0


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    def broken() -> Iterator[Row]:
        yield {"ids": [1], "name": "a"}
        raise UserError("data.source", got="x", expected="y")

    with pytest.raises(UserError, match=r"^data.source: got x, expected y$"):
        cached(broken, COLUMNS, ["half"], str(tmp_path))
    whole = cached(lambda: [{"ids": [2], "name": "b"}], COLUMNS, ["half"], str(tmp_path))
    assert whole.to_list() == [{"ids": [2], "name": "b"}]


def test_a_folder_that_cannot_be_written_is_an_outside_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"set data\.cache_dir to a folder"):
        cached(list, COLUMNS, ["nowhere"], str(tmp_path / "file" / "cache"))


def test_content_is_that_of_the_rows_however_they_are_stored(tmp_path: Path) -> None:
    rows = [{"ids": [index, index + 1], "name": None if index % 3 else str(index)} for index in range(2500)]
    in_memory = Dataset.from_list(rows, features=Features(COLUMNS))
    stored = cached(lambda: rows, COLUMNS, ["content"], str(tmp_path))
    part = Dataset.from_list([*rows, rows[0]], features=Features(COLUMNS)).select(range(len(rows)))
    fingerprint = content_fingerprint(in_memory)
    assert content_fingerprint(stored) == content_fingerprint(part) == fingerprint
    assert content_fingerprint(in_memory.select(range(2499))) != fingerprint != content_fingerprint(in_memory.shuffle(seed=0))


def test_tokenizers_are_told_apart_by_what_they_do() -> None:
    tokenizer = tiny_tokenizer("{{ messages }}")
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)  # leaves settings behind
    assert tokenizer_fingerprint(tokenizer) == before == tokenizer_fingerprint(tiny_tokenizer("{{ messages }}"))
    assert tokenizer_fingerprint(tiny_tokenizer("other")) == before  # templates are compared as they are
    tokenizer.add_tokens(["<more>"])
    assert tokenizer_fingerprint(tokenizer) != before


def repeated_rows(rows: Columns, numbers: Sequence[int]) -> Columns:
    """Each row as often as its number modulo 3 says; row 13 is refused."""
    if "refused" in rows["text"]:
        raise UserError("data.source row 13", got="it", expected="another")
    return {"value": [number for number in numbers for _ in range(number % 3)]}


NUMBERS = {"value": Value("int64")}
FORKS = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@FORKS
def test_several_processes_map_to_the_rows_of_one(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"text": [f"row {number}" for number in range(50)]})
    made = [
        mapped(rows, repeated_rows, NUMBERS, "rows", what="Mapping", num_proc=count, cache_dir=str(tmp_path / str(count)))
        for count in (1, 2, 3)
    ]
    assert made[0]["value"][:] == [number for number in range(50) for _ in range(number % 3)]
    assert made[0].to_list() == made[1].to_list() == made[2].to_list()
    assert len({each._fingerprint for each in made}) == 1 and all(each.column_names == ["value"] for each in made)

    def fails(rows: Columns, numbers: Sequence[int]) -> Columns:
        raise AssertionError("made again")

    for count in (1, 2, 3):  # of a cache of any number of processes
        again = mapped(rows, fails, NUMBERS, "rows", what="Mapping", num_proc=4 - count, cache_dir=str(tmp_path / str(count)))
        assert again.to_list() == made[0].to_list() and again._fingerprint == made[0]._fingerprint


@FORKS
@pytest.mark.parametrize("num_proc", [1, 2])
def test_what_a_process_refuses_is_said_and_nothing_is_kept(tmp_path: Path, num_proc: int) -> None:
    rows = Dataset.from_dict({"text": ["row"] * 13 + ["refused"] + ["row"] * 13})
    for _ in range(2):
        with pytest.raises(UserError, match=r"^data.source row 13: got it, expected another$"):
            mapped(rows, repeated_rows, NUMBERS, "rows", what="Mapping", num_proc=num_proc, cache_dir=str(tmp_path))


def test_rows_may_map_to_none(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"text": ["row"]})
    made = mapped(rows, repeated_rows, NUMBERS, "rows", what="Mapping", cache_dir=str(tmp_path))
    assert len(made) == 0 and made.column_names == ["value"]


def test_few_rows_are_not_worth_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert [num_processes(None, count) for count in (0, 100, 3999, 4000, 20_000, 10**7)] == [1, 1, 1, 2, 10, 16]
    assert num_processes(2, 100) == 2 and num_processes(8, 3) == 3 and num_processes(64, 10**6) == 64
