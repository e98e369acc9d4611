"""Generation: a block's prompts answered by the target, one loop for all that can answer them.

A draft has to predict what the target generates, and the target's own generations train it best: on two CPU cores, in equal time,
acceptance length went from 1.78 to 2.63. All tokens of a text carry loss, its prompt included; in a conversation those of the answers.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import Any, Protocol

from specdistill.errors import UserError
from specdistill.produce.blocks import Answer, AnswerFile
from specdistill.produce.cleaning.answer_rules import Candidate, Counts, Rules
from specdistill.produce.prompts import Stream, Task

ENOUGH = 0.995  # a block ends at this share of its tokens: a batch of a few rows costs as much time as a full one
MOST_BARREN = 1000  # tasks in a row of which nothing is kept, before it is no longer chance


class Backend(Protocol):
    """What answers tasks: the target in this process, or servers of it."""

    def answers(
        self, tasks: Iterator[Task], known: AnswerFile, wanted: Callable[[], int]
    ) -> Generator[tuple[Task, list[Answer]]]:
        """Each task with its turns, in the tasks' order. Those that are known are not generated again; new ones are kept at once.

        wanted: how many tasks more are expected to be needed, of those that were not given back yet.
        """
        ...


def documents(answers: Sequence[Answer], *, all_tokens: bool) -> list[dict[str, Any]]:
    """Rows {input_ids, loss_mask, length} of a task's turns. Turns whose contexts continue one another share a row. Loss is on answers, or
    on all tokens.
    """
    rows: list[tuple[list[int], list[int]]] = []
    for answer in answers:
        ids, mask = rows[-1] if rows else ([], [])
        if answer.context[: len(ids)] != ids or not ids:
            ids, mask = [], []
            rows.append((ids, mask))
        told = answer.context[len(ids) :]
        ids += [*told, *answer.token_ids]
        mask += [int(all_tokens)] * len(told) + [1] * len(answer.token_ids)
    return [{"input_ids": ids, "loss_mask": mask, "length": len(ids)} for ids, mask in rows]


@dataclass
class Made:
    """What a block's answers have given so far. rows: documents with BLOCK_COLUMNS. wanted: tokens that are to come; tokens: that came."""

    rules: Rules
    candidate: Callable[[Task, Answer], Candidate]
    all_tokens: bool
    rows: list[dict[str, Any]] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    wanted: float = 0.0
    tokens: int = 0
    barren: int = 0

    @property
    def missing(self) -> float:
        return max(0.0, ENOUGH * self.wanted - self.tokens)

    def add(self, task: Task, answers: Sequence[Answer]) -> None:
        """An answer that breaks a rule is filtered, with what was said after it, and does not count. Raises UserError where all are."""
        kept = list(takewhile(lambda answer: self.counts.keeps(self.candidate(task, answer), self.rules), answers))
        prompt = task.prompt
        for row in documents(kept, all_tokens=self.all_tokens or not prompt.messages):
            self.rows.append({**row, "source": prompt.source, "row": prompt.row, "asked": prompt.asked})
        self.tokens += sum(len(answer.token_ids) for answer in kept)
        self.barren = 0 if kept else self.barren + 1
        if self.barren == MOST_BARREN:
            ((rule, _),) = self.counts.filtered.most_common(1)
            example = self.counts.examples[rule][:80]
            got = f"rules that {MOST_BARREN} answers in a row broke, most of all {rule}, as {example!r}"
            raise UserError("data.regenerate.filter", got=got, expected="some to keep")


def generate_block(num_tokens: int, streams: Sequence[Stream], backend: Backend, known: AnswerFile, made: Made) -> None:
    """Have a block's tasks answered: of each stream the first that give its share of the tokens, and what earlier ones were short of."""
    for stream in streams:
        made.wanted += stream.share * num_tokens
        if made.missing and (first := next(stream.tasks, None)):
            _answer(first, stream.tasks, backend, known, made)


def _answer(first: Task, others: Iterator[Task], backend: Backend, known: AnswerFile, made: Made) -> None:
    begin, count, longest = made.tokens, 0, max(1, first.max_length - len(first.prompt.ids))

    def wanted() -> int:
        gained = made.tokens - begin
        return math.ceil(made.missing / (gained / count if gained else longest))

    with closing(backend.answers(chain([first], others), known, wanted)) as found:
        for task, answers in found:
            count += 1
            made.add(task, answers)
            if not made.missing:
                return
