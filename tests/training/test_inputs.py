"""What a recipe's inputs leave open is logged once, before a run."""

import logging
from pathlib import Path
from typing import Any

import pytest

from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_recipe
from specdistill.training.run import TrainingRun, left_open

PINNED = {"source": "org/chats", "revision": "v1", "license": "mit"}


def recipe(folder: Path, source: Any, *keys: str) -> Any:
    made = load_recipe(Recipe, ["recipe=small/eagle3", "data.source=pico", f"train.output_dir={folder / 'run'}", *keys])
    return made.model_copy(update={"data": made.data.model_copy(update={"source": source})})


@pytest.mark.parametrize(
    ("source", "keys", "messages"),
    [
        ("pico", ["target.model=pico"], []),
        ("self", ["target.model=org/name", "target.revision=abc"], []),
        ([PINNED], ["target.model=org/name"], ["target.revision: org/name is not pinned"]),
        ([{**PINNED, "revision": None, "license": None}], ["target.model=pico"], ["data.source: org/chats has no revision"]),
        ("rows.jsonl", ["target.model=pico"], ["data.source: rows.jsonl has no license"]),
        (
            [{"source": "rows.jsonl", "license": "mit"}, PINNED],
            ["target.model=org/name/file.gguf"],
            ["target.revision: org/name/file"],
        ),
    ],
)
def test_what_is_logged(tmp_path: Path, source: Any, keys: list[str], messages: list[str]) -> None:
    found = list(left_open(recipe(tmp_path, source, *keys)))
    assert len(found) == len(messages) and all(line.startswith(start) for line, start in zip(found, messages, strict=True))


def test_a_run_says_it_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="specdistill"):
        TrainingRun.open(recipe(tmp_path, "rows.jsonl", "target.model=pico", "train.bf16=false"))
    assert [record.getMessage()[:36] for record in caplog.records] == ["data.source: rows.jsonl has no licen"]
