"""Generation: a block's prompts answered by the target, in one loop for all backends: the target in this process, or servers of it.

A draft has to predict what the target generates, and the target's own generations train it best: on two CPU cores, in equal time,
acceptance length went from 1.78 to 2.63. All tokens of a text carry loss, its prompt included; in a conversation those of the answers.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile
from typing import Any

import torch

from specdistill.errors import ResourceError, UserError
from specdistill.produce.answer_rules import CheckedAnswer, Counts, Rules
from specdistill.produce.blocks import Answer, AnswerFile
from specdistill.produce.prompts import GenerationTask, Stream
from specdistill.produce.server_backend import ServerBackend
from specdistill.rows.row_set import RowTarget
from specdistill.targets.batch_generate import fast_dtype, generate, generation_mode
from specdistill.targets.sharding import is_shared

ENOUGH = 0.995  # a block ends at this share of its tokens: a batch of a few rows costs as much time as a full one
MOST_BARREN = 1000  # tasks in a row of which nothing is kept, before it is no longer chance


@dataclass(frozen=True)
class TransformersBackend:
    """A batch is the next tasks, as many as are wanted. What it gives depends on the tasks in it, and it is kept whole or not at all.

    Raises ResourceError when the device's memory does not hold a batch.
    """

    model: Any
    end_ids: tuple[int, ...]
    batch_size: int

    def answers(
        self, tasks: Iterator[GenerationTask], known: AnswerFile, wanted: Callable[[], int]
    ) -> Generator[tuple[GenerationTask, list[Answer]]]:
        """Each task with its turns, in the tasks' order. Those that are known are not generated again; new ones are kept at once.

        wanted: how many tasks more are expected to be needed, of those that were not given back yet.
        """
        while batch := list(islice(tasks, max(1, min(self.batch_size, wanted())))):
            if known.turns.get(batch[0].name) is None:
                known.add(
                    dict(zip((task.name for task in batch), self._generated(batch), strict=True))
                )
            for task in batch:
                yield task, known.turns.get(task.name) or []

    def _generated(self, batch: list[GenerationTask]) -> list[list[Answer]]:
        prompts, ends = [task.prompt.ids for task in batch], self.end_ids
        room = min(task.max_length - len(task.prompt.ids) for task in batch)
        temperatures = [task.temperature for task in batch]
        try:
            made = generate(
                self.model,
                prompts,
                temperatures,
                max_new_tokens=room,
                end_ids=ends,
                seed=batch[0].seed,
            )
        except torch.OutOfMemoryError as error:
            what = f"the device ran out of memory while it generated {len(batch)} rows at a time"
            raise ResourceError(
                what, next_step="lower data.regenerate.batch_size or data.max_length"
            ) from error
        return [
            [
                Answer(
                    ids,
                    continuation,
                    "stop" if continuation[-1:] and continuation[-1] in ends else "length",
                )
            ]
            for ids, continuation in zip(prompts, made, strict=True)
        ]


@contextmanager
def transformers_backend(
    target: RowTarget, num_tokens: int, batch_size: int
) -> Iterator[TransformersBackend]:
    """Generation in this process, by the target that it holds. Raises UserError for one that is not whole here."""
    model = target.model
    if is_shared(model) or any(weight.is_meta for weight in model.parameters()):
        why = "target.shard" if is_shared(model) else "hidden_states.mode=offline"
        expected = (
            "data.regenerate.server, or `specdistill data make` first, with target.shard=none"
        )
        raise UserError(
            "data.regenerate.num_tokens",
            got=f"{num_tokens} with {why}, and no rows yet",
            expected=expected,
        )
    with generation_mode(model, fast_dtype(model.device)) as prepared:
        yield TransformersBackend(prepared, target.end_ids, batch_size)


Backend = TransformersBackend | ServerBackend


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
        context = answer.context[len(ids) :]
        ids += [*context, *answer.token_ids]
        mask += [int(all_tokens)] * len(context) + [1] * len(answer.token_ids)
    return [{"input_ids": ids, "loss_mask": mask, "length": len(ids)} for ids, mask in rows]


@dataclass
class BlockOutput:
    """What a block's answers have given so far. rows: documents with BLOCK_COLUMNS. wanted: tokens that are to come; tokens: that came, as
    `advance` is told.
    """

    rules: Rules
    checked: Callable[[GenerationTask, Answer], CheckedAnswer]
    all_tokens: bool
    advance: Callable[[int], object]
    rows: list[dict[str, Any]] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    wanted: float = 0.0
    tokens: int = 0
    barren: int = 0

    @property
    def missing(self) -> float:
        return max(0.0, ENOUGH * self.wanted - self.tokens)

    def add(self, task: GenerationTask, answers: Sequence[Answer]) -> None:
        """An answer that breaks a rule is filtered, with the turns after it, and does not count. Raises UserError where all are."""
        kept = list(
            takewhile(
                lambda answer: self.counts.keeps(self.checked(task, answer), self.rules), answers
            )
        )
        prompt = task.prompt
        for row in documents(kept, all_tokens=self.all_tokens or not prompt.messages):
            self.rows.append(
                {**row, "source": prompt.source, "row": prompt.row, "asked": prompt.asked}
            )
        tokens = sum(len(answer.token_ids) for answer in kept)
        self.tokens += tokens
        self.advance(tokens)
        self.barren = 0 if kept else self.barren + 1
        if self.barren == MOST_BARREN:
            ((rule, _),) = self.counts.filtered.most_common(1)
            example = self.counts.examples[rule][:80]
            got = f"rules that {MOST_BARREN} answers in a row broke, most of all {rule}, e.g. {example!r}"
            raise UserError("data.regenerate.filter", got=got, expected="some to keep")


def generate_block(
    num_tokens: int,
    streams: Sequence[Stream],
    backend: Backend,
    known: AnswerFile,
    made: BlockOutput,
) -> None:
    """Have a block's tasks answered: of each stream the first that give its share of the tokens, and what earlier ones were short of."""
    for stream in streams:
        made.wanted += stream.share * num_tokens
        if made.missing and (first := next(stream.tasks, None)):
            _answer(first, stream.tasks, backend, known, made)


def _answer(
    first: GenerationTask,
    others: Iterator[GenerationTask],
    backend: Backend,
    known: AnswerFile,
    made: BlockOutput,
) -> None:
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
