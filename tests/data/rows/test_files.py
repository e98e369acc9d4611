"""Rows are made once, appear whole or not at all, and errors in making them arrive unchanged."""

import os
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Value

from specdistill.common.errors import UserError
from specdistill.data.rows.files import choose_num_processes, hash_tokenizer, map_rows
from specdistill.recipe.sections import DataConfig
from tests.tiny import tiny_tokenizer


def test_tokenizers_are_told_apart_by_what_they_do() -> None:
    tokenizer = tiny_tokenizer("{{ messages }}")
    before = hash_tokenizer(tokenizer)
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)  # leaves settings behind
    assert hash_tokenizer(tokenizer) == before == hash_tokenizer(tiny_tokenizer("{{ messages }}"))
    # templates are compared as they are
    assert hash_tokenizer(tiny_tokenizer("other")) == before
    tokenizer.add_tokens(["<more>"])
    assert hash_tokenizer(tokenizer) != before


def repeat_row(row: dict[str, Any], number: int) -> list[dict[str, int]]:
    """Return a row as often as its number modulo 3 says; refuse one whose text says so."""
    if row["text"] == "refused":
        raise UserError(f"data.source row {number}", got="it", expected="another")
    return [{"value": number}] * (number % 3)


NUMBERS = {"value": Value("int64")}
FORKS = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@FORKS
def test_several_processes_map_to_the_rows_of_one(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"text": [f"row {number}" for number in range(50)]})
    environment, variables = os.environ, dict(os.environ)
    mapped = [
        map_rows(
            rows,
            repeat_row,
            NUMBERS,
            "rows",
            "Mapping",
            DataConfig(num_proc=count, cache_dir=str(tmp_path / str(count))),
        )
        for count in (1, 2, 3)
    ]
    assert os.environ is environment and dict(os.environ) == variables
    assert mapped[0]["value"][:] == [number for number in range(50) for _ in range(number % 3)]
    assert mapped[0].to_list() == mapped[1].to_list() == mapped[2].to_list()
    assert len({dataset._fingerprint for dataset in mapped}) == 1 and all(
        dataset.column_names == ["value"] for dataset in mapped
    )

    def fail_to_map(row: dict[str, Any], number: int) -> list[dict[str, int]]:
        raise AssertionError("made again")

    for count in (1, 2, 3):  # any number of processes reads the cache of any other
        again = map_rows(
            rows,
            fail_to_map,
            NUMBERS,
            "rows",
            "Mapping",
            DataConfig(num_proc=4 - count, cache_dir=str(tmp_path / str(count))),
        )
        assert (
            again.to_list() == mapped[0].to_list() and again._fingerprint == mapped[0]._fingerprint
        )


@FORKS
@pytest.mark.parametrize("num_proc", [1, 2])
def test_the_error_of_a_process_is_raised_and_nothing_is_kept(
    tmp_path: Path, num_proc: int
) -> None:
    rows = Dataset.from_dict({"text": ["row"] * 13 + ["refused"] + ["row"] * 13})
    for _ in range(2):
        with pytest.raises(UserError, match=r"^data.source row 13: got it, expected another$"):
            map_rows(
                rows,
                repeat_row,
                NUMBERS,
                "rows",
                "Mapping",
                DataConfig(num_proc=num_proc, cache_dir=str(tmp_path)),
            )


def test_rows_may_map_to_no_rows(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"text": ["row"]})
    mapped = map_rows(
        rows, repeat_row, NUMBERS, "rows", "Mapping", DataConfig(cache_dir=str(tmp_path))
    )
    assert len(mapped) == 0 and mapped.column_names == ["value"]


def test_few_rows_are_not_worth_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert [choose_num_processes(None, count) for count in (0, 100, 3999, 4000, 20_000, 10**7)] == [
        1,
        1,
        1,
        2,
        10,
        16,
    ]
    assert (
        choose_num_processes(2, 100) == 2
        and choose_num_processes(8, 3) == 3
        and choose_num_processes(64, 10**6) == 64
    )
