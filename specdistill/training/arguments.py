"""The `train:` section of a recipe as `transformers.TrainingArguments`, field by field, for the processes of one launch.

`accelerate launch` says in the environment how many processes there are and how they share the model. On a machine without a GPU
accelerate needs help to make them one group: without it each would train alone and overwrite the others' checkpoint, silently.
"""

import atexit
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from accelerate.utils import DistributedType
from transformers import TrainingArguments, get_scheduler
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from specdistill.errors import UserError, nearest, one_line, refusing
from specdistill.launch import check_devices
from specdistill.processes import leave
from specdistill.recipe.load import ALIASES
from specdistill.targets.sharding import num_processes

FSDP = ("2", "FULL_STATE_DICT")  # the one that is put together to be saved

# Numbers that TrainingArguments accepts and with which training would fail later, or train nothing: what a field may be, in words too.
NumberRange = tuple[Callable[[float], bool], str]
AT_LEAST_ONE: NumberRange = (lambda number: number >= 1, "at least 1")
ABOVE_ZERO: NumberRange = (lambda number: number > 0, "above 0")
NUMBER_RANGES: dict[str, NumberRange] = {
    "max_steps": (
        lambda number: number >= 1 or number == -1,
        "at least 1, or -1 for train.num_train_epochs",
    ),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), AT_LEAST_ONE),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "eval_accumulation_steps", "save_total_limit"), AT_LEAST_ONE
    ),
    **dict.fromkeys(
        ("num_train_epochs", "logging_steps", "eval_steps", "save_steps", "adam_epsilon"),
        ABOVE_ZERO,
    ),
    **dict.fromkeys(
        ("learning_rate", "weight_decay", "max_grad_norm", "seed"),
        (lambda number: number >= 0, "at least 0"),
    ),
    "dataloader_num_workers": (lambda number: 0 <= number <= 1024, "0 to 1024"),
    **dict.fromkeys(
        ("adam_beta1", "adam_beta2"), (lambda number: 0 <= number < 1, "at least 0 and below 1")
    ),
    "ddp_timeout": (lambda seconds: seconds >= 30, "30 or more"),
}
# Names that a field's own definition does not list: trackers, and what compiles.
NAMES = {
    "report_to": ["all", "none", *INTEGRATION_TO_CALLBACK],
    "torch_compile_backend": ["inductor", "aot_eager", "eager"],
    # Not those with CUDA graphs, which would write over the features of the layers before.
    "torch_compile_mode": ["default", "max-autotune-no-cudagraphs"],
}
# Fields that are read only where another one is set.
READ_WITH = {
    **dict.fromkeys(
        ("dataloader_persistent_workers", "dataloader_multiprocessing_context"),
        "dataloader_num_workers",
    ),
    "activation_checkpointing_kwargs": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "gradient_checkpointing",
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode"), "torch_compile"),
}
COMPILE = (
    "torch_compile",
    "torch_compile_backend",
    "torch_compile_mode",
)  # read by specdistill.targets.frozen


def training_arguments(train: Mapping[str, Any], **defaults: Any) -> TrainingArguments:
    """Build the arguments from `train:`; `defaults` fill what it leaves out. Starts the process group of a distributed launch.

    Raises UserError for unknown or mistyped fields, and for a launch with more processes than GPUs or whose processes would each train
    alone.
    """
    check_devices(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), "accelerate launch")
    hints = get_type_hints(TrainingArguments)
    known = {
        entry.name: entry.metadata for entry in dataclasses.fields(TrainingArguments) if entry.init
    }
    fields = dict(defaults)
    for name, value in train.items():
        if name not in known:
            close = ALIASES.get(name) or (
                f"train.{near}" if (near := nearest(name, known)) else None
            )
            expected = "a field of transformers.TrainingArguments"
            raise UserError(f"train.{name}", got="an unknown key", expected=expected, nearest=close)
        if name == "report_to" and isinstance(value, str):
            value = value.split(",")
        fields[name] = _checked(
            name, value, hints[name], NAMES.get(name) or known[name].get("choices") or ()
        )
    for name, other in READ_WITH.items():
        if fields.get(name) and not fields.get(other):
            raise UserError(
                f"train.{name}", got=fields[name], expected=f"no such key without train.{other}"
            )
    if fields.get("output_dir") is None:
        raise UserError("train.output_dir", got="nothing", expected="a folder")
    if metric := fields.get("metric_for_best_model"):
        fields.setdefault(
            "greater_is_better", "loss" not in metric
        )  # transformers takes loss_1 for a score
    if fields.get("torch_compile") and shards_weights():
        expected = "false, or a launch that leaves weights whole: ddp, zero1, zero2"
        raise UserError("train.torch_compile", got="true with sharded weights", expected=expected)
    if fields.get("torch_compile") and (
        fields.get("activation_checkpointing") or fields.get("gradient_checkpointing")
    ):
        raise UserError(
            "train.torch_compile",
            got="true with activation checkpointing",
            expected="one of the two",
        )
    for own in COMPILE:
        fields.pop(own, None)  # the Trainer would compile the step as a whole
    precision = _take_precision(fields)
    try:
        arguments = TrainingArguments(**{**_launch_defaults(), **fields})
    except (ValueError, TypeError, OSError) as error:
        raise UserError(
            "train",
            got=one_line(str(error)),
            expected="fields that TrainingArguments accepts together",
        ) from error
    if precision == "fp16" and arguments.device.type == "cpu":
        expected = "train.bf16=true, or neither: accelerate would train in float32 and not say so"
        raise UserError("train.fp16", got="float16 on a CPU", expected=expected)
    _adapt_sharding(arguments, precision)
    _check_trackers_and_schedule(arguments)
    _join_processes(arguments)
    return arguments


