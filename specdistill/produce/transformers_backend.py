"""Generation in this process, batch by batch, by the target that it holds."""

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from itertools import islice
from types import TracebackType

import torch

from specdistill.errors import ResourceError, UserError
from specdistill.produce.blocks import Answer, AnswerFile
from specdistill.produce.prompts import Task
from specdistill.rows.row_set import RowTarget
from specdistill.targets.batch_generate import fast_dtype, generate, generation_mode
from specdistill.targets.sharding import is_shared


class TransformersBackend:
    """A batch is the next tasks, as many as are wanted. What it gives depends on the tasks in it, and it is kept whole or not at all.

    Raises UserError for a target that is not whole here, ResourceError when the device's memory does not hold a batch.
    """

    def __init__(self, target: RowTarget, num_tokens: int, batch_size: int) -> None:
        model = target.model
        if is_shared(model) or any(weight.is_meta for weight in model.parameters()):
            why = "target.shard" if is_shared(model) else "hidden_states.mode=offline"
            expected = "data.regenerate.server, or `specdistill data make` first, with target.shard=none"
            raise UserError("data.regenerate.num_tokens", got=f"{num_tokens} with {why}, and no rows yet", expected=expected)
        self.target, self.batch_size = target, batch_size
        self._stack = ExitStack()

    def __enter__(self) -> "TransformersBackend":
        model = self.target.model
        self._model = self._stack.enter_context(generation_mode(model, fast_dtype(model.device)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def answers(
        self, tasks: Iterator[Task], known: AnswerFile, wanted: Callable[[], int]
    ) -> Generator[tuple[Task, list[Answer]]]:
        while batch := list(islice(tasks, max(1, min(self.batch_size, wanted())))):
            if known.get(batch[0].name) is None:
                known.add(dict(zip((task.name for task in batch), self._generated(batch), strict=True)))
            for task in batch:
                yield task, known.get(task.name) or []

    def _generated(self, batch: list[Task]) -> list[list[Answer]]:
        prompts, ends = [task.prompt.ids for task in batch], self.target.end_ids
        room = min(task.max_length - len(task.prompt.ids) for task in batch)
        temperatures = [task.temperature for task in batch]
        try:
            made = generate(self._model, prompts, temperatures, max_new_tokens=room, end_ids=ends, seed=batch[0].seed)
        except torch.OutOfMemoryError as error:
            what = f"the device ran out of memory while it generated {len(batch)} rows at a time"
            raise ResourceError(what, next_step="lower data.regenerate.batch_size or data.max_length") from error
        return [
            [Answer(ids, continuation, "stop" if continuation[-1:] and continuation[-1] in ends else "length")]
            for ids, continuation in zip(prompts, made, strict=True)
        ]
