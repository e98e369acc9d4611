"""What training a draft takes, by its recipe or by published figures: memory, hours, and how it is launched. Nothing is measured."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from specdistill.files.documents import read_yaml
from specdistill.losses.chunked import BLOCK
from specdistill.methods import METHODS
from specdistill.methods.sizes import Described, ModelShape, ParameterCounts, PlannedDraft, weights_read
from specdistill.planning.accounting import H100, training_step
from specdistill.planning.budget import MOST_DEVICES, USABLE
from specdistill.project import LAUNCHES, RECIPES

# float32 weight, gradient and two AdamW moments; Muon keeps one moment of the matrices.
BYTES_PER_TRAINED, BYTES_PER_COPIED = 16, 4
TRAINING_FLOPS = 4e14  # a second, of one H100 or H200 in bfloat16: 40 % of what its tensor cores can
BATCH_SIZE, MAX_LENGTH = 4, 2048
GPUS_PER_MACHINE = 8
# The last line of a recipe's header that starts accelerate.
LAUNCH = re.compile(r"accelerate_configs/(\w+)\.yaml(?: --num_processes (\d+))?")
SMALL = 100_000_000  # parameters of the largest target that the recipes of small ones are meant for as they stand


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a micro-batch on one device, and tokens of a row; None: as the recipe has it, else 4 rows of 2,048 tokens."""

    batch_size: int | None = None
    max_length: int | None = None

    def of(self, recipe: Mapping[str, Any], longest: int | None) -> tuple[int, int]:
        """For a recipe with these keys, or for none, and a target with this context."""
        batch_size = self.batch_size or recipe.get("train", {}).get("per_device_train_batch_size", BATCH_SIZE)
        length = self.max_length or recipe.get("data", {}).get("max_length", MAX_LENGTH)
        return batch_size, min(length, longest or length)


A_BATCH = MicroBatch()


@dataclass(frozen=True)
class Launch:
    """How training is launched. configuration: a name under accelerate_configs/, None for one process without a launcher. is_sharded: the
    processes share the target's layers. device_bytes: what each of them holds.
    """

    configuration: str | None
    num_processes: int
    is_sharded: bool
    device_bytes: int


def training_of(
    method: str,
    planned: PlannedDraft,
    target: Described,
    recipe: str | None,
    settings: Mapping[str, Any],
    batch: tuple[int, int],
    tokens: int | None,
    device_memory: float,
    *,
    computed: bool,
) -> dict[str, Any]:
    """What training takes, as fields of a row. settings: keys of `recipe` where the row describes its run."""
    if planned.shape is None:
        nothing = None if tokens is None else 0
        return {"disk_bytes": nothing, "training_memory_bytes": 0, "training_memory": {}, "training_hours": nothing}
    parts, cost, itemsize = planned.parts, METHODS[method].cost, target.itemsize()
    num_tokens, read = batch[0] * batch[1], weights_read(target.model)
    unrolled = {name: value for name, value in settings.get("draft", {}).items() if name == "ttt_steps"}
    positions = unrolled.get("ttt_steps", cost.positions)
    memory = training_memory(parts, target.parameters * itemsize, planned.shape, planned.vocabulary, positions, num_tokens)
    rate = TRAINING_FLOPS / (2 * read + 6 * parts.read * positions)
    is_computed = computed and planned.build is not None
    if is_computed:
        step = training_step(
            method, planned.build, {**planned.counted_with, **unrolled}, target, rows=batch[0], length=batch[1]
        )
        memory["activations"] = step.peak_bytes
        rate = H100.tokens_per_second(step, num_tokens, 2 * read * num_tokens)
    launch, trained = _launch(target, memory, device_memory), tokens
    if settings:
        assert recipe is not None
        configuration, number = launch_of(recipe)
        is_sharded = settings["target"].get("shard") == "layers"
        launch = _launched(target, memory, configuration, number, is_sharded=is_sharded)
        per_step = batch[0] * batch[1] * settings["train"].get("gradient_accumulation_steps", 1) * number
        trained = settings["train"]["max_steps"] * per_step
    return {
        "disk_bytes": None if tokens is None else cost.features * target.text.hidden_size * itemsize * tokens,
        "micro_batch": batch,
        "trained_tokens": trained,
        "training_memory_bytes": sum(memory.values()),
        "training_memory": memory,
        "training_hours": None if trained is None else trained / rate / 3600,
        "training_is_computed": is_computed,
        "training_devices": launch and launch.num_processes,
        "training_launch": launch,
    }


