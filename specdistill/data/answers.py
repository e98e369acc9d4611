"""Answers on disk as they come: append-only files that a kill at any moment leaves readable.

A line of JSON for each answer, in a file of its own for each process that writes. A line that a kill cut short has no end, and is passed
over; its answer is asked for again. Of two answers to one question the first file by name counts, so that all readers see the same rows.
"""

import errno
import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, NamedTuple

from specdistill.cost import PREPARED_BYTES, Cost
from specdistill.errors import ResourceError

PATTERN = "answers-*.jsonl"
VERSION = 2  # of what is asked and kept: answers of another are not read


class Question(NamedTuple):
    """What identifies an answer. prompt: `digest` of its context; turn: of the assistant's, from 0; seed: of sampling. Of a batch that is
    generated in process: digest of all of it, and the row.
    """

    prompt: str
    turn: int
    temperature: float
    seed: int


def digest(values: Any) -> str:
    """A hash of plain values."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


@dataclass(frozen=True)
class Answer:
    """What was generated.

    prompt_ids: the whole context. token_ids: of the answer, with the token that ended it. reason: why it ended, as the server says
    (`stop`, `length`). model, server: that generated it. template: more arguments of the chat template. sampling: parameters beside the
    temperature, as they were sent. error: in place of tokens, what the server had against the question.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    reason: str
    model: str
    server: str
    template: dict[str, Any]
    sampling: dict[str, float]
    error: str | None = None


class Answers:
    """The answers in a folder; `with` opens a file for new ones. Several threads may add. In memory is only where each answer lies.

    added: the new ones, with what becomes of them; seconds since the first question without an answer. Loss tokens are those of answers.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places = {
            question: place for path in sorted(folder.glob(PATTERN), reverse=True) for question, place in _lines(path)
        }
        self.added = Cost(0, 0, 0, 0, 0)
        self._begin: float | None = None
        self._lock = Lock()
        self._path = folder
        self._file: Any = None

    def __enter__(self) -> "Answers":
        self._path = self.folder / PATTERN.replace("*", uuid.uuid4().hex)
        with _disk(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("xb", buffering=0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with _disk(self.folder):
            os.fsync(self._file.fileno())
            self._file.close()
            if not self._path.stat().st_size:
                self._path.unlink()

    def __len__(self) -> int:
        return len(self._places)

    def get(self, question: Question) -> Answer | None:
        if (place := self._places.get(question)) is None:
            self._begin = self._begin or time.monotonic()
            return None
        with place.path.open("rb") as file:
            file.seek(place.start)
            values = json.loads(file.readline())
        for name in Question._fields:
            del values[name]
        made: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return Answer(**made)

    def add(self, question: Question, answer: Answer) -> None:
        """Kept when this returns, whatever happens to the process. Raises ResourceError when the disk is full."""
        line = json.dumps({**question._asdict(), **asdict(answer)}, ensure_ascii=False).encode() + b"\n"
        with self._lock, _disk(self.folder):
            start = self._file.tell()
            if self._file.write(line) != len(line):  # a full disk takes a part, and says so at the next write
                os.ftruncate(self._file.fileno(), start)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._places.setdefault(question, Place(self._path, start))
            tokens, context = len(answer.token_ids), len(answer.prompt_ids)
            self.added = Cost(
                self.added.rows + 1,
                self.added.tokens + context + tokens,
                self.added.loss_tokens + tokens,
                self.added.num_bytes + len(line) + PREPARED_BYTES * (context + tokens),
                time.monotonic() - (self._begin or 0.0),
            )


class Place(NamedTuple):
    """start: of a line, in bytes."""

    path: Path
    start: int


def _lines(path: Path) -> Iterator[tuple[Question, Place]]:
    """The whole answers in a file."""
    start = 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                values = json.loads(line)
                yield Question(*(values[name] for name in Question._fields)), Place(path, start)
            start += len(line)


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """Raises ResourceError where the disk fails."""
    try:
        yield
    except OSError as error:
        next_step = "free disk space, or set data.cache_dir to a folder that can be written; what is there is kept"
        raise ResourceError(f"answers could not be kept in {folder} ({error})", next_step=next_step) from error
