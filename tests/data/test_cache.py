"""Rows are made once, appear whole or not at all, and what goes wrong in making them arrives as it was raised."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from datasets import Dataset, Features, List, Value

from specdistill.data.cache import Row, cached, content_fingerprint, tokenizer_fingerprint
from specdistill.errors import ResourceError, UserError
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
    assert tokenizer_fingerprint(tiny_tokenizer("other")) != before
    tokenizer.add_tokens(["<more>"])
    assert tokenizer_fingerprint(tokenizer) != before
