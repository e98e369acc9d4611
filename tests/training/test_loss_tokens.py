"""Which rows teach a draft something, and how many drafted positions the answers reach, compared
with a look at each token."""

import logging
import random
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from specdistill.recipe.sections import DataConfig
from specdistill.training.loss_tokens import find_longest_runs, select_learnable_rows
from tests.refusals import refused

LENGTH = 12


def make_rows(*rows: list[list[int]]) -> Dataset:
    """Return rows of documents with these loss masks; the rest of a row is padding."""
    table = []
    for documents in rows:
        mask = [value for document in documents for value in document]
        positions = [position for document in documents for position in range(len(document))]
        rest = [0] * (LENGTH - len(mask))
        table.append(
            {"input_ids": [5] * LENGTH, "loss_mask": mask + rest, "position_ids": positions + rest}
        )
    return Dataset.from_list(table)


def find_longest_run_by_hand(documents: list[list[int]], ahead: int) -> int:
    learned = [mask[ahead:] for mask in documents]
    return max(
        len([*run]) if value else 0 for mask in learned for value, run in groupby(mask or [0])
    )


@pytest.mark.parametrize("ahead", [1, 2])
def test_runs_of_loss_tokens_stay_within_their_documents(ahead: int) -> None:
    generator = random.Random(0)
    rows = [
        [[int(generator.random() < 0.6) for _ in range(length)] for length in lengths]
        for lengths in ([12], [4, 8], [3, 4, 5], [5, 3], [1, 1, 10], [2, 2])
        for _ in range(50)
    ]
    found = find_longest_runs(make_rows(*rows), ahead).tolist()
    assert found == [find_longest_run_by_hand(documents, ahead) for documents in rows]
    assert 0 in found and max(found) > 4


def make_config(**keys: Any) -> DataConfig:
    return DataConfig(source="rows.jsonl", **keys)


LONG = [[0] * 4 + [1] * 8]
NONE = [[0] * 12]
SECOND = [[0, 1, 0, 0]]  # learned by a draft that reads one token first, not by one that reads two


@pytest.mark.parametrize(
    ("train", "validation", "ahead", "split"),
    [
        ([NONE], [LONG], 1, "train"),
        ([LONG], [NONE], 1, "validation"),
        ([SECOND], [LONG], 2, "train"),
        ([LONG], [SECOND, NONE], 2, "validation"),
    ],
)
def test_a_split_that_teaches_nothing_is_refused(
    train: Any, validation: Any, ahead: int, split: str, tmp_path: Path
) -> None:
    sets = [make_rows(*train), make_rows(*validation)]
    objective = SimpleNamespace(ahead=ahead, num_positions=4)
    with refused("data.source", "rows.jsonl", holds=f"no row of the {split} split"):
        select_learnable_rows(sets, objective, make_config())
    with refused("data.rows", tmp_path, holds=f"no row of the {split} split"):
        select_learnable_rows(sets, objective, make_config(rows=str(tmp_path)))


def test_rows_that_teach_nothing_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    sets = [make_rows(LONG, NONE, SECOND, LONG), make_rows(LONG)]
    kept = {}
    for ahead in (1, 2):
        train, validation = select_learnable_rows(
            sets, SimpleNamespace(ahead=ahead, num_positions=4), make_config()
        )
        kept[ahead] = [sum(mask) for mask in train["loss_mask"]]
        assert validation[:] == sets[1][:]
    assert kept == {1: [8, 1, 8], 2: [8, 8]}
    assert [record.getMessage()[13:28] for record in caplog.records] == [
        "left out 1 of 4",
        "left out 2 of 4",
    ]


@pytest.mark.parametrize(
    ("train", "validation", "positions"),
    [(4, 4, ""), (3, 4, "4 to 4"), (5, 2, "3 to 4"), (1, 2, "2 to 4")],
)
def test_positions_that_no_answer_reaches_are_named_once(
    train: int, validation: int, positions: str, caplog: pytest.LogCaptureFixture
) -> None:
    sets = [make_rows([[0] * 4 + [1] * length]) for length in (train, validation)]
    with caplog.at_level(logging.WARNING, logger="specdistill"):
        select_learnable_rows(sets, SimpleNamespace(ahead=2, num_positions=4), make_config())
    lengths = f"{train} tokens in training rows and {validation} in validation rows"
    is_named = [
        f"drafted positions {positions}." in record.getMessage() and lengths in record.getMessage()
        for record in caplog.records
    ]
    assert is_named == [True] * bool(positions)
