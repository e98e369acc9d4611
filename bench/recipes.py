"""Compute what the recipes of published targets need, from recipes and config.json files.

Nothing is measured, and no server is asked.

    # exits with 1 if the record, a recipe's header or docs/recipes.md says something else
    python bench/recipes.py
    python bench/recipes.py record=true  # writes them

The numbers are counted as `specdistill plan` counts them: weights, gradients and AdamW's state in
float32, frozen tables, the target or the part of it that a GPU holds, and activations. For the
activations, the code of a training step runs over tensors without content, if the method can do
that.
"""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, cast

from bench.pages import write_between
from specdistill.advice.plan.accounting import H100, Device
from specdistill.advice.plan.estimates import describe_launch, estimate_training_needs, launch_of
from specdistill.advice.plan.reading import read_model_config
from specdistill.advice.plan.run_estimate import CHECKPOINT_BYTES
from specdistill.cli.command import run
from specdistill.common.errors import ExitCode
from specdistill.common.progress import PREPARED_BYTES
from specdistill.common.project import RECIPES, ROOT
from specdistill.data.produce.job import estimate_rows
from specdistill.evaluation.report.text import format_table
from specdistill.methods import METHODS
from specdistill.methods.recipe import Recipe
from specdistill.methods.sizes import ModelConfigInfo, PlannedDraft
from specdistill.recipe.fields import Section, option
from specdistill.recipe.load import REQUIRED_MARK, load_recipe, merge_values
from specdistill.training.length import count_steps

# The recorded numbers, and the page with their table.
RECORD = Path(__file__).with_name("results") / "recipes.json"
PAGE = ROOT / "docs" / "recipes.md"

# The line in a recipe's header that this script writes.
COMPUTED_LINE = re.compile(r"^# Computed: .*$", re.MULTILINE)
TARGET_ITEMSIZE = 2  # bytes of a weight in bfloat16
CHECKPOINTS = 2  # the number of checkpoints that are kept: the best and the last one
# Without packing each answer has a row of its own, so the number of rows is not known before the
# answers are generated. The hours of such a recipe are those of this many answers.
NUM_ANSWERS = 10_000
HEAD = (
    "recipe",
    "target",
    "draft",
    "launch",
    "tokens a step × steps",
    "GB on each GPU",
    "hours",
    "GB of disk",
)


class RecipeSettings(TypedDict):
    """The settings of a recipe that its needs are computed from.

    Attributes:
        method: the method.
        target: the target; REQUIRED_MARK if the user of the recipe chooses it.
        launch: the launch configuration that the header names.
        num_processes: processes of this launch.
        gpu_gb: GB of memory of each GPU.
        shard: how the processes share the target; None if they do not.
        is_stored: whether hidden states are stored, so that no step runs the target's layers.
        is_packed: whether several documents share a row.
        validation_fraction: the share of the rows that is held out.
        rows: rows of a micro-batch.
        gradient_accumulation_steps: micro-batches of a step.
        max_length: tokens of a row.
        num_tokens: tokens of the training data.
        num_train_epochs: passes over the training data.
        ttt_steps: steps of the unroll; 1 for methods without one.
        draft: the other keys of the section `draft`.
    """

    method: str
    target: str
    launch: str
    num_processes: int
    gpu_gb: int
    shard: str | None
    is_stored: bool
    is_packed: bool
    validation_fraction: float
    rows: int
    gradient_accumulation_steps: int
    max_length: int
    num_tokens: int
    num_train_epochs: float
    ttt_steps: int
    draft: dict[str, object]


class RecipeNeeds(TypedDict):
    """The needs of a recipe's training.

    Attributes:
        of: the settings of the recipe.
        target_parameters: parameters of the target.
        draft_parameters: parameters of the draft.
        tokens_a_step: tokens of a step, over all processes.
        steps: optimizer steps; if rows are not packed, the steps for NUM_ANSWERS answers.
        gpu_gb: GB on each GPU.
        hours: hours of these steps, on all GPUs at the same time.
        target_gb: GB of the target in bfloat16.
        disk_gb: GB of disk in addition to the target.
    """

    of: RecipeSettings
    target_parameters: int
    draft_parameters: int
    tokens_a_step: int
    steps: int
    gpu_gb: int
    hours: float
    target_gb: int
    disk_gb: int


