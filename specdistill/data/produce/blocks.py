"""Divide generation into blocks, and keep the answers and documents of each block in files.

A block is a share of `data.regenerate.num_tokens` with prompts and seeds of its own. The number of
blocks follows from that number of tokens alone. The content of a block follows from the recipe and
the block's number. It does not depend on who makes it, alongside which other blocks, or after how
many kills.

The files of a block:

- `block-00007.jsonl`: the answers as they come. The first line says which recipe they belong to.
  Then there is a line of JSON for each task, or for each batch of tasks.
- `block-00007.arrow`: the documents of a complete block. This file replaces the answers.
"""

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from itertools import chain
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import NamedTuple

from datasets import Value

from specdistill.common.documents import parse_json
from specdistill.data.rows.encoding import DOCUMENT_COLUMNS
from specdistill.data.rows.files import on_disk

VERSION = 3  # Raise it when equal recipes generate other answers.
# Tokens of a block. Smaller blocks divide more evenly among processes, but each ends with a batch
# that is only partly full.
TOKENS = 2**17
MIN_BLOCK_TOKENS = 2**10  # A small job is not divided into blocks of fewer tokens.
SMALL_JOB_BLOCKS = 4  # A small job has at most so many blocks.
MAX_BLOCKS = 4096  # Any job has at most so many blocks, each with files of its own.
# `row` is a hash of the source's row that a prompt comes from. By this hash, documents are divided
# into splits. `asked` is a user's prompt that the target generated.
BLOCK_COLUMNS = {**DOCUMENT_COLUMNS, "row": Value("int64"), "asked": Value("string")}


class Block(NamedTuple):
    """One of the blocks that a generation is divided into.

    Attributes:
        number: its number, from 0.
        num_blocks: how many blocks there are.
        num_tokens: tokens that it has to generate.
    """

    number: int
    num_blocks: int
    num_tokens: int

    @property
    def name(self) -> str:
        """The name of its files, without the suffix."""
        return f"block-{self.number:05d}"

    def share(self, total: int) -> int:
        """Return this block's share of a total that is divided among all blocks."""
        return divide_evenly(total, self.number, self.num_blocks)

    def select_rows(self, order: Sequence[int]) -> tuple[list[int], int, int]:
        """Choose which rows of a source this block makes its prompts from.

        The tokens to generate are divided into blocks, and each block has rows of its own. If the
        source has fewer rows than there are blocks, several blocks share a row.

        Args:
            order: the numbers of the source's rows, in the order in which blocks take them.

        Returns:
            The rows of this block; the index of this block among the blocks that share its rows;
            and the number of these blocks, which is 1 if no row is shared.
        """
        # Deal the rows out to the blocks like cards: block b gets the rows b, b + num_blocks, ….
        if len(order) >= self.num_blocks:
            return list(order[self.number :: self.num_blocks]), 0, 1

        # There are fewer rows than blocks, so deal the blocks out to the rows: row r goes to the
        # blocks r, r + len(order), r + 2 len(order), …, which share it.
        row = self.number % len(order)
        sharing_blocks = range(row, self.num_blocks, len(order))
        return [order[row]], sharing_blocks.index(self.number), len(sharing_blocks)


def divide_evenly(total: int, part: int, num_parts: int) -> int:
    """Return the size of one of `num_parts` parts of a whole number; sizes differ by at most 1.

    Args:
        total: the whole number that is divided.
        part: the index of the part, from 0.
        num_parts: how many parts there are.
    """
    # The part reaches from its own rounded-down boundary to that of the next part.
    return total * (part + 1) // num_parts - total * part // num_parts


def plan_blocks(num_tokens: int) -> list[Block]:
    """Divide a number of tokens to generate into blocks of nearly equal size.

    There is a block for every TOKENS tokens, and never more than MAX_BLOCKS blocks. A small number
    is still divided into up to SMALL_JOB_BLOCKS blocks of at least MIN_BLOCK_TOKENS tokens, so that
    several processes can share the work.
    """
    # -(-a // b) is a / b, rounded up.
    num_full_blocks = -(-num_tokens // TOKENS)
    num_small_blocks = min(SMALL_JOB_BLOCKS, num_tokens // MIN_BLOCK_TOKENS)
    count = min(MAX_BLOCKS, max(num_full_blocks, num_small_blocks, 1))
    return [
        Block(number, count, divide_evenly(num_tokens, number, count)) for number in range(count)
    ]


@dataclass(frozen=True)
class Answer:
    """The tokens that were generated after a context.

    Attributes:
        context: the tokens of the context.
        token_ids: the tokens that were generated, including the one that ended the answer.
        reason: why the answer ended, in the words of a server (`stop`, `length`); `refused` if
            there is no answer.
        error: why there is no answer, for example because a server refused the question; None if
            there is one.
    """

    context: list[int]
    token_ids: list[int]
    reason: str
    error: str | None = None


class AnswerFile:
    """The answers of a block, in a file that `with` opens. Several threads may add to it.

    Args:
        path: the file.
        plan: the hash of the recipe's plan. Answers of another plan, and a line that a kill cut
            short, are removed from the file.
        on_added: called after each addition, with the new answers and the bytes that they take in
            the file.

    Attributes:
        turns: the assistant's turns of each task, by the task's name.
    """

    def __init__(
        self,
        path: Path,
        plan: str,
        on_added: Callable[[Sequence[Answer], int], object] = lambda answers, size: None,
    ):
        self.path = path
        self._on_added = on_added
        self._head = json.dumps({"plan": plan, "version": VERSION}).encode()
        self.turns: dict[str, list[Answer]] = {}
        self._lock = Lock()
        self._file: FileIO

    def __enter__(self) -> "AnswerFile":
        """Open the file, and read the answers that an earlier process left in it."""
        with on_disk(self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b", buffering=0)
            self._file.seek(0)

            # Read the complete lines, if they are of this plan. The last piece of the split is what
            # follows the last line break: nothing, or a line that was cut short.
            head, *lines = self._file.read().split(b"\n")
            complete_lines = lines[:-1] if head == self._head else []
            for line in complete_lines:
                for name, turns in parse_json(line).items():
                    self.turns[name] = [Answer(**turn) for turn in turns]

            # Drop everything else from the file: all of it, if the first line is of another plan or
            # has no line break. An empty file gets the first line of this plan.
            num_bytes = sum(len(line) + 1 for line in (head, *complete_lines))
            self._file.truncate(num_bytes if head == self._head and lines else 0)
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

    def add(self, answers: Mapping[str, list[Answer]]) -> None:
        """Append the answers of some tasks to the file, either all of them or none.

        Args:
            answers: for each task's name, the assistant's turns that were generated for the task.

        Raises:
            ResourceError: if the disk is full.
        """
        # Write all tasks as one line of JSON. If this process is killed while it writes, the file
        # ends with a part of the line, which the next process removes.
        content = {}
        for name, turns in answers.items():
            content[name] = [asdict(turn) for turn in turns]
        line = json.dumps(content, ensure_ascii=False).encode() + b"\n"
        with self._lock, on_disk(self.path.parent):
            start = self._file.tell()
            # A full disk takes a part of the line without an error. Remove the part in this case,
            # and raise an error, which `on_disk` converts to a ResourceError.
            if self._file.write(line) != len(line):
                self._file.truncate(start)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.turns |= answers
            new_answers = list(chain.from_iterable(answers.values()))
            self._on_added(new_answers, len(line))
