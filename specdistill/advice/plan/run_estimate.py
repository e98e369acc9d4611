"""Estimate the time, memory and disk space of a training before any weights are loaded.

The training step's own code runs over tensors without content, which counts its arithmetic and its
traffic. How fast a CPU does these is measured. For a GPU the published figures of an H100 are used.
Both are in `accounting`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.filesize import decimal
from rich.table import Table
from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy

from specdistill.advice.plan.accounting import (
    H100,
    MATRIX_SHARE,
    TRAFFIC_SHARE,
    Device,
    Machine,
    can_hold_target,
    find_matrix_sizes,
    measure_machine,
    time_fastest,
    time_products,
)
from specdistill.advice.plan.estimates import estimate_training_needs
from specdistill.advice.plan.reading import read_model_config
from specdistill.common.errors import ReportedError, convert_errors, join_lines, logger
from specdistill.common.progress import PREPARED_BYTES, find_free_bytes, format_clock
from specdistill.common.repositories import split_revision
from specdistill.common.terminal import Console
from specdistill.data.produce.job import RunSize
from specdistill.methods import METHODS
from specdistill.methods.load import FRESH_INITIALIZATIONS, load_method
from specdistill.methods.recipe import TrainedRecipe
from specdistill.methods.sizes import (
    ModelConfigInfo,
    PlannedDraft,
    count_layer_weights_read,
    count_weights_read,
)
from specdistill.targets.anatomy import CLASS_ERRORS
from specdistill.targets.batch_generate import choose_fast_dtype, choose_part_rows, sample

# Bytes of a checkpoint for each parameter: the float32 weight and the optimizer's two moments.
CHECKPOINT_BYTES = 12
# Bytes that Python and the libraries hold on a CPU before anything is loaded, measured with
# torch 2.13.
LIBRARY_BYTES = 900 * 10**6
# Bytes that sampling reads and writes for each token of the vocabulary: a few passes in float32.
SAMPLING_TRAFFIC = 4 * 8
SAMPLED_ROWS = 32  # rows of logits on which sampling is timed
# Seconds that Python and small kernels take for each of the target's layers in a generation step.
# This is an assumption.
LAYER_SECONDS = 5e-4


@dataclass(frozen=True)
class RunEstimate:
    """The estimated time, memory and disk space of a training.

    Attributes:
        device: name of the device that the times are for.
        generation_seconds: seconds in which the data that is missing is generated.
        step_seconds: seconds of one optimizer step.
        num_steps: optimizer steps; None if they depend on rows that are not counted yet.
        memory: bytes that one process holds while it trains, by part.
        disk_bytes: of rows, checkpoints and stored hidden states.
    """

    device: str
    generation_seconds: float
    step_seconds: float
    num_steps: int | None
    memory: Mapping[str, int]
    disk_bytes: int


def estimate_run(
    recipe: TrainedRecipe, arguments: TrainingArguments, size: RunSize
) -> RunEstimate | None:
    """Estimate a training from its recipe and the config of its target.

    Args:
        recipe: the recipe.
        arguments: the Trainer's arguments, with the batch size and the number of processes.
        size: the rows of the training, and the tokens that are generated for it.

    Returns:
        The estimate, or None if the class of the target or the draft cannot be built without
        weights.

    Raises:
        UserError: for a draft that `plan` cannot describe. It may still be one that can be trained.
    """
    # Read the target's config. A class that cannot be built without weights has no estimate.
    section = recipe.target
    target = read_model_config(
        section.model,
        key="target.model",
        revision=section.revision,
        trust_remote_code=section.trust_remote_code,
    )
    if target.tiny_random is None:
        return None
    settings = recipe.draft.model_dump(exclude_unset=True)
    is_mixed = arguments.bf16 or arguments.fp16
    device = _choose_device(target, torch.bfloat16 if is_mixed else torch.float32)

    # Plan the draft, and take the time and the memory of its step.
    micro_batch = (arguments.train_batch_size, recipe.data.max_length)
    store = getattr(recipe, "hidden_states", None)
    with convert_errors(
        CLASS_ERRORS,
        "method",
        f"{recipe.method} for {target.name}",
        "a draft whose step runs without weights",
    ):
        planned = load_method(recipe.method).advice.plan_draft(
            target, _read_initial_draft(settings.get("init")), settings
        )
        if planned.shape is None:
            return None
        memory, tokens_per_second = estimate_training_needs(
            recipe.method,
            planned,
            target,
            device,
            settings,
            micro_batch,
            getattr(torch, section.dtype).itemsize,
            is_mixed=is_mixed,
            # Steps that read stored hidden states do not run the target's layers.
            runs_layers=store is None or store.mode == "online",
        )

    # A step of the optimizer takes several micro-batches.
    step_seconds = (
        math.prod(micro_batch) * arguments.gradient_accumulation_steps / tokens_per_second
    )
    num_steps = _count_steps(arguments, size.num_rows)
    return RunEstimate(
        device=device.name,
        generation_seconds=_estimate_generation_seconds(recipe, target, device, size),
        step_seconds=step_seconds,
        num_steps=num_steps,
        memory={"libraries": LIBRARY_BYTES, **memory} if isinstance(device, Machine) else memory,
        disk_bytes=_estimate_disk_bytes(
            recipe, arguments, target, planned, size.num_rows, num_steps
        ),
    )


def print_estimate(
    recipe: TrainedRecipe, arguments: TrainingArguments, size: RunSize, folder: Path
) -> None:
    """Print the estimate of a training to stderr, or why there is none.

    Args:
        recipe: as of `estimate_run`.
        arguments: as of `estimate_run`.
        size: as of `estimate_run`.
        folder: of the rows, on whose disk the free space is counted.
    """
    # The reason is printed if there is no estimate.
    reason = "the class of its target or draft cannot be built without weights"
    estimate = None
    try:
        estimate = estimate_run(recipe, arguments, size)
    except ReportedError as error:
        # Only the training itself may refuse a target or a draft, not its estimate.
        reason = join_lines(str(error))
    if estimate is None:
        logger.info(f"No estimate of time and memory: {reason}")
        return

    # One line for each estimate, on stderr.
    table = Table("this training", "estimate")
    if estimate.generation_seconds:
        table.add_row("time to generate its data", format_clock(estimate.generation_seconds))
    if estimate.num_steps is None:
        table.add_row("time of a step", format_clock(estimate.step_seconds))
    else:
        table.add_row(
            f"time of {estimate.num_steps:,} steps",
            format_clock(estimate.num_steps * estimate.step_seconds),
        )
    table.add_row("memory of each process", decimal(sum(estimate.memory.values())))
    table.add_row(
        "disk", f"{decimal(estimate.disk_bytes)} ({decimal(find_free_bytes(folder))} free)"
    )
    table.add_row("times are for", estimate.device)
    Console(stderr=True).print(table)


def _read_initial_draft(init: str | None) -> ModelConfigInfo | None:
    """Read the config of the draft that training starts from; None for a fresh one."""
    if init in FRESH_INITIALIZATIONS:
        return None
    place, revision = split_revision(init)
    return read_model_config(place, key="draft.init", revision=revision)


def _choose_device(target: ModelConfigInfo, training_dtype: torch.dtype) -> Device:
    """Return this machine's CPU if it can hold the target, else an H100."""
    if not can_hold_target(target.parameters):
        return H100
    return measure_machine(*find_matrix_sizes(target), target.parameters, training_dtype)


