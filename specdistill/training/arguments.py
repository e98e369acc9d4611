"""Turn the `train:` section of a recipe into `transformers.TrainingArguments`, for one launch.

The section is checked field by field, so that errors name the recipe's keys. `accelerate launch`
says in the environment how many processes there are and how they share the model. On a machine
without a GPU, accelerate does not always make the processes one group. Each would then train alone
and overwrite the others' checkpoint without a message, so this module makes the group or refuses.
"""

import atexit
import dataclasses
import inspect
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from accelerate.utils import DistributedType
from transformers import TrainingArguments, get_scheduler
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from specdistill.common.errors import UserError, find_nearest, join_lines, make_unused_key_error
from specdistill.common.processes import check_devices, leave_process_group
from specdistill.recipe.fields import format_value
from specdistill.recipe.key_errors import ALIASES
from specdistill.targets.sharding import count_processes

# The only version and state dict type of FSDP that are supported: with them, the weights are
# gathered when they are saved.
FSDP = ("2", "FULL_STATE_DICT")

# The values that a field may have: a test of a value, and the same test in words.
# TrainingArguments accepts other values, with which training would fail later, or train nothing.
Range = tuple[Callable[[Any], bool], str]
AT_LEAST_ONE: Range = (lambda number: number >= 1, "at least 1")
ABOVE_ZERO: Range = (lambda number: number > 0, "above 0")
AT_LEAST_ZERO: Range = (lambda number: number >= 0, "at least 0")
BELOW_ONE: Range = (lambda number: 0 <= number < 1, "at least 0 and below 1")
FINITE: Range = (
    lambda value: not isinstance(value, float) or math.isfinite(value),
    "a finite number",
)
RANGES: dict[str, Range] = {
    "optim_args": (
        lambda text: all(part.partition("=")[2] for part in text.split(",")),
        "NAME=VALUE,NAME=VALUE",
    ),
    "max_steps": (
        lambda number: number >= 1 or number == -1,
        "at least 1, or -1 for train.num_train_epochs",
    ),
    "per_device_train_batch_size": AT_LEAST_ONE,
    "per_device_eval_batch_size": AT_LEAST_ONE,
    "gradient_accumulation_steps": AT_LEAST_ONE,
    "eval_accumulation_steps": AT_LEAST_ONE,
    "save_total_limit": AT_LEAST_ONE,
    "dataloader_prefetch_factor": AT_LEAST_ONE,
    "num_train_epochs": ABOVE_ZERO,
    "adam_epsilon": ABOVE_ZERO,
    "logging_steps": ABOVE_ZERO,
    "eval_steps": ABOVE_ZERO,
    "save_steps": ABOVE_ZERO,
    "learning_rate": AT_LEAST_ZERO,
    "weight_decay": AT_LEAST_ZERO,
    "adam_beta1": BELOW_ONE,
    "adam_beta2": BELOW_ONE,
    "seed": (lambda number: 0 <= number < 2**32, f"0 to {2**32 - 1}"),
    "eval_do_concat_batches": (
        lambda value: value == 1,
        "true: acceptance is counted over all batches",
    ),
    "dataloader_num_workers": (lambda number: 0 <= number <= 1024, "0 to 1024"),
    "ddp_timeout": (lambda seconds: seconds >= 30, "30 or more"),
}
# The allowed values of fields whose definition in transformers does not list them: trackers, and
# backends and modes of torch.compile.
NAMES = {
    "report_to": ["all", "none", *INTEGRATION_TO_CALLBACK],
    "torch_compile_backend": ["inductor", "aot_eager", "eager"],
    # Modes with CUDA graphs are left out. Their outputs are in memory that the next graph reuses,
    # so the features of earlier layers would be overwritten.
    "torch_compile_mode": ["default", "max-autotune-no-cudagraphs"],
}
# Fields that are read only where another one is set.
CONDITIONAL_FIELDS = {
    "dataloader_persistent_workers": "dataloader_num_workers",
    "dataloader_multiprocessing_context": "dataloader_num_workers",
    "activation_checkpointing_kwargs": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "gradient_checkpointing",
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode"), "torch_compile"),
}
# Messages of transformers about settings that cannot be combined. A part of each message leads to
# the field to change, and to a text that says what is wrong and what to type.
EXCLUSIVE_FIELDS = {
    "fp16 and bf16": ("fp16", "set with train.bf16. Set one of the two to false."),
    "support bf16": (
        "bf16",
        "this machine has no GPU that computes in bfloat16. Set train.bf16=false.",
    ),
    "--tf32": ("tf32", "this machine has no GPU that computes in TF32. Remove train.tf32=true."),
    "requires an eval strategy": (
        "lr_scheduler_type",
        (
            "{lr_scheduler_type} follows evaluations. Set train.eval_strategy=steps, or another"
            " schedule."
        ),
    ),
    "save and eval strategy to match": (
        "load_best_model_at_end",
        (
            "only what was evaluated can be the best. Set train.eval_strategy (now {eval_strategy})"
            " and train.save_strategy (now {save_strategy}) to one value."
        ),
    ),
    "multiple of the evaluation steps": (
        "save_steps",
        (
            "{save_steps} does not fit train.eval_steps={eval_steps}: with"
            " train.load_best_model_at_end, checkpoints are only saved after steps that are"
            " evaluated. Set both to one number."
        ),
    ),
    "`args.metric_for_best_model` must be provided": (
        "metric_for_best_model",
        "needed with train.save_strategy=best. Set train.metric_for_best_model=acceptance_length.",
    ),
}
# Parameters of a schedule that the Trainer sets, so they are not options of the recipe.
TRAINER_SCHEDULE_PARAMETERS = (
    "optimizer",
    "num_warmup_steps",
    "num_training_steps",
    "last_epoch",
    "kwargs",
)
# Fields that only `specdistill.targets.frozen.compile_layers` reads. They are not passed on to the
# Trainer, which would compile the whole model.
COMPILE = ("torch_compile", "torch_compile_backend", "torch_compile_mode")


