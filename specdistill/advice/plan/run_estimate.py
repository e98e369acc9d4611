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
from specdistill.data.produce.generate import FIRST_ANSWERS
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
from specdistill.recipe.sections import ServerRegeneration
from specdistill.targets.anatomy import CLASS_ERRORS
from specdistill.targets.batch_generate import choose_fast_dtype, choose_part_rows, sample
from specdistill.training.length import count_steps

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
        data_bytes: bytes of the rows on the disk, with the answers that they are made of.
        disk_bytes: bytes of rows, checkpoints and stored hidden states together.
    """

    device: str
    generation_seconds: float
    step_seconds: float
    num_steps: int | None
    memory: Mapping[str, int]
    data_bytes: int
    disk_bytes: int


def estimate_run(
    recipe: TrainedRecipe, arguments: TrainingArguments, size: RunSize
) -> RunEstimate | None:
    """Estimate the time, memory and disk space of a training, before weights are loaded.

    Args:
        recipe: the recipe.
        arguments: the Trainer's arguments, with the batch size and the number of processes.
        size: the rows of the training, and the tokens that are generated for it.

    Returns:
        The estimate; None if the class of the target or of the draft cannot be built without
        weights.

    Raises:
        UserError: for a draft that `specdistill plan` cannot describe. It may still be possible to
            train it.
    """
    # Read the target's config. There is no estimate if its class cannot be built without weights.
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

    # Compute the sizes of the draft. Then estimate the memory of a training step and the tokens per
    # second.
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

    # An optimizer step consists of several micro-batches (gradient accumulation).
    step_seconds = (
        math.prod(micro_batch) * arguments.gradient_accumulation_steps / tokens_per_second
    )
    num_tokens = (size.num_rows or 0) * recipe.data.max_length
    num_steps = count_steps(recipe.train, size.num_rows, arguments.world_size)
    return RunEstimate(
        device=device.name,
        generation_seconds=_estimate_generation_seconds(recipe, target, device, size),
        step_seconds=step_seconds,
        num_steps=num_steps,
        memory={"libraries": LIBRARY_BYTES, **memory} if isinstance(device, Machine) else memory,
        data_bytes=PREPARED_BYTES * num_tokens,
        disk_bytes=_estimate_disk_bytes(recipe, arguments, target, planned, num_tokens, num_steps),
    )


def print_estimate(
    recipe: TrainedRecipe, arguments: TrainingArguments, size: RunSize, folder: Path
) -> None:
    """Print how long a training will take and how much memory and disk space it needs, to stderr.

    If this cannot be estimated, log the reason.

    Args:
        recipe: the recipe of the training.
        arguments: the Trainer's arguments.
        size: the rows of the training, and the tokens that are generated for it.
        folder: the folder of the rows. The free space on its disk is printed, too.
    """
    # This reason is logged if `estimate_run` returns None.
    reason = "the class of its target or draft cannot be built without weights"
    estimate = None
    try:
        estimate = estimate_run(recipe, arguments, size)
    except ReportedError as error:
        # The estimate may fail for a target or a draft that can be trained. So the error is logged,
        # and the training goes on.
        reason = join_lines(str(error))
    if estimate is None:
        logger.info(f"No estimate of time and memory: {reason}")
        return

    # Print a table with one line for each estimate.
    table = Table("this training", "estimate")
    if estimate.generation_seconds:
        table.add_row("time to generate its data", format_clock(estimate.generation_seconds))
    elif isinstance(recipe.data.regenerate, ServerRegeneration) and not size.is_made:
        # The speed of servers is not known before they answer.
        table.add_row("time to generate its data", f"follows after {FIRST_ANSWERS} answers")
    if estimate.data_bytes and not size.is_made:
        table.add_row("disk for its data", decimal(estimate.data_bytes))
    if estimate.num_steps is None:
        table.add_row("time of a step", format_clock(estimate.step_seconds))
    else:
        table.add_row(
            f"time of {estimate.num_steps:,} steps",
            format_clock(estimate.num_steps * estimate.step_seconds),
        )
    table.add_row("memory of each process", decimal(sum(estimate.memory.values())))
    table.add_row(
        "disk in all", f"{decimal(estimate.disk_bytes)} ({decimal(find_free_bytes(folder))} free)"
    )
    table.add_row("times are for", estimate.device)
    Console(stderr=True).print(table)


def _read_initial_draft(init: str | None) -> ModelConfigInfo | None:
    """Read the config of the draft that training starts from.

    Args:
        init: the recipe's `draft.init`: a draft, or a way to initialize a new one.

    Returns:
        The draft's description; None for a new draft.
    """
    if init in FRESH_INITIALIZATIONS:
        return None
    place, revision = split_revision(init)
    return read_model_config(place, key="draft.init", revision=revision)


def _choose_device(target: ModelConfigInfo, training_dtype: torch.dtype) -> Device:
    """Return the device that times are estimated for: this machine's CPU, or an H100.

    The CPU is chosen if the machine has no GPU and enough memory for the target. Its speed is then
    measured.
    """
    # `can_hold_target` checks both conditions: no GPU, and enough memory.
    if can_hold_target(target.parameters):
        return measure_machine(*find_matrix_sizes(target), target.parameters, training_dtype)
    return H100


def _estimate_generation_seconds(
    recipe: TrainedRecipe, target: ModelConfigInfo, device: Device, size: RunSize
) -> float:
    """Estimate the seconds in which the target generates the missing training data.

    That is the time to read the prompts and to generate the tokens after them. It is 0 if nothing
    has to be generated.
    """
    if not size.num_generated:
        return 0.0

    # Each row consists of a prompt and generated tokens. So the generated tokens give the number of
    # rows, and with it the number of prompt tokens. The prompt is kept shorter than the row: a
    # recipe with a longer one is refused only later, when rows are made.
    length = recipe.data.max_length
    prompt_tokens = min(recipe.data.generation.prompt_tokens, length - 1)
    num_prompt_tokens = size.num_generated * prompt_tokens / (length - prompt_tokens)
    # Reading a prompt token takes two operations for each weight of the target's layers.
    prompt_seconds = (
        2
        * num_prompt_tokens
        * count_layer_weights_read(target.model)
        / (MATRIX_SHARE * device.flops)
    )

    # The time of a generated token is measured on a CPU. For a GPU it is computed from the figures
    # of its maker.
    if isinstance(device, Machine):
        token_seconds = _time_token(recipe, target, size.batch_size)
    else:
        token_seconds = _estimate_token_seconds(target, device, size.batch_size)
    return prompt_seconds + size.num_generated * token_seconds


def _time_token(recipe: TrainedRecipe, target: ModelConfigInfo, batch_size: int) -> float:
    """Measure the seconds per generated token on this machine's CPU.

    The target's weights are not loaded. Matrix products of its sizes and sampling from random
    logits are timed instead.

    Args:
        recipe: the recipe, with the temperatures of generation.
        target: the target.
        batch_size: sequences that are generated at a time.
    """
    # On a CPU a batch is generated in parts. Time the matrix products of a pass over one part.
    cpu = torch.device("cpu")
    rows = choose_part_rows(batch_size, cpu)
    parameters = count_weights_read(target.model)
    vocab_size = target.text.vocab_size
    seconds_per_parameter = time_products(
        choose_fast_dtype(cpu), *find_matrix_sizes(target), int(parameters), [rows]
    )

    # Time the sampling of a token from random logits.
    temperatures = recipe.data.generation.temperatures
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(SAMPLED_ROWS, vocab_size, generator=generator).to(choose_fast_dtype(cpu))
    ones = torch.ones(SAMPLED_ROWS)  # a temperature of 1 for each row
    sampling_seconds = time_fastest(lambda: sample(logits, ones, generator)) / SAMPLED_ROWS

    # Add the time of a pass over the layers, and the time of sampling. Answers at temperature 0 are
    # greedy, which takes no sampling.
    sampled_share = sum(temperature > 0 for temperature in temperatures) / len(temperatures)
    product_seconds = parameters * seconds_per_parameter[rows]
    pass_seconds = product_seconds + LAYER_SECONDS * target.text.num_hidden_layers
    return float(pass_seconds / rows + sampled_share * sampling_seconds)


def _estimate_token_seconds(target: ModelConfigInfo, device: Device, batch_size: int) -> float:
    """Compute the seconds per generated token on a GPU from the published figures of the GPU.

    Args:
        target: the target, in bfloat16.
        device: the GPU.
        batch_size: sequences that are generated at a time.
    """
    # A pass generates one token for each sequence. It reads the weights once, and multiplies the
    # token of each sequence with them. Of a mixture of experts, only the experts of one token
    # count. The pass takes as long as its reads or its arithmetic, whichever takes longer.
    # `count_pass_bytes` returns this time as the number of bytes that the GPU could read in it.
    num_weights = count_weights_read(target.model)
    pass_bytes = device.count_pass_bytes(
        read=num_weights * torch.bfloat16.itemsize, parameters=num_weights, num_tokens=batch_size
    )
    # Sampling reads and writes logits for each sequence.
    pass_bytes += batch_size * SAMPLING_TRAFFIC * target.text.vocab_size
    pass_seconds = (
        pass_bytes / (TRAFFIC_SHARE * device.bandwidth)
        + LAYER_SECONDS * target.text.num_hidden_layers
    )
    return float(pass_seconds / batch_size)


def _count_saves(arguments: TrainingArguments, num_steps: int | None) -> int:
    """Return how many checkpoints a training saves, by its arguments.

    It is 1 if checkpoints are saved every few steps and the number of steps is not known yet.
    """
    if arguments.save_strategy == SaveStrategy.NO:
        return 0
    if arguments.save_strategy == SaveStrategy.EPOCH:
        return math.ceil(arguments.num_train_epochs)
    if num_steps is None:
        return 1
    save_steps = arguments.save_steps
    if save_steps < 1:  # A number below 1 is a share of all steps.
        save_steps = math.ceil(save_steps * num_steps)
    return math.ceil(num_steps / save_steps)  # the Trainer also saves after the last step


def _estimate_disk_bytes(
    recipe: TrainedRecipe,
    arguments: TrainingArguments,
    target: ModelConfigInfo,
    planned: PlannedDraft,
    num_tokens: int,
    num_steps: int | None,
) -> int:
    """Estimate the bytes of disk that a training takes: rows, checkpoints, hidden states.

    Args:
        recipe: the recipe.
        arguments: the Trainer's arguments.
        target: the target.
        planned: the draft.
        num_tokens: the tokens of all rows, with padding; 0 if they are not counted yet.
        num_steps: the optimizer steps; None if they are not known yet.
    """
    # The number of checkpoints on disk is limited by `save_total_limit`.
    num_saves = _count_saves(arguments, num_steps)
    num_checkpoints = min(num_saves, arguments.save_total_limit or num_saves)
    checkpoint_bytes = num_checkpoints * CHECKPOINT_BYTES * planned.parts.parameters

    # Of the modes of a recipe's section `hidden_states`, only `hybrid` takes disk space during the
    # training: it stores the target's hidden states of all tokens, up to `max_bytes`. In `offline`
    # they are on disk already. In `online`, and without this section, none are stored. `features`
    # is the number of hidden states that the method reads for each token.
    store = getattr(recipe, "hidden_states", None)
    stored_bytes = 0
    if store is not None and store.mode == "hybrid":
        itemsize = getattr(torch, store.dtype).itemsize
        stored_bytes = (
            METHODS[recipe.method].features * target.text.hidden_size * itemsize * num_tokens
        )
        stored_bytes = min(stored_bytes, store.max_bytes or stored_bytes)
    return PREPARED_BYTES * num_tokens + checkpoint_bytes + stored_bytes
