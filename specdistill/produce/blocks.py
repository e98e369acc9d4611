"""Blocks: what generation is cut into, and the files that keep a block's answers and, when it is complete, its documents.

A block is a share of `data.regenerate.num_tokens` with prompts and seeds of its own. How many there are follows from that number alone;
what a block holds, from the recipe and its own number: not from who makes it, alongside which others, or after how many kills.

    block-00007.jsonl     answers as they come: a first line that says of which recipe, then a line of JSON for each task, or batch of tasks
    block-00007.arrow     the documents of a complete block, which takes the place of its answers
"""

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, NamedTuple

from datasets import Value

from specdistill.files.documents import parse_json
from specdistill.rows.encoding import DOCUMENT_COLUMNS
from specdistill.rows.files import on_disk

VERSION = 2  # of what is generated from equal recipes
TOKENS, FEWEST_TOKENS, MANY, MOST = 2**17, 2**10, 4, 4096  # of a block, and how many blocks
# row: a hash of the source's row that the prompt is of, by which documents are split. asked: a user's prompt that the target generated.
BLOCK_COLUMNS = {**DOCUMENT_COLUMNS, "row": Value("int64"), "asked": Value("string")}


class Block(NamedTuple):
    """One of `num_blocks`."""

    number: int
    num_blocks: int
    num_tokens: int

    @property
    def name(self) -> str:
        return f"block-{self.number:05d}"

    def share(self, total: int) -> int:
        """Of a total that all blocks divide among them."""
        return total * (self.number + 1) // self.num_blocks - total * self.number // self.num_blocks

    def own(self, order: Sequence[int]) -> tuple[list[int], int, int]:
        """What this block has of some rows, and its place among how many blocks that have the same: more than one where rows are few."""
        if own := order[self.number :: self.num_blocks]:
            return (
                list(own),
                0,
                -(-(self.num_blocks - self.number) // len(order))
                if len(order) < self.num_blocks
                else 1,
            )
        shared = self.number % len(order)
        return (
            [order[shared]],
            self.number // len(order),
            -(-(self.num_blocks - shared) // len(order)),
        )


def blocks(num_tokens: int) -> list[Block]:
    """One for TOKENS of them, but MANY for as few as FEWEST_TOKENS each, so that a launch has something to share."""
    count = min(MOST, max(-(-num_tokens // TOKENS), min(MANY, num_tokens // FEWEST_TOKENS), 1))
    return [
        Block(number, count, num_tokens * (number + 1) // count - num_tokens * number // count)
        for number in range(count)
    ]


@dataclass(frozen=True)
class Answer:
    """What was generated in a context. token_ids: with the token that ended it. reason: why it ended, as a server says (`stop`, `length`).
    error: in place of tokens, what the server had against the question.
    """

    context: list[int]
    token_ids: list[int]
    reason: str
    error: str | None = None


class AnswerFile:
    """The answers of a block: the assistant's `turns` by the names of their tasks. `with` opens the file; threads may add.

    plan: of the recipe; what another left in the file is dropped, and so is a line that a kill cut short. added: is given new answers.
    """

    def __init__(
        self,
        path: Path,
        plan: str,
        added: Callable[[Sequence[Answer], int], object] = lambda answers, size: None,
    ):
        self.path, self._added = path, added
        self._head = json.dumps({"plan": plan, "version": VERSION}).encode()
        self.turns: dict[str, list[Answer]] = {}
        self._lock = Lock()
        self._file: Any = None

    def __enter__(self) -> "AnswerFile":
        with on_disk(self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b", buffering=0)
            self._file.seek(0)
            head, *lines = self._file.read().split(b"\n")
            whole = lines[:-1] if head == self._head else []
            for line in whole:
                self.turns |= {
                    name: [Answer(**it) for it in turns] for name, turns in parse_json(line).items()
                }
            self._file.truncate(
                sum(len(line) + 1 for line in (head, *whole)) if head == self._head and lines else 0
            )
            if self._file.seek(0, os.SEEK_END) == 0:
                self._file.write(self._head + b"\n")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def add(self, made: Mapping[str, list[Answer]]) -> None:
        """Kept when this returns, all or none of them. Raises ResourceError when the disk is full."""
        content = {name: [asdict(it) for it in turns] for name, turns in made.items()}
        line = json.dumps(content, ensure_ascii=False).encode() + b"\n"
        with self._lock, on_disk(self.path.parent):
            start = self._file.tell()
            if self._file.write(line) != len(
                line
            ):  # a full disk takes a part, and says so at the next write
                self._file.truncate(start)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.turns |= made
            self._added([answer for turns in made.values() for answer in turns], len(line))