def build_training_arguments(train: Mapping[str, Any], **defaults: Any) -> TrainingArguments:
    """Build the Trainer's arguments from `train:`, and connect the processes of the launch.

    Args:
        train: the recipe's section `train`.
        defaults: values for fields that the section leaves out.

    Raises:
        UserError: for unknown or mistyped fields, and for a launch with more processes than GPUs
            or whose processes would each train alone.
    """
    # Check that this machine has a device for each process. Then check the fields: first each one
    # by itself, then those that cannot be combined.
    check_devices(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), "accelerate launch")
    fields = {**defaults, **_check_fields(train)}
    _check_combinations(fields)

    # Adapt the fields. For a metric such as `loss_1` the Trainer would take the greatest value as
    # the best, so `greater_is_better` is set here. The fields of torch.compile are removed, because
    # the Trainer would compile the whole model, and this project compiles layer by layer.
    metric = fields.get("metric_for_best_model")
    if metric:
        fields.setdefault("greater_is_better", "loss" not in metric)
    for compile_key in COMPILE:
        fields.pop(compile_key, None)
    precision = _take_precision(fields)
    fields = {**_launch_defaults(), **fields}

    # Build the arguments. Some messages of transformers are about one field, and some about several
    # that conflict.
    try:
        arguments = TrainingArguments(**fields)
    except (ValueError, TypeError, OSError) as error:
        raise _make_field_error(error, fields) or make_trainer_error(error, fields) from error

    # Adapt them to the launch, and check what can only be checked on built arguments.
    if precision == "fp16" and arguments.device.type == "cpu":
        raise UserError(
            "train.fp16",
            got="float16 on a CPU",
            expected=(
                "train.bf16=true, or neither fp16 nor bf16: on a CPU accelerate would silently"
                " train in float32"
            ),
        )
    _adapt_sharding(arguments, precision)
    _check_trackers_and_schedule(arguments)
    _join_processes(arguments)
    return arguments


