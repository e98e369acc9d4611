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

    The next tasks are answered as a batch. The rows of a batch share random numbers, so its answers
    depend on all tasks in it. They are kept all together or not at all.

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
        """Yield each task with its turns, in the order of the tasks.

        Tasks with known answers are not generated again. New answers are kept at once.

        Args:
            tasks: the tasks.
            answer_file: the answers that are already there, to which new ones are added.
            count_wanted: returns how many more tasks are expected to be needed, counting those that
                were not yielded yet.

        Raises:
            ResourceError: when a batch does not fit the device's memory.
        """
        # Take the next tasks: a whole batch, or fewer if fewer are needed.
        while batch := list(islice(tasks, max(1, min(self.batch.num_rows, count_wanted())))):
            # Some answers may be known: a killed process kept them, or they were generated in an
            # earlier batch, of which not all were needed.
            new_tasks = [task for task in batch if task.name not in answer_file.turns]
            if new_tasks:
                names = [task.name for task in new_tasks]
                turns = self._generate_batch(new_tasks)
                answer_file.add(dict(zip(names, turns, strict=True)))
            for task in batch:
                yield task, answer_file.turns.get(task.name) or []

    def _generate_batch(self, batch: list[GenerationTask]) -> list[list[Answer]]:
        """Generate one turn for each task of a batch.

        All rows may have the same number of new tokens: as many as the prompt with the least room.
        They share the seed of the first task.
        """
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

        # An answer that does not end with a stop token was cut at its length.
        turns = []
        for ids, continuation in zip(prompts, generated, strict=True):
            has_end = bool(continuation) and continuation[-1] in self.end_ids
            turns.append([Answer(ids, continuation, "stop" if has_end else "length")])
        return turns


@contextmanager
def build_transformers_backend(
    target: RowTarget, num_tokens: int, batch_size: int, max_length: int
) -> Iterator[TransformersBackend]:
    """Prepare the target in this process for generating in batches that fit its memory.

    Args:
        target: the target, with its model.
        num_tokens: tokens to generate, for the error.
        batch_size: the most rows of a batch.
        max_length: tokens of a row.

    Raises:
        UserError: for a target that is not complete in this process.
    """
    # Every weight must be whole, in this process and on a device. With `target.shard` each process
    # has a part of the weights. With stored features the layers of the target stay on disk.
    model = target.model
    assert model is not None
    if is_shared(model) or any(weight.is_meta for weight in model.parameters()):
        why = "target.shard" if is_shared(model) else "hidden_states.mode=offline"
        raise UserError(
            "data.regenerate.num_tokens",
            got=f"{num_tokens} with {why}, which cannot generate rows",
            expected="data.regenerate.server, or rows that `specdistill data make` made before with"
            " target.shard=none",
        )
    with prepare_generation(model, choose_fast_dtype(model.device)) as prepared:
        yield TransformersBackend(
            prepared, target.end_ids, _plan_fitting_batch(prepared, batch_size, max_length)
        )


def _plan_fitting_batch(model: PreTrainedModel, batch_size: int, max_length: int) -> BatchPlan:
    """Plan batches of rows of `max_length` tokens that fit the free memory.

    A warning is logged if the batches are smaller than `batch_size`.
    """
    row_bytes = estimate_row_bytes(model, max_length)
    # The processes of a launch share a machine's main memory, but each has an accelerator of its
    # own.
    num_sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if model.device.type == "cpu" else 1
    free_bytes = measure_free_memory(model.device) // num_sharing
    plan = plan_batch(batch_size, model.device, row_bytes, free_bytes)
    if plan.num_rows < batch_size:
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        key = "data.regenerate.batch_size"
        logger.warning(
            f"{key}: generating {plan.num_rows} rows at a time instead of {batch_size}. A row of"
            f" {max_length} tokens takes about {decimal(row_bytes)} with a vocabulary of"
            f" {vocab_size:,}, and {decimal(free_bytes)} are free. The batch size changes what is"
            f" sampled: set {key}={plan.num_rows} to generate the same rows on every machine."
        )
    return plan


Backend = TransformersBackend | ServerBackend