def _launch(target: Described, memory: Mapping[str, int], device_memory: float) -> Launch | None:
    """The fewest devices, a power of two, on which training fits, and the first configuration under which it does."""
    for number in (1 << power for power in range(MOST_DEVICES.bit_length())):
        names = (
            (None,) if number == 1 else ("ddp", "zero2") if number <= GPUS_PER_MACHINE else ("ddp_multinode", "zero3_multinode")
        )
        for name in names:
            launch = _launched(target, memory, name, number, is_sharded=number > 1)
            if launch.device_bytes <= USABLE * device_memory:
                return launch
    return None


def _launched(
    target: Described, memory: Mapping[str, int], configuration: str | None, number: int, *, is_sharded: bool
) -> Launch:
    """A launch with what each process holds: of the target's layers a part and one that is gathered, of the 16 bytes of a trained
    parameter what the configuration leaves.
    """
    layers = target.itemsize() * sum(size.numel() for name, size in target.model.named_parameters() if ".layers." in name)
    held = layers / number + layers / target.text.num_hidden_layers if is_sharded else layers
    shares = {"zero2": 0.25 + 0.75 / number, "zero3": 0.25 + 1 / number}
    kept = shares.get((configuration or "").partition("_")[0], 1.0) * memory["draft"]
    total = sum(memory.values()) - layers + held - memory["draft"] + kept
    return Launch(configuration, number, is_sharded, int(total))


def recipe_for(method: str, target: str) -> tuple[str | None, dict[str, Any]]:
    """The target's own recipe of a method, with its keys; else that of small targets, or of pico, without."""
    names = (path.relative_to(RECIPES).with_suffix("").as_posix() for path in sorted(RECIPES.rglob("*.yaml")))
    found = {name: keys for name in names if (keys := read_recipe(name)).get("method") == method}
    if own := next((name for name, keys in found.items() if keys["target"]["model"] == target), None):
        return own, found[own]
    return next((name for folder in ("small", "pico") for name in found if name.startswith(f"{folder}/")), None), {}


def header_commands(recipe: str) -> list[str]:
    """The commands in a shipped recipe's header, in their order."""
    lines = (RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line.removeprefix("#   ") for line in lines if line.startswith("#   "))
    return [" ".join(command.split()) for command in text.replace("\\\n", " ").splitlines()]


def launch_of(recipe: str) -> tuple[str, int]:
    """The configuration and the number of processes with which a shipped recipe's header starts it."""
    found = LAUNCH.search("\n".join(header_commands(recipe)))
    assert found is not None, recipe
    return found[1], int(found[2] or read_yaml(LAUNCHES / f"{found[1]}.yaml")["num_processes"])


@cache
def read_recipe(name: str) -> dict[str, Any]:
    """A shipped recipe's keys."""
    keys: dict[str, Any] = read_yaml(RECIPES / f"{name}.yaml")
    return keys


def training_memory(
    parts: ParameterCounts, target_bytes: int, shape: ModelShape, vocabulary: int, num_steps: int, num_tokens: int
) -> dict[str, int]:
    """Device memory of online training by part, roughly: the draft is counted with gradients and AdamW in float32.

    Activations of each token and drafted position: 28H + 4I numbers a layer in bfloat16, as `specdistill.planning.accounting`
    counts them in EAGLE-3 heads; and the logits of a block of the loss.

    vocabulary: tokens the draft's logits span. num_steps: drafted positions. num_tokens: in a micro-batch.
    """
    layers = 2 * (28 * shape.hidden_size + 4 * shape.intermediate_size) * parts.num_layers
    activations = num_tokens * num_steps * layers + 2 * BLOCK * vocabulary
    return {
        "target": target_bytes,
        "draft": BYTES_PER_TRAINED * parts.parameters,
        "frozen tables": BYTES_PER_COPIED * parts.copied,
        "activations": activations,
    }