def _check_fields(train: Mapping[str, Any]) -> dict[str, Any]:
    """Check each field of `train:` by itself, and return the fields with their values.

    Raises:
        UserError: for unknown or mistyped fields.
    """
    # The fields of TrainingArguments, their types, and their metadata, which may have `choices`.
    hints = get_type_hints(TrainingArguments)
    known_fields = {
        entry.name: entry.metadata for entry in dataclasses.fields(TrainingArguments) if entry.init
    }

    # Check the values. Two are converted first: trackers in one text, separated by commas, become a
    # list. And false becomes `no` again, because YAML 1.1 reads an unquoted `no` as false.
    fields = {}
    for name, value in train.items():
        if name not in known_fields:
            nearest_field = find_nearest(name, known_fields)
            nearest_key = f"train.{nearest_field}" if nearest_field else None
            raise UserError(
                f"train.{name}",
                got="an unknown key",
                expected="a field of transformers.TrainingArguments",
                nearest=ALIASES.get(name) or nearest_key,
            )
        if name == "report_to" and isinstance(value, str):
            value = value.split(",")
        if name.endswith("_strategy") and value is False:
            value = "no"
        allowed_values = NAMES.get(name) or known_fields[name].get("choices") or ()
        fields[name] = _check_value(name, value, hints[name], allowed_values)
    return fields


def _check_combinations(fields: Mapping[str, Any]) -> None:
    """Raise UserError for fields that do not work together, or for a missing `output_dir`.

    Only combinations that transformers would accept are checked here. It refuses others itself, and
    `make_trainer_error` turns its messages into errors that name keys of the recipe.

    Args:
        fields: all fields of TrainingArguments that have a value.
    """
    for name, condition in CONDITIONAL_FIELDS.items():
        if fields.get(name) and not fields.get(condition):
            raise make_unused_key_error(
                f"train.{name}",
                format_value(fields[name]),
                f"only used with train.{condition}",
                alternative=f"set train.{condition}",
            )
    if fields.get("output_dir") is None:
        raise UserError("train.output_dir", got="nothing", expected="a folder")

    # torch.compile is supported neither with sharded weights nor with activation checkpointing.
    if fields.get("torch_compile") and is_weight_sharded():
        raise UserError(
            "train.torch_compile",
            got="true with sharded weights",
            expected="false, or a launch that leaves weights whole: ddp, zero1, zero2",
        )
    if fields.get("torch_compile") and (
        fields.get("activation_checkpointing") or fields.get("gradient_checkpointing")
    ):
        raise UserError(
            "train.torch_compile",
            got="true with activation checkpointing",
            expected="only one of train.torch_compile and train.activation_checkpointing",
        )


def make_trainer_error(error: Exception, fields: Mapping[str, object]) -> UserError:
    """Return the error to report for settings that TrainingArguments or the Trainer refused.

    Messages of transformers name options of its own scripts (`--bf16`, `args.bf16`), which are
    replaced by keys of the recipe (`train.bf16`).

    Args:
        error: the error of TrainingArguments or the Trainer.
        fields: the refused settings, by the names of fields of TrainingArguments.
    """
    # EXCLUSIVE_FIELDS has a better text for known messages, with placeholders for fields' values.
    values = {
        entry.name: fields.get(entry.name, entry.default)
        for entry in dataclasses.fields(TrainingArguments)
    }
    for part, (name, problem) in EXCLUSIVE_FIELDS.items():
        if part in str(error):
            return UserError(
                f"train.{name}", got=values[name], text=f"train.{name}: {problem.format(**values)}"
            )

    # Any other message is repeated with the names of keys.
    reason = _name_keys(join_lines(str(error)))
    return UserError(
        "train", got=reason, text=f"train: these settings cannot be combined: {reason}"
    )


def _name_keys(message: str) -> str:
    """Replace names of options in a message of transformers by keys of `train:`."""
    return re.sub(r"--(?=[a-z])|\bargs\.", "train.", message)


def _make_field_error(error: Exception, fields: Mapping[str, object]) -> UserError | None:
    """Return the error to report if TrainingArguments refuses the value of one single field.

    Args:
        error: the error of TrainingArguments, which need not name the field.
        fields: all fields with their values.

    Returns:
        An error that names the field; None if several fields conflict.
    """
    # EXCLUSIVE_FIELDS knows all messages about several fields.
    message = str(error)
    if any(part in message for part in EXCLUSIVE_FIELDS):
        return None

    # Try each field alone, with defaults for all others, until one gives the same message.
    base_fields = {**_launch_defaults(), "output_dir": fields["output_dir"]}
    for name, value in fields.items():
        try:
            TrainingArguments(**{**base_fields, name: value})
        except (ValueError, TypeError, OSError, ImportError, RuntimeError) as refusal:
            if str(refusal) == message:
                return UserError(
                    f"train.{name}",
                    got=value,
                    text=f"train.{name}: {_name_keys(join_lines(message))}",
                )
    return None