class Options(Section):
    """The options of this script."""

    record: bool = option(
        False,
        "write the computed numbers to bench/results/recipes.json, the headers of the recipes and"
        " docs/recipes.md",
    )


def main(options: Options) -> ExitCode:
    """Compute the memory, time and disk space that the published recipes need.

    With `record=true` the results are written to the record, the recipes and docs/recipes.md.

    Returns:
        CHECK_FAILED if the results differ from the record and are not written, else DONE.
    """
    # Compute the needs of every recipe whose header has a line `# Computed: …`.
    needs_by_recipe = {}
    for name in list_published_recipes():
        needs_by_recipe[name] = compute_needs(name)
        print(name, json.dumps(needs_by_recipe[name]), flush=True)

    # Compare with the record. If asked for, write the record, the table and the headers.
    is_recorded = RECORD.exists() and needs_by_recipe == load_record()
    if options.record:
        RECORD.write_text(json.dumps(needs_by_recipe, indent=1) + "\n", encoding="utf-8")
        write_between(PAGE, "recipes", format_needs_table(needs_by_recipe))
        for name, needs in needs_by_recipe.items():
            path = RECIPES / f"{name}.yaml"
            text = path.read_text(encoding="utf-8")
            text = COMPUTED_LINE.sub(format_header_line(needs), text)
            path.write_text(text, encoding="utf-8")
    return ExitCode.DONE if is_recorded or options.record else ExitCode.CHECK_FAILED


def load_record() -> dict[str, RecipeNeeds]:
    """Read bench/results/recipes.json: the needs of each recipe, by its name."""
    return cast("dict[str, RecipeNeeds]", json.loads(RECORD.read_text(encoding="utf-8")))


def list_published_recipes() -> list[str]:
    """Return the names of the recipes for published models, such as `llama-3.1-8b/eagle3`.

    They are the recipes whose header has a line `# Computed: …`, which this script writes.
    """
    names = []
    for path in sorted(RECIPES.glob("*/*.yaml")):
        if COMPUTED_LINE.search(path.read_text(encoding="utf-8")):
            names.append(path.relative_to(RECIPES).with_suffix("").as_posix())
    return names


def read_settings(name: str) -> RecipeSettings:
    """Read the settings of a recipe from which its memory, time and disk space are computed."""
    # Load the recipe. If the user has to choose the target, any name serves here, because the
    # target's sizes are read from the config.json next to the recipe.
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    values = merge_values([f"recipe={name}"])
    model = values["target"]["model"]
    arguments = [f"recipe={name}"]
    if model == REQUIRED_MARK:
        arguments.append(f"target.model={name}")
    recipe: Any = load_recipe(Recipe, arguments)

    # Read the launch and the memory of a GPU from the header.
    launch, num_processes = launch_of(name)
    memory = re.search(r"GPUs of (\d+) GB", text)
    assert memory, name

    # Methods whose draft reads no hidden states have no section `hidden_states`.
    stored = getattr(recipe, "hidden_states", None)
    return {
        "method": recipe.method,
        "target": model,
        "launch": launch,
        "num_processes": num_processes,
        "gpu_gb": int(memory[1]),
        "shard": recipe.target.shard,
        "is_stored": bool(stored and stored.mode != "online"),
        "is_packed": recipe.data.packing,
        "validation_fraction": recipe.data.validation_fraction,
        "rows": recipe.train["per_device_train_batch_size"],
        "gradient_accumulation_steps": recipe.train.get("gradient_accumulation_steps", 1),
        "max_length": recipe.data.max_length,
        "num_tokens": recipe.data.regenerate.num_tokens,
        "num_train_epochs": recipe.train["num_train_epochs"],
        "ttt_steps": getattr(recipe.draft, "ttt_steps", 1),
        "draft": {key: value for key, value in values["draft"].items() if key != "ttt_steps"},
    }