def check_precision(arguments: TrainingArguments, target_dtype: str) -> None:
    """Raises UserError for a 16-bit target whose features a float32 draft could not read: that takes mixed precision."""
    if target_dtype != "float32" and autocast_dtype(arguments) is None:
        raise UserError(
            "train.bf16",
            got=f"false with target.dtype={target_dtype}",
            expected="true, or train.fp16=true",
        )


def autocast_dtype(arguments: TrainingArguments) -> torch.dtype | None:
    """What matrices are multiplied in under mixed precision; None without it."""
    plugin = arguments.deepspeed_plugin
    if plugin is not None:
        return torch.bfloat16 if plugin.deepspeed_config["torch_autocast"]["enabled"] else None
    return torch.bfloat16 if arguments.bf16 else torch.float16 if arguments.fp16 else None


def is_sharded() -> bool:
    """Whether this launch shards the draft: by DeepSpeed's ZeRO or torch's FSDP."""
    return launched_with("DEEPSPEED") or launched_with("FSDP")


def shards_weights() -> bool:
    """Whether a process of this launch holds a part of the draft's weights only, not just of the optimizer's state."""
    return launched_with("FSDP") or (
        launched_with("DEEPSPEED") and os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"
    )


def _take_precision(fields: dict[str, Any]) -> str:
    """`bf16`, `fp16` or `no`, as the recipe says or else the launch: set in `fields` for replicated drafts, removed for sharded ones.

    DeepSpeed and FSDP would turn the weights to 16 bits, each in its own way. Left in float32, and autocast, they learn the same
    everywhere.
    """
    asked = [name for name in ("bf16", "fp16") if fields.get(name)]
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    precision: str = next(iter(asked), launched if not {"bf16", "fp16"} & set(fields) else "no")
    if not is_sharded():
        if precision != "no":
            fields[precision] = True
        return precision
    if precision == "fp16":
        expected = "train.bf16=true, or accelerate_configs/ddp.yaml"
        raise UserError("train.fp16", got="true under DeepSpeed or FSDP", expected=expected)
    fields.pop("bf16", None)
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    return precision


def _adapt_sharding(arguments: Any, precision: str) -> None:
    """Let a sharded launch autocast (see `_take_precision`), and load models whole: transformers shards what it loads under ZeRO-3.

    ZeRO-3 puts drafts together to save them, whatever its configuration says. Raises UserError for an FSDP that would not, and for
    checkpoints of FSDP that could not be put together again.
    """
    if not is_sharded():
        return
    if arguments.deepspeed_plugin is None:
        arguments.bf16 = precision == "bf16"
        kind = (
            os.environ.get("FSDP_VERSION", "1"),
            os.environ.get("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT"),
        )
        if kind != FSDP:
            got = f"a configuration with FSDP {kind[0]} and fsdp_state_dict_type {kind[1]}"
            expected = f"fsdp_version {FSDP[0]} and {FSDP[1]}, as fsdp2.yaml has them"
            raise UserError("accelerate launch", got=got, expected=expected)
        if arguments.save_on_each_node:
            expected = "false, with a folder that all machines share, or accelerate_configs/zero3_multinode.yaml"
            got = "true under FSDP, whose checkpoints are in parts of one whole"
            raise UserError("train.save_on_each_node", got=got, expected=expected)
        return
    arguments.deepspeed_plugin.deepspeed_config["zero_optimization"][
        "stage3_gather_16bit_weights_on_model_save"
    ] = True
    settings = {
        "enabled": precision == "bf16",
        "dtype": "bfloat16",
        "lower_precision_safe_modules": [],
    }
    arguments.deepspeed_plugin.deepspeed_config["torch_autocast"] = settings
    if arguments.save_on_each_node:
        arguments.deepspeed_plugin.deepspeed_config["checkpoint"] = {"use_node_local_storage": True}
    unset_hf_deepspeed_config()