def check_precision(arguments: TrainingArguments, target_dtype: str) -> None:
    """Raise UserError for a 16-bit target without mixed precision.

    The weights of a draft are float32. Without autocast, they could not be multiplied with the
    16-bit features of the target.
    """
    if target_dtype != "float32" and find_autocast_dtype(arguments) is None:
        raise UserError(
            "train.bf16",
            got=f"false with target.dtype={target_dtype}",
            expected="true (or train.fp16=true), because a 16-bit target needs mixed precision",
        )


def find_autocast_dtype(arguments: TrainingArguments) -> torch.dtype | None:
    """Return the dtype of matrix products under mixed precision; None without mixed precision."""
    # Under DeepSpeed, its own configuration switches autocast on (see `_adapt_sharding`).
    plugin = arguments.deepspeed_plugin
    if plugin is not None:
        return torch.bfloat16 if plugin.deepspeed_config["torch_autocast"]["enabled"] else None
    if arguments.bf16:
        return torch.bfloat16
    return torch.float16 if arguments.fp16 else None


def is_sharded() -> bool:
    """Return whether this launch shards the draft, by DeepSpeed's ZeRO or torch's FSDP."""
    return is_launched_with("DEEPSPEED") or is_launched_with("FSDP")


def is_weight_sharded() -> bool:
    """Return whether a process of this launch holds only a part of the draft's weights.

    FSDP and stage 3 of DeepSpeed's ZeRO divide the weights. Stages 1 and 2 of ZeRO divide only the
    optimizer's state and gradients.
    """
    return is_launched_with("FSDP") or (
        is_launched_with("DEEPSPEED") and os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"
    )


def _take_precision(fields: dict[str, object]) -> str:
    """Choose the mixed precision of a run: `bf16`, `fp16` or `no`.

    The recipe chooses, or else the launch. If every process holds the whole draft, the choice is
    set in `fields`. If the draft is sharded, the choice is removed from `fields`, because DeepSpeed
    and FSDP would convert the weights to 16 bits, each in its own way. Instead, `_adapt_sharding`
    then switches autocast on. The weights stay float32, and learn the same under every launch.

    Args:
        fields: the fields of TrainingArguments. This function changes them.

    Returns:
        The mixed precision.

    Raises:
        UserError: for fp16 with a sharded draft.
    """
    # The launch chooses only if the recipe says nothing, not even false.
    precision = "no"
    if fields.get("bf16"):
        precision = "bf16"
    elif fields.get("fp16"):
        precision = "fp16"
    elif "bf16" not in fields and "fp16" not in fields:
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if not is_sharded():
        if precision != "no":
            fields[precision] = True
        return precision

    # A sharded draft: hide the precision from transformers and accelerate.
    if precision == "fp16":
        raise UserError(
            "train.fp16",
            got="true under DeepSpeed or FSDP",
            expected="train.bf16=true, or a launch without sharding (accelerate_configs/ddp.yaml)",
        )
    fields.pop("bf16", None)
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    return precision


def _adapt_sharding(arguments: TrainingArguments, precision: str) -> None:
    """Adapt a launch that shards the draft, so that it trains and saves like any other launch.

    Mixed precision becomes torch's autocast, instead of weights in 16 bits. Models are loaded
    whole, because under ZeRO-3 transformers would also shard the target. Drafts are gathered to be
    saved as a whole, whatever the configuration of ZeRO-3 says.

    Args:
        arguments: the Trainer's arguments. This function changes them.
        precision: the mixed precision, `bf16` or `no`.

    Raises:
        UserError: for FSDP settings with which drafts are not saved whole, or with which the parts
            of a checkpoint would be on different machines.
    """
    if not is_sharded():
        return

    # FSDP: `_take_precision` removed `bf16` before the arguments were built, so that accelerate
    # does not convert the weights. Set it now, so that `find_autocast_dtype` returns bfloat16.
    if arguments.deepspeed_plugin is None:
        arguments.bf16 = precision == "bf16"

        # Only version 2 with whole state dicts is supported. Where the launch configuration sets
        # nothing, accelerate's defaults apply: version 1, and sharded state dicts in version 2.
        supported_version, supported_type = FSDP
        fsdp_version = os.environ.get("FSDP_VERSION", "1")
        state_dict_type = os.environ.get("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")
        if (fsdp_version, state_dict_type) != (supported_version, supported_type):
            raise UserError(
                "accelerate launch",
                got=f"a configuration with FSDP {fsdp_version} and fsdp_state_dict_type"
                f" {state_dict_type}",
                expected=(
                    f"FSDP {supported_version} and {supported_type}, as in"
                    " accelerate_configs/fsdp2.yaml"
                ),
            )
        if arguments.save_on_each_node:
            raise UserError(
                "train.save_on_each_node",
                got="true under FSDP, where a checkpoint is divided between the machines",
                expected=(
                    "false, with a folder that all machines share, or"
                    " accelerate_configs/zero3_multinode.yaml"
                ),
            )
        return

    # DeepSpeed: gather whole weights on saving, and let torch autocast.
    config = arguments.deepspeed_plugin.deepspeed_config
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    config["torch_autocast"] = {
        "enabled": precision == "bf16",
        "dtype": "bfloat16",
        "lower_precision_safe_modules": [],
    }
    if arguments.save_on_each_node:
        config["checkpoint"] = {"use_node_local_storage": True}
    # Without this global setting, transformers loads models whole.
    unset_hf_deepspeed_config()


