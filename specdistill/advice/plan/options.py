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
        None, "tokens of a sequence; null: 4,096, or the target's limit if that is less", ge=1
    )
    batch_size: int = option(1, "sequences decoded together", ge=1)
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None, "data type of all weights; null: the one in the configs"
    )
    kv_cache_dtype: Literal["float32", "bfloat16", "float16", "fp8"] | None = option(
        None, "data type of the KV cache; null: the one of the weights"
    )
    tensor_parallel: int = option(1, "devices that share target and draft", ge=1)
    device: Literal["h100", "cpu"] | None = option(
        None,
        "device that serves and trains; cpu: this machine's; null: cpu on a machine without a"
        " GPU that holds the target",
    )
    memory_gb: float = option(
        80.0, "memory of one device in GiB; default for a CPU: this machine's", gt=0
    )
    gpu_memory_utilization: float = option(
        0.92, "share of the memory that the engine uses", gt=0, le=1
    )


class PlannedTraining(Section):
    """The sizes of the training that is planned."""

    batch_size: int | None = option(
        None, "rows per micro-batch on one device; null: the recipe's, else 4", ge=1, le=1024
    )
    max_length: int | None = option(
        None,
        "tokens of a row, at most the target's context; null: the recipe's, else 2,048",
        ge=8,
        le=2**20,
    )


class PlanOptions(Section):
    """The options of `specdistill plan`."""

    target: PlannedTarget = section(PlannedTarget)
    draft: str | None = option(
        None,
        "a draft that exists: a folder, org/name or org/name@revision; only its config is read",
    )
    serving: ServingOptions = section(ServingOptions)
    training: PlannedTraining = section(PlannedTraining)
    details: bool = option(
        False,
        "print what takes the memory, where the numbers are from, and why a method is not"
        " available",
    )
    hub: bool = option(True, "search the Hub for drafts of the target")
