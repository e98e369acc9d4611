"""The length of a training, in tokens, epochs and optimizer steps."""

import math
from collections.abc import Mapping
from typing import Any

from rich.text import Text
from transformers import TrainingArguments

from specdistill.common.errors import logger
from specdistill.common.terminal import Console
from specdistill.data.produce.job import RunSize

# Above this number of epochs a warning is logged. It is a rule of thumb: the shipped recipes train
# for one or two epochs.
MAX_EPOCHS = 5


def count_step_rows(train: Mapping[str, Any], num_processes: int) -> int:
    """Return the rows of an optimizer step, over all processes.

    Args:
        train: the recipe's section `train`.
        num_processes: processes of the launch.
    """
    batch_size = train.get(
        "per_device_train_batch_size", TrainingArguments.per_device_train_batch_size
    )
    num_batches = train.get(
        "gradient_accumulation_steps", TrainingArguments.gradient_accumulation_steps
    )
    num_rows: int = batch_size * num_batches * num_processes
    return num_rows


def count_steps(train: Mapping[str, Any], num_rows: int | None, num_processes: int) -> int | None:
    """Return the optimizer steps of a training, as the Trainer of transformers counts them.

    `max_steps` takes precedence over the number of epochs.

    Args:
        train: the recipe's section `train`.
        num_rows: the training rows; None if they are not counted yet.
        num_processes: processes of the launch.

    Returns:
        The steps; None if they depend on rows that are not counted yet.
    """
    max_steps: int = train.get("max_steps", TrainingArguments.max_steps)
    if max_steps > 0:
        return max_steps
    if num_rows is None:
        return None
    num_epochs: float = train.get("num_train_epochs", TrainingArguments.num_train_epochs)
    return math.ceil(num_epochs * _count_epoch_steps(train, num_rows, num_processes))


def _count_epoch_steps(train: Mapping[str, Any], num_rows: int, num_processes: int) -> int:
    """Return the optimizer steps of an epoch, whose last step may have fewer rows."""
    return max(1, math.ceil(num_rows / count_step_rows(train, num_processes)))


def print_length(
    train: Mapping[str, Any], max_length: int, size: RunSize, num_processes: int
) -> None:
    """Print the tokens, epochs and steps of a training to stderr, and warn of many epochs.

    Nothing is printed if the rows are not counted yet.

    Args:
        train: the recipe's section `train`.
        max_length: tokens of a row, with padding.
        size: the numbers of rows and tokens, and whether the rows are made or only estimated.
        num_processes: processes of the launch.
    """
    num_steps = count_steps(train, size.num_rows, num_processes)
    if not size.num_rows or num_steps is None:
        return
    num_epochs = num_steps / _count_epoch_steps(train, size.num_rows, num_processes)

    # Rows that are not made yet can only be estimated.
    about = "" if size.is_made else "about "
    num_epochs_text = f"{num_epochs:,.2f}".rstrip("0").rstrip(".")
    epochs = f"{num_epochs_text} epoch{'' if num_epochs_text == '1' else 's'}"
    processes = "one process" if num_processes == 1 else f"{num_processes} processes"
    sentence = (
        f"Training on {about}{size.num_tokens:,} tokens ({size.num_rows:,} rows of {max_length:,})"
        f" × {epochs} = {num_steps:,} steps of {count_step_rows(train, num_processes):,} rows in"
        f" {processes}."
    )
    Console(stderr=True).print(Text(sentence), soft_wrap=True)
    if num_epochs > MAX_EPOCHS:
        logger.warning(
            f"The training reads its data {num_epochs_text} times, which is more than {MAX_EPOCHS}."
            " Use more data (data.source, data.regenerate.num_tokens), or fewer epochs"
            " (train.num_train_epochs=2)."
        )