def _check_trackers_and_schedule(arguments: Any) -> None:
    """Raise UserError for a tracker or a learning-rate schedule that the Trainer could not build.

    The Trainer builds both only after the data is prepared. So this function builds each of them
    once before, to report early what is not installed or lacks options.
    """
    # A tracker must be installed, and set up (for example, with an account).
    for tracker in arguments.report_to:
        try:
            INTEGRATION_TO_CALLBACK[tracker]()
        except (ImportError, RuntimeError, ValueError, KeyError) as error:
            hint = f"train.report_to: {tracker} is not installed. Run: pip install {tracker}"
            raise UserError(
                "train.report_to",
                got=f"{tracker} ({error})",
                expected="none, or trackers that are installed and set up",
                text=hint if "install" in str(error) else "",
            ) from error

    # Build the schedule once, to see whether its options are valid. It needs an optimizer, which is
    # one without a model here, and is not used any further.
    schedule = arguments.lr_scheduler_type
    options = arguments.lr_scheduler_kwargs
    optimizer = torch.optim.SGD([torch.zeros(1)], arguments.learning_rate)
    try:
        get_scheduler(
            schedule,
            optimizer,
            num_warmup_steps=0,
            num_training_steps=1,
            scheduler_specific_kwargs=options,
        )
    except (TypeError, ValueError) as error:
        schedule_function: Any = TYPE_TO_SCHEDULER_FUNCTION[schedule]
        parameters = inspect.signature(schedule_function).parameters
        known_options = [name for name in parameters if name not in TRAINER_SCHEDULE_PARAMETERS]
        raise UserError(
            "train.lr_scheduler_kwargs",
            got=(
                f"{format_value(options) if options else 'nothing'} with"
                f" train.lr_scheduler_type={schedule.value}"
            ),
            expected=f"options of that schedule ({', '.join(known_options) or 'it has none'})",
        ) from error


def _launch_defaults() -> dict[str, Any]:
    """Return the defaults of fields that depend on the machine and the launch.

    - Every parameter of a draft is used in every step, and its buffers are constants, so DDP need
      not look for unused parameters or send buffers.
    - The Trainer's filter of losses that are not finite would wait for the device in each step, and
      hide such losses.
    - With a GPU, batches are copied while the GPU computes.
    - Without a GPU there is no pinned memory, and several processes need a backend that runs on a
      CPU. `use_cpu` selects one. But it would switch sharding off, so under sharding the backend
      `gloo` is set instead.
    """
    defaults: dict[str, object] = {
        "ddp_find_unused_parameters": False,
        "ddp_broadcast_buffers": False,
        "logging_nan_inf_filter": False,
    }
    if torch.cuda.is_available():
        return {**defaults, "accelerator_config": {"non_blocking": True}}
    defaults["dataloader_pin_memory"] = False
    if not is_sharded():
        return {**defaults, "use_cpu": True}
    return {**defaults, "ddp_backend": "gloo"} if count_processes() > 1 else defaults