def compute_needs(name: str) -> RecipeNeeds:
    """Compute the memory, time and disk space that the training of a recipe needs."""
    settings = read_settings(name)
    target, draft = plan_recipe(name, settings)
    num_processes = settings["num_processes"]

    # Estimate the memory of one process, and its tokens per second.
    memory, rate = estimate_training_needs(
        settings["method"],
        draft,
        target,
        find_device(settings["gpu_gb"]),
        draft_keys={"ttt_steps": settings["ttt_steps"]},
        micro_batch=(settings["rows"], settings["max_length"]),
        itemsize=TARGET_ITEMSIZE,
        runs_layers=not settings["is_stored"],
    )
    # With stored hidden states, no step runs the target's layers. So no GPU holds these layers.
    if settings["is_stored"]:
        memory["target"] -= count_layer_bytes(target)

    # Find the memory that each GPU needs in this launch. A step has the tokens of all processes.
    is_sharded = settings["shard"] == "layers"
    launch = describe_launch(
        target, memory, settings["launch"], num_processes, is_sharded=is_sharded
    )
    tokens_per_process = settings["rows"] * settings["max_length"]
    tokens_per_process *= settings["gradient_accumulation_steps"]
    tokens = tokens_per_process * num_processes
    steps = count_recipe_steps(settings)
    hours = steps * tokens / (rate * num_processes) / 3600
    return {
        "of": settings,
        "target_parameters": target.parameters,
        "draft_parameters": draft.parts.parameters,
        "tokens_a_step": tokens,
        "steps": steps,
        "gpu_gb": round(launch.device_bytes / 1e9),
        "hours": float(f"{hours:.2g}"),
        "target_gb": round(2 * target.parameters / 1e9),
        "disk_gb": round(count_disk_bytes(settings, target, draft) / 1e9),
    }


def count_recipe_steps(settings: RecipeSettings) -> int:
    """Return the number of training steps of a recipe.

    The steps follow from the number of rows. With packing, rows are filled one after the other, so
    their number follows from the number of training tokens. Without packing, each answer of the
    target is a row. How many answers there will be is not known, so NUM_ANSWERS is assumed.
    """
    num_rows = NUM_ANSWERS
    if settings["is_packed"]:
        num_rows = estimate_rows(
            settings["num_tokens"], settings["max_length"], settings["validation_fraction"]
        )
    train = {
        "per_device_train_batch_size": settings["rows"],
        "gradient_accumulation_steps": settings["gradient_accumulation_steps"],
        "num_train_epochs": settings["num_train_epochs"],
    }
    num_steps = count_steps(train, num_rows, settings["num_processes"])
    assert num_steps is not None  # None is only returned without a number of rows
    return num_steps


def plan_recipe(name: str, settings: RecipeSettings) -> tuple[ModelConfigInfo, PlannedDraft]:
    """Return the target and the draft of a recipe, with their sizes.

    The sizes come from config.json files in the recipe's folder, so nothing is downloaded.
    """
    folder = (RECIPES / name).parent
    target = replace(read_model_config(str(folder), key="target.model"), name=settings["target"])
    draft_config = None
    if settings["method"] == "draft_model" and (folder / "draft").is_dir():
        draft_config = read_model_config(str(folder / "draft"), key="draft.init")
    advice = METHODS[settings["method"]].load().advice
    return target, advice.plan_draft(target, draft_config, settings["draft"])


