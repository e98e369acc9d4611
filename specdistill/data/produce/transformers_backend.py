"""Generate with the target in this process, in batches that fit the memory."""

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
from rich.filesize import decimal
from transformers import PreTrainedModel

from specdistill.common.errors import ResourceError, UserError, logger
from specdistill.data.produce.blocks import Answer, AnswerFile
from specdistill.data.produce.prompts import GenerationTask
from specdistill.data.produce.server_backend import ServerBackend
from specdistill.data.rows.row_set import RowTarget
from specdistill.targets.batch_generate import (
    BatchPlan,
    choose_fast_dtype,
    generate_batch,
    plan_batch,
    prepare_generation,
)
from specdistill.targets.memory import estimate_row_bytes, measure_free_memory
from specdistill.targets.sharding import is_shared


@dataclass(frozen=True)
class TransformersBackend:
    """Generates with a model in this process.

    Tasks are answered in batches. The rows of a batch share random numbers, so each answer depends
    on all tasks of its batch. The answers of a batch are kept all together or not at all.

    Attributes:
        model: the target.
        end_ids: tokens that end a generation.
        batch: how many rows are generated at a time.
    """

    model: PreTrainedModel
    end_ids: tuple[int, ...]
    batch: BatchPlan

    def generate_answers(
        self,
        tasks: Iterator[GenerationTask],
        answer_file: AnswerFile,
        count_wanted: Callable[[], int],
    ) -> Generator[tuple[GenerationTask, list[Answer]]]:
        """Generate the answers to tasks in batches, and yield each task with its answers, in order.

        Args:
            tasks: the tasks.
            answer_file: keeps the answers on disk; answers that are in it are not generated again.
            count_wanted: returns how many more tasks are expected to be needed.

        Yields:
            (a task, a list with its only answer): a turn of the assistant, or the continuation of a
            text.

        Raises:
            ResourceError: if a batch does not fit the memory of the device.
        """
        # Take the next tasks: a whole batch, or fewer if fewer are needed.
        while batch := list(islice(tasks, max(1, min(self.batch.num_rows, count_wanted())))):
            # The file may have some of the answers, from an earlier process that was killed, or
            # from an earlier batch of which not all answers were needed.
            new_tasks = [task for task in batch if task.name not in answer_file.turns]
            if new_tasks:
                names = [task.name for task in new_tasks]
                turns = self._generate_batch(new_tasks)
                answer_file.add(dict(zip(names, turns, strict=True)))
            for task in batch:
                yield task, answer_file.turns.get(task.name) or []

    def _generate_batch(self, batch: list[GenerationTask]) -> list[list[Answer]]:
        """Generate an answer to the prompt of each task in a batch.

        Args:
            batch: the tasks.

        Returns:
            For each task a list with one answer.
        """
        # All prompts may get the same number of new tokens, `room`: what the longest prompt leaves.
        # The whole batch is sampled with the seed of its first task.
        prompts = [task.prompt.ids for task in batch]
        room = min(task.max_length - len(task.prompt.ids) for task in batch)
        try:
            generated = generate_batch(
                self.model,
                prompts,
                [task.temperature for task in batch],
                max_new_tokens=room,
                end_ids=self.end_ids,
                seed=batch[0].seed,
                num_parallel=self.batch.num_parallel,
            )
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"the device ran out of memory while it generated {len(batch)} rows at a time",
                next_step="lower data.regenerate.batch_size or data.max_length",
            ) from error

        # An answer that does not end with an end token was cut at the length limit.
        turns = []
        for ids, continuation in zip(prompts, generated, strict=True):
            has_end = bool(continuation) and continuation[-1] in self.end_ids
            turns.append([Answer(ids, continuation, "stop" if has_end else "length")])
        return turns


@contextmanager
def build_transformers_backend(
    target: RowTarget, num_tokens: int, batch_size: int, max_length: int
) -> Iterator[TransformersBackend]:
    """Prepare the target in this process for generating answers in batches that fit its memory.

    Args:
        target: the target, with its model.
        num_tokens: the value of `data.regenerate.num_tokens`, for the error.
        batch_size: the most rows of a batch.
        max_length: tokens of a row, a prompt with its answer.

    Yields:
        The backend, while the model is set up for fast generation.

    Raises:
        UserError: if this process does not have all weights of the target.
    """
    # All weights must be in this process. With `target.shard` each process has only a part of
    # them. If training never runs the target's layers, their weights are not loaded (they are
    # "meta" tensors).
    model = target.model
    assert model is not None
    if is_shared(model) or any(weight.is_meta for weight in model.parameters()):
        why = "target.shard" if is_shared(model) else "hidden_states.mode=offline"
        raise UserError(
            "data.regenerate.num_tokens",
            got=f"{num_tokens} with {why}, where the target cannot generate",
            expected="servers in data.regenerate.server, or rows that `specdistill data make` made"
            " before with target.shard=none",
        )
    with prepare_generation(model, choose_fast_dtype(model.device)) as prepared:
        yield TransformersBackend(
            prepared, target.end_ids, _plan_fitting_batch(prepared, batch_size, max_length)
        )


def _plan_fitting_batch(model: PreTrainedModel, batch_size: int, max_length: int) -> BatchPlan:
    """Choose how many rows to generate at a time, so that they fit the free memory.

    A warning is logged if these are fewer than `batch_size`.

    Args:
        model: the target.
        batch_size: the most rows of a batch.
        max_length: tokens of a row.
    """
    # All processes of a launch on this machine share its main memory, so on the CPU each gets a
    # part of the free memory. An accelerator is used by one process only.
    row_bytes = estimate_row_bytes(model, max_length)
    num_sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if model.device.type == "cpu" else 1
    free_bytes = measure_free_memory(model.device) // num_sharing
    plan = plan_batch(batch_size, model.device, row_bytes, free_bytes)
    if plan.num_rows < batch_size:
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        key = "data.regenerate.batch_size"
        logger.warning(
            f"{key}: generating {plan.num_rows} rows at a time instead of {batch_size}. A row of"
            f" {max_length} tokens takes about {decimal(row_bytes)} of memory with a vocabulary of"
            f" {vocab_size:,} tokens, and {decimal(free_bytes)} are free. The batch size changes"
            f" what is sampled: set {key}={plan.num_rows} to generate the same rows on every"
            " machine."
        )
    return plan


Backend = TransformersBackend | ServerBackend