def _join_processes(arguments: TrainingArguments) -> None:
    """Start the process group and check that every process of the launch is in it."""
    # Each GPU needs a process of its own. With one process, the Trainer would use DataParallel.
    if arguments.n_gpu > 1:
        raise UserError(
            "accelerate launch",
            got=f"one process on a machine of {arguments.n_gpu} GPUs",
            text=(
                f"accelerate launch: {arguments.n_gpu} GPUs are visible, but only one process was"
                f" started. Add launch=ddp num_processes={arguments.n_gpu}, or set"
                " CUDA_VISIBLE_DEVICES=0."
            ),
            expected=(
                "a process for each GPU (accelerate_configs/ddp.yaml), or CUDA_VISIBLE_DEVICES=0"
            ),
        )
    if count_processes() == 1:
        return

    # Reading the property `device` starts the process group. This process leaves the group when it
    # exits.
    _ = arguments.device
    atexit.register(leave_process_group)
    state = arguments.distributed_state
    if (
        state.distributed_type == DistributedType.NO
        and is_launched_with("FSDP")
        and not torch.cuda.is_available()
    ):
        # For FSDP on a CPU, accelerate leaves the type NO, and would neither shard nor synchronise.
        # With this type it does both.
        state.distributed_type = DistributedType.MULTI_GPU
    if state.num_processes != count_processes() or state.distributed_type == DistributedType.NO:
        raise UserError(
            "accelerate launch",
            got=f"{count_processes()} processes that would each train alone",
            expected=(
                "processes that train together: launch them with accelerate_configs/ddp.yaml, and"
                " remove train.use_cpu"
            ),
        )


def is_launched_with(sharding: str) -> bool:
    """Return whether `accelerate launch` started this process with a kind of sharding.

    Args:
        sharding: `DEEPSPEED` or `FSDP`. accelerate sets an environment variable for each.
    """
    return os.environ.get(f"ACCELERATE_USE_{sharding}", "false").lower() == "true"


def _check_value(name: str, value: object, hint: object, allowed_values: Collection[str]) -> object:
    """Check the value of a field of `train:`, and return it.

    TrainingArguments itself would accept some wrong values, such as a text in place of a number or
    of a mapping.

    Args:
        name: the name of the field.
        value: the value.
        hint: the type of the field in TrainingArguments.
        allowed_values: the texts that the field may have; empty if it has no such list.

    Raises:
        UserError: for a value of another type, an unknown name, or a number out of range.
    """
    # Null is allowed where the type says so, but not for report_to, because transformers would take
    # the null for the name of a tracker.
    kinds = _list_value_types(hint)
    if value is None and NoneType in kinds and name != "report_to":
        return value

    # A field with a list of allowed values, of which it has one or several.
    if allowed_values:
        for item in value if isinstance(value, list) else [value]:
            if item not in allowed_values:
                raise UserError(
                    f"train.{name}",
                    got="null" if item is None else repr(item),
                    expected=f"one of {', '.join(allowed_values)}",
                    nearest=find_nearest(str(item), allowed_values),
                )
        return value

    # Any other field: its value must have the type and be in range. An integer is a valid float.
    allowed_types = kinds | {int} if float in kinds else kinds
    if type(value) not in allowed_types:
        type_names = {NoneType: "null", dict: "mapping"}
        known_names = sorted(type_names.get(kind, kind.__name__) for kind in kinds)
        raise UserError(
            f"train.{name}",
            got="null" if value is None else f"{value!r} ({type(value).__name__})",
            expected=" or ".join(known_names),
        )
    is_finite, _ = FINITE
    is_in_range, expected = RANGES.get(name, FINITE)
    if value is not None and not (is_finite(value) and is_in_range(value)):
        raise UserError(f"train.{name}", got=value, expected=expected)
    return value


def _list_value_types(hint: object) -> set[type]:
    """Return the types that the value of a field may have in a recipe.

    The values of an enumeration are texts in a recipe. Where transformers accepts either a mapping
    or the name of a file that holds one, only the mapping is allowed, because the file would be no
    part of the recipe.

    Args:
        hint: the type of the field in TrainingArguments, such as `dict | str | None`.
    """
    # Split a union into its types. Of a generic type such as `list[str]`, take the `list`.
    kinds: set[type] = set()
    for entry in get_args(hint) or (hint,):
        kind = get_origin(entry) or entry
        if isinstance(kind, type):
            kinds.add(str if issubclass(kind, Enum) else kind)
    return kinds - ({str} if dict in kinds else set())