def count_disk_bytes(
    settings: RecipeSettings, target: ModelConfigInfo, draft: PlannedDraft
) -> float:
    """Return the bytes of disk that training takes: checkpoints, rows and stored hidden states."""
    # In the prepared rows, the ids and masks of a token take PREPARED_BYTES.
    bytes_per_token = PREPARED_BYTES
    if settings["is_stored"]:
        # For each token `num_features` hidden states are stored, in two bytes per number.
        num_features = METHODS[settings["method"]].features
        bytes_per_token += num_features * target.text.hidden_size * 2

    # A checkpoint has CHECKPOINT_BYTES for each parameter of the draft: its weight and the state of
    # the optimizer. CHECKPOINTS of them are kept.
    bytes_per_checkpoint = CHECKPOINT_BYTES * draft.parts.parameters
    checkpoint_bytes = CHECKPOINTS * bytes_per_checkpoint
    return checkpoint_bytes + bytes_per_token * settings["num_tokens"]


def find_device(gpu_gb: int) -> Device:
    """Return the GPU with this memory: an H100 with 80 GB, an H200 with 141 GB."""
    return {80: H100, 141: Device("H200", flops=989e12, bandwidth=4.8e12)}[gpu_gb]


def count_layer_bytes(target: ModelConfigInfo) -> int:
    """Return the bytes of the target's transformer layers, without embeddings and LM head.

    Training on stored hidden states does not need these layers.
    """
    # Weights of the transformer layers have `.layers.` in their names.
    sizes = [
        parameter.numel()
        for name, parameter in target.model.named_parameters()
        if ".layers." in name
    ]
    return TARGET_ITEMSIZE * sum(sizes)


def format_header_line(needs: RecipeNeeds) -> str:
    """Return the line `# Computed: …` of a recipe's header: its memory, hours and disk space."""
    # With packing, the hours are those of the whole training. Without packing, each answer of the
    # target is a row. How many answers there will be is not known, so the hours are those of
    # NUM_ANSWERS answers.
    settings = needs["of"]  # the settings of the recipe
    work = f"{needs['tokens_a_step'] * needs['steps'] / 1e6:,.0f}M tokens"
    if not settings["is_packed"]:
        work = f"every {NUM_ANSWERS:,} answers"
    return (
        f"# Computed: {needs['gpu_gb']} GB on each GPU, {needs['hours']:g} hours for {work},"
        f" {needs['disk_gb']:,} GB of disk in addition to the target's {needs['target_gb']:,}."
    )


def format_needs_table(needs_by_recipe: dict[str, RecipeNeeds]) -> str:
    """Return the table of docs/recipes.md, with a row for each recipe."""
    return format_table(HEAD, [_format_row(name, needs) for name, needs in needs_by_recipe.items()])


def _format_row(name: str, needs: RecipeNeeds) -> tuple[str, ...]:
    """Return the cells of a recipe's row, in the order of the columns HEAD."""
    settings = needs["of"]

    # Without packing, each answer is a row. So the cell shows the steps as the number of answers
    # divided by the rows of a step.
    steps = f"{needs['steps']:,}"
    hours = f"{needs['hours']:g}"
    if not settings["is_packed"]:
        steps = f"answers / {needs['tokens_a_step'] // settings['max_length']}"
        hours = f"{hours} for every {NUM_ANSWERS:,} answers"
    gpus = f"{settings['num_processes']} GPUs of {settings['gpu_gb']} GB"
    shard = " `target.shard=layers`" if settings["shard"] == "layers" else ""
    # If the recipe leaves the choice of the target to its user, show the name of the recipe's
    # folder in place of the target's name, e.g. `deepseek-v3`.
    target = f"`{settings['target']}`"
    if settings["target"] == REQUIRED_MARK:
        target = f"{name.partition('/')[0]} in bfloat16"
    return (
        f"[`{name}`](../recipes/{name}.yaml)",
        f"{target}, {_format_parameters(needs['target_parameters'])}",
        _format_parameters(needs["draft_parameters"]),
        f"`{settings['launch']}`{shard}, {gpus}",
        f"{needs['tokens_a_step']:,} × {steps}",
        f"{needs['gpu_gb']}",
        hours,
        f"{needs['disk_gb']:,} + {needs['target_gb']:,}",
    )


def _format_parameters(parameters: int) -> str:
    """Format a number of parameters in millions or billions."""
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


if __name__ == "__main__":
    sys.exit(run(main, Options))