def _count_steps(arguments: TrainingArguments, num_rows: int | None) -> int | None:
    """Return the optimizer steps of a training; None if its rows are not counted yet."""
    if arguments.max_steps > 0:
        return arguments.max_steps
    if num_rows is None:
        return None
    rows_per_step = (
        arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    )
    num_steps: int | None = math.ceil(arguments.num_train_epochs * num_rows / rows_per_step)
    return num_steps


def _estimate_generation_seconds(
    recipe: TrainedRecipe, target: ModelConfigInfo, device: Device, size: RunSize
) -> float:
    """Return the seconds in which the device reads the prompts and generates the tokens."""
    if not size.num_generated:
        return 0.0

    # Each row begins with a prompt, so the prompt tokens follow from the generated ones.
    length = recipe.data.max_length
    # The keys are checked against each other when rows are made.
    prompt_tokens = min(recipe.data.generation.prompt_tokens, length - 1)
    num_prompt_tokens = size.num_generated * prompt_tokens / (length - prompt_tokens)
    prompt_seconds = (
        2
        * num_prompt_tokens
        * count_layer_weights_read(target.model)
        / (MATRIX_SHARE * device.flops)
    )

    # A CPU is timed. For a GPU the figures of its maker are used.
    if isinstance(device, Machine):
        token_seconds = _time_token(recipe, target, size.batch_size)
    else:
        token_seconds = _estimate_token_seconds(target, device, size.batch_size)
    return prompt_seconds + size.num_generated * token_seconds


