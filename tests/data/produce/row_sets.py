"""Small row sets: rows of a source in a file, for a tiny random target."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from recipes.pico.corpus import CHAT_TEMPLATE
from specdistill.data.produce.blocks import AnswerFile
from specdistill.data.produce.job import Job
from specdistill.data.rows.packing import collate
from specdistill.data.rows.row_set import Manifest, RowTarget, read_rows
from specdistill.recipe.sections import DataConfig
from specdistill.workflows.make_data import open_rows
from tests.tiny import tiny_target_model, tiny_tokenizer


def row_target(
    model: Any = None, template: str | None = CHAT_TEMPLATE, weights: str = "0" * 64
) -> RowTarget:
    return RowTarget("tiny", weights, tiny_tokenizer(template), (0, 3), model)


def build_generating_target(**shape: int) -> RowTarget:
    """Return a tiny random target whose model generates."""
    return row_target(tiny_target_model(**{"num_layers": 1, **shape}))


def config_for(folder: Path, rows: Sequence[dict[str, Any]], **settings: Any) -> DataConfig:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    defaults = {
        "source": str(path),
        "max_length": 32,
        "validation_fraction": 0.2,
        "decontaminate": [],
    }
    return DataConfig(**{**defaults, "cache_dir": str(folder / "cache"), **settings})


def replace(config: Any, **changes: Any) -> Any:
    return config.model_copy(update=changes)


def opened(config: DataConfig, target: RowTarget | None = None) -> tuple[Dataset, Dataset]:
    """Return the training and the validation rows of a configuration, made if they are missing."""
    return open_rows(Job(config, target or row_target()))


def read_manifest(config: DataConfig, target: RowTarget | None = None) -> Manifest:
    return read_rows(Job(config, target or row_target()).folder)[2]


def make_numbered_rows(count: int) -> list[dict[str, str]]:
    return [{"text": f"text number {number:03d}"} for number in range(count)]


def chat(*texts: str | None) -> dict[str, Any]:
    """Return alternating turns of user and assistant; None is an answer yet to be generated."""
    return {
        "messages": [
            {"role": ("user", "assistant")[turn % 2], "content": content}
            for turn, content in enumerate(texts)
        ]
    }


def decode_texts(rows: Dataset) -> list[str]:
    """Return the documents of packed rows as texts."""
    tokenizer, batch, texts = tiny_tokenizer(), collate(list(rows)), []
    for ids, numbers in zip(batch["input_ids"], batch["document_ids"], strict=True):
        for number in numbers[numbers >= 0].unique().tolist():
            texts.append(tokenizer.decode(ids[numbers == number]).removesuffix("<|endoftext|>"))
    return texts


class KilledError(Exception):
    pass


def run_until_killed(work: Callable[[], object], after: int, *, torn: bool = False) -> None:
    """Run `work` until it is killed after this number of answers; with `torn`, it has written a
    part of the next one."""
    add, num_left = AnswerFile.add, [after]

    def add_until_killed(self: AnswerFile, answers: Any) -> None:
        num_left[0] -= 1
        if num_left[0] < 0:
            if torn:
                add(self, answers)
                self._file.truncate(self._file.tell() - 9)
            raise KilledError
        add(self, answers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AnswerFile, "add", add_until_killed)
        with pytest.raises(KilledError):
            work()


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the files of a row set by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
