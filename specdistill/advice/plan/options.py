"""The options of `specdistill plan`."""

from typing import Literal

from specdistill.recipe.fields import Section, like, option, section
from specdistill.recipe.sections import TargetConfig


class PlannedTarget(Section):
    """The target that is planned for."""

    model: str = like(TargetConfig, "model")
    revision: str | None = like(TargetConfig, "revision")
    trust_remote_code: bool = like(TargetConfig, "trust_remote_code")


class ServingOptions(Section):
    """The settings by which the target is to be served."""

    context: int | None = option(
        None,
        "tokens of each sequence, prompt included; null: 4,096, or the target's longest context if"
        " that is less",
        ge=1,
    )
    batch_size: int = option(1, "number of sequences that are decoded together", ge=1)
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None, "data type of the weights; null: the data types in the config.json files"
    )
    kv_cache_dtype: Literal["float32", "bfloat16", "float16", "fp8"] | None = option(
        None, "data type of the KV cache; null: the data type of the weights"
    )
    tensor_parallel: int = option(
        1, "number of devices among which target and draft are split (tensor parallelism)", ge=1
    )
    device: Literal["h100", "cpu"] | None = option(
        None,
        "device to plan for; cpu: the CPU of this machine; null: cpu if this machine has enough"
        " memory for the target and no GPU, else h100",
    )
    memory_gb: float = option(
        80.0, "memory of one device in GiB; the default for a CPU is this machine's memory", gt=0
    )
    gpu_memory_utilization: float = option(
        0.92, "share of a device's memory that the engine may use, e.g. 0.92 for 92 %", gt=0, le=1
    )


class PlannedTraining(Section):
    """The sizes of the training that is planned."""

    batch_size: int | None = option(
        None,
        "rows of a micro-batch on one device; null: the number in the recipe, else 4",
        ge=1,
        le=1024,
    )
    max_length: int | None = option(
        None,
        "tokens of a row, at most the target's longest context; null: the number in the recipe,"
        " else 2,048",
        ge=8,
        le=2**20,
    )


class PlanOptions(Section):
    """The options of `specdistill plan`."""

    target: PlannedTarget = section(PlannedTarget)
    draft: str | None = option(
        None,
        "an existing draft to plan with: a folder, org/name or org/name@revision; only its"
        " config.json is read",
    )
    serving: ServingOptions = section(ServingOptions)
    training: PlannedTraining = section(PlannedTraining)
    details: bool = option(
        False,
        "also print what takes the memory, the sources of the numbers, and why a method is not"
        " available",
    )
    hub: bool = option(True, "search the Hugging Face Hub for published drafts for the target")
