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


def generator(**shape: int) -> RowTarget:
    """A target that generates."""
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
    return open_rows(Job(config, target or row_target()))


def manifest_of(config: DataConfig, target: RowTarget | None = None) -> Manifest:
    return read_rows(Job(config, target or row_target()).folder)[2]


def numbered(count: int) -> list[dict[str, str]]:
    return [{"text": f"text number {number:03d}"} for number in range(count)]


def chat(*said: str | None) -> dict[str, Any]:
    """Turns of user and assistant, in turn; None: yet to be generated."""
    return {
        "messages": [
            {"role": ("user", "assistant")[turn % 2], "content": content}
            for turn, content in enumerate(said)
        ]
    }


def texts_in(rows: Dataset) -> list[str]:
    """The documents of packed rows, decoded."""
    tokenizer, batch, found = tiny_tokenizer(), collate(list(rows)), []
    for ids, numbers in zip(batch["input_ids"], batch["document_ids"], strict=True):
        for number in numbers[numbers >= 0].unique().tolist():
            found.append(tokenizer.decode(ids[numbers == number]).removesuffix("<|endoftext|>"))
    return found


class KilledError(Exception):
    pass


def killed(work: Callable[[], object], after: int, *, torn: bool = False) -> None:
    """A process that dies after this number of answers; half of the next one is written where it is
    torn."""
    add, left = AnswerFile.add, [after]

    def dying(self: AnswerFile, answers: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            if torn:
                add(self, answers)
                self._file.truncate(self._file.tell() - 9)
            raise KilledError
        add(self, answers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AnswerFile, "add", dying)
        with pytest.raises(KilledError):
            work()


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a row set."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