def _time_token(recipe: TrainedRecipe, target: ModelConfigInfo, batch_size: int) -> float:
    """Time the matrix products and the sampling of one token on this machine's CPU.

    There a batch is generated in parts. Returns seconds.
    """
    # Time the matrix products of one pass over a part of the batch.
    cpu = torch.device("cpu")
    rows = choose_part_rows(batch_size, cpu)
    parameters = count_weights_read(target.model)
    vocab_size = target.text.vocab_size
    products = time_products(
        choose_fast_dtype(cpu), *find_matrix_sizes(target), int(parameters), [rows]
    )

    # Time sampling on random logits. Greedy answers do not sample.
    temperatures = recipe.data.generation.temperatures
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(SAMPLED_ROWS, vocab_size, generator=generator).to(choose_fast_dtype(cpu))
    matrix = torch.ones(SAMPLED_ROWS)
    sampling_seconds = time_fastest(lambda: sample(logits, matrix, generator)) / SAMPLED_ROWS
    is_sampled = sum(temperature > 0 for temperature in temperatures) / len(temperatures)
    pass_seconds = parameters * products[rows] + LAYER_SECONDS * target.text.num_hidden_layers
    return float(pass_seconds / rows + is_sampled * sampling_seconds)


def _estimate_token_seconds(target: ModelConfigInfo, device: Device, batch_size: int) -> float:
    """Return the seconds of one generated token on a GPU, by its published figures."""
    # A pass reads the weights once. Sampling adds its own traffic for each sequence.
    parameters = count_weights_read(target.model)
    pass_bytes = device.count_pass_bytes(
        parameters * torch.bfloat16.itemsize, parameters, batch_size
    )
    pass_bytes += batch_size * SAMPLING_TRAFFIC * target.text.vocab_size
    pass_seconds = (
        pass_bytes / (TRAFFIC_SHARE * device.bandwidth)
        + LAYER_SECONDS * target.text.num_hidden_layers
    )
    return float(pass_seconds / batch_size)


def _count_saves(arguments: TrainingArguments, num_steps: int | None) -> int:
    """Return how many checkpoints a training saves; one if its steps are not known."""
    if arguments.save_strategy == SaveStrategy.NO:
        return 0
    if arguments.save_strategy == SaveStrategy.EPOCH:
        return math.ceil(arguments.num_train_epochs)
    if num_steps is None:
        return 1
    save_steps = arguments.save_steps
    if save_steps < 1:  # It is then a share of all steps.
        save_steps *= num_steps
    return max(1, int(num_steps / save_steps))


def _estimate_disk_bytes(
    recipe: TrainedRecipe,
    arguments: TrainingArguments,
    target: ModelConfigInfo,
    planned: PlannedDraft,
    num_rows: int | None,
    num_steps: int | None,
) -> int:
    """Return the bytes of rows, checkpoints and stored hidden states.

    Rows that are not counted yet do not count.
    """
    # Checkpoints: as many as are saved, and at most as many as are kept.
    num_tokens = (num_rows or 0) * recipe.data.max_length
    num_saves = _count_saves(arguments, num_steps)
    num_checkpoints = min(num_saves, arguments.save_total_limit or num_saves)
    checkpoint_bytes = num_checkpoints * CHECKPOINT_BYTES * planned.parts.parameters

    # Hidden states: those of all tokens, up to the limit of the store.
    store = getattr(recipe, "hidden_states", None)
    stored_bytes = 0
    if store is not None and store.mode == "hybrid":
        itemsize = getattr(torch, store.dtype).itemsize
        stored_bytes = (
            METHODS[recipe.method].features * target.text.hidden_size * itemsize * num_tokens
        )
        stored_bytes = min(stored_bytes, store.max_bytes or stored_bytes)
    return PREPARED_BYTES * num_tokens + checkpoint_bytes + stored_bytes