def _check_trackers_and_schedule(arguments: Any) -> None:
    """Build once what the Trainer would build later, when the data is made: raises UserError for what is not installed or lacks options."""
    for tracker in arguments.report_to:
        try:
            INTEGRATION_TO_CALLBACK[tracker]()
        except (ImportError, RuntimeError, ValueError, KeyError) as error:
            got, expected = f"{tracker} ({error})", "none alone, or what is installed and set up"
            missing = f"train.report_to: {tracker} is not installed. Run: pip install {tracker}" * (
                "install" in str(error)
            )
            raise UserError("train.report_to", got=got, expected=expected, text=missing) from error
    schedule, options = arguments.lr_scheduler_type, arguments.lr_scheduler_kwargs
    optimizer = torch.optim.SGD([torch.zeros(1)], arguments.learning_rate)
    what = f"{schedule.value} with train.lr_scheduler_kwargs={options}"
    with refusing(
        (TypeError, ValueError), "train.lr_scheduler_type", what, "a schedule with what it needs"
    ):
        get_scheduler(
            schedule,
            optimizer,
            num_warmup_steps=0,
            num_training_steps=1,
            scheduler_specific_kwargs=options,
        )


def _launch_defaults() -> dict[str, Any]:
    """Every parameter of a draft is used in every step, and its buffers are constants; the Trainer's filter of losses that are not finite
    would wait for the device in each step, and hide them. With a GPU batches are copied while it computes; without one there is no pinned
    memory, and a backend for several processes.
    """
    defaults: dict[str, Any] = {
        "ddp_find_unused_parameters": False,
        "ddp_broadcast_buffers": False,
        "logging_nan_inf_filter": False,
    }
    if torch.cuda.is_available():
        return {**defaults, "accelerator_config": {"non_blocking": True}}
    defaults["dataloader_pin_memory"] = False
    if not is_sharded():
        return {**defaults, "use_cpu": True}  # under sharding that would switch it off
    return {**defaults, "ddp_backend": "gloo"} if num_processes() > 1 else defaults


def _join_processes(arguments: TrainingArguments) -> None:
    """Start the process group and check that every process of the launch is in it."""
    if arguments.n_gpu > 1:
        got = f"one process on a machine of {arguments.n_gpu} GPUs"
        expected = "a process for each GPU (accelerate_configs/ddp.yaml), or CUDA_VISIBLE_DEVICES=0"
        raise UserError("accelerate launch", got=got, expected=expected)
    if num_processes() == 1:
        return
    _ = arguments.device  # building the device starts the group
    atexit.register(leave)
    state = arguments.distributed_state
    if (
        state.distributed_type == DistributedType.NO
        and launched_with("FSDP")
        and not torch.cuda.is_available()
    ):
        # On a CPU accelerate leaves NO, and then neither shards nor synchronises.
        state.distributed_type = DistributedType.MULTI_GPU
    if state.num_processes != num_processes() or state.distributed_type == DistributedType.NO:
        raise UserError(
            "accelerate launch",
            got=f"{num_processes()} processes that would each train alone",
            expected="processes of one group, as accelerate_configs/ddp.yaml starts them, and no train.use_cpu",
        )


def launched_with(sharding: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{sharding}", "false").lower() == "true"


def _checked(name: str, value: Any, hint: Any, choices: Iterable[str]) -> Any:
    """The value, if it is of a type that the field has, one of its names, and a number within its limits."""
    kinds, names = _accepted(hint)
    names = [*choices, *names]
    if (
        value is None and NoneType in kinds and name != "report_to"
    ):  # there null would be a tracker of that name
        return value
    if names:
        value = (
            "no" if value is False and "no" in names else value
        )  # YAML reads an unquoted no as false
        for item in value if isinstance(value, list) else [value]:
            if item not in names:
                close = nearest(str(item), names)
                raise UserError(
                    f"train.{name}",
                    got=repr(item),
                    expected=f"one of {', '.join(names)}",
                    nearest=close,
                )
        return value
    if type(value) not in kinds | ({int} if float in kinds else set()):
        known = sorted(
            {NoneType: "null", dict: "mapping"}.get(kind, kind.__name__) for kind in kinds
        )
        raise UserError(
            f"train.{name}", got=f"{value!r} ({type(value).__name__})", expected=" or ".join(known)
        )
    holds, expected = NUMBER_RANGES.get(name, (math.isfinite, "a finite number"))
    if isinstance(value, int | float) and not (math.isfinite(value) and holds(value)):
        raise UserError(f"train.{name}", got=value, expected=expected)
    return value


def _accepted(hint: Any) -> tuple[set[type], list[str]]:
    """(the types of a field's values, the names of its enumerations).

    What may be a mapping must be one: a file of its own would be no part of the recipe.
    """
    accepted = set(get_args(hint)) or {hint}
    kinds = {kind for entry in accepted if isinstance(kind := get_origin(entry) or entry, type)}
    members = accepted.union(*map(get_args, accepted))
    names = [
        member.value
        for kind in members
        if isinstance(kind, type) and issubclass(kind, Enum)
        for member in kind
    ]
    return kinds - ({str} if dict in kinds else set()), names
