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
from typing import Any

from bench.pages import write_between
from specdistill.advice.plan.accounting import H100, Device
from specdistill.advice.plan.estimates import describe_launch, estimate_training_needs, launch_of
from specdistill.advice.plan.reading import read_model_config
from specdistill.advice.plan.run_estimate import CHECKPOINT_BYTES
from specdistill.cli.command import run
from specdistill.common.errors import ExitCode
from specdistill.common.progress import PREPARED_BYTES
from specdistill.common.project import RECIPES, ROOT
from specdistill.evaluation.report.text import format_table
from specdistill.methods import METHODS
from specdistill.methods.recipe import Recipe
from specdistill.methods.sizes import ModelConfigInfo, PlannedDraft
from specdistill.recipe.fields import Section, option
from specdistill.recipe.load import REQUIRED_MARK, load_recipe, merge_values

# The recorded numbers, and the page with their table.
RECORD = Path(__file__).with_name("results") / "recipes.json"
PAGE = ROOT / "docs" / "recipes.md"

# The line in a recipe's header that this script writes.
COMPUTED_LINE = re.compile(r"^# Computed: .*$", re.MULTILINE)
TARGET_ITEMSIZE = 2  # bytes of a weight in bfloat16
CHECKPOINTS = 2  # the best and the last one are kept
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


class Options(Section):
    """The options of this script."""

    record: bool = option(
        False, "write bench/results/recipes.json, the recipes' headers and docs/recipes.md"
    )


def main(options: Options) -> ExitCode:
    """Compute the needs of all published recipes, and compare them with the record or write it."""
    # Compute the needs of every recipe whose header has such a line.
    needs_by_recipe = {}
    for name in list_published_recipes():
        needs_by_recipe[name] = compute_needs(name)
        print(name, json.dumps(needs_by_recipe[name]), flush=True)

    # Compare with the record, or write record, table and headers.
    is_recorded = RECORD.exists() and needs_by_recipe == load_record()
    if options.record:
        RECORD.write_text(json.dumps(needs_by_recipe, indent=1) + "\n", encoding="utf-8")
        write_between(PAGE, "recipes", format_needs_table(needs_by_recipe))
        for name in needs_by_recipe:
            path = RECIPES / f"{name}.yaml"
            path.write_text(
                COMPUTED_LINE.sub(
                    format_header_line(needs_by_recipe[name]), path.read_text(encoding="utf-8")
                ),
                encoding="utf-8",
            )
    return ExitCode.DONE if is_recorded or options.record else ExitCode.CHECK_FAILED


def load_record() -> dict[str, Any]:
    """Read the recorded numbers of the recipes."""
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def list_published_recipes() -> list[str]:
    """Return the names of the recipes whose header has a line of computed numbers."""
    paths = (
        path
        for path in sorted(RECIPES.glob("*/*.yaml"))
        if COMPUTED_LINE.search(path.read_text(encoding="utf-8"))
    )
    return [path.relative_to(RECIPES).with_suffix("").as_posix() for path in paths]


def read_settings(name: str) -> dict[str, Any]:
    """Return the settings of a recipe that its needs are computed from."""
    # Load the recipe. If it leaves the target to its user, any name does, because the sizes come
    # from its folder.
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    values = merge_values([f"recipe={name}"])
    model = values["target"]["model"]
    recipe: Any = load_recipe(
        Recipe, [f"recipe={name}", *([f"target.model={name}"] if model == REQUIRED_MARK else [])]
    )

    # Read the launch and the memory of a GPU from the header.
    launch, num_processes = launch_of(name)
    memory = re.search(r"GPUs of (\d+) GB", text)
    assert memory, name

    # Methods whose draft reads no hidden states have no such section.
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
        "rows": recipe.train["per_device_train_batch_size"],
        "gradient_accumulation_steps": recipe.train.get("gradient_accumulation_steps", 1),
        "max_length": recipe.data.max_length,
        "num_tokens": recipe.data.regenerate.num_tokens,
        "max_steps": recipe.train["max_steps"],
        "ttt_steps": getattr(recipe.draft, "ttt_steps", 1),
        "draft": {key: value for key, value in values["draft"].items() if key != "ttt_steps"},
    }


def compute_needs(name: str) -> dict[str, Any]:
    """Return the settings of a recipe and what it needs.

    Returns:
        A dictionary with these keys:

        - `of`: the settings, as `settings` returns them.
        - `target_parameters` and `draft_parameters`: their numbers of parameters.
        - `tokens_a_step`: the tokens of a step, over all processes.
        - `gpu_gb`: GB on each GPU.
        - `hours`: the hours of training, on all GPUs at the same time.
        - `target_gb`: GB of the target in bfloat16.
        - `disk_gb`: GB of disk in addition to the target.
    """
    of = read_settings(name)

    # Read the configs of target and draft that lie next to the recipe.
    folder = (RECIPES / name).parent
    target = replace(read_model_config(str(folder), key="target.model"), name=of["target"])
    draft_config = (
        read_model_config(str(folder / "draft"), key="draft.init")
        if (folder / "draft").is_dir() and of["method"] == "draft_model"
        else None
    )

    # Plan the draft, and estimate what one process needs to train it.
    plan = METHODS[of["method"]].load().advice.plan_draft
    draft: PlannedDraft = plan(target, draft_config, of["draft"])
    number = of["num_processes"]
    num_parameters = draft.parts.parameters
    memory, rate = estimate_training_needs(
        of["method"],
        draft,
        target,
        find_device(of["gpu_gb"]),
        {"ttt_steps": of["ttt_steps"]},
        (of["rows"], of["max_length"]),
        TARGET_ITEMSIZE,
        runs_layers=not of["is_stored"],
    )

    # With stored hidden states no step runs the target's layers, so no GPU holds them.
    if of["is_stored"]:
        memory["target"] -= count_layer_bytes(target)

    # Divide among the processes of the launch.
    launch = describe_launch(
        target, memory, of["launch"], number, is_sharded=of["shard"] == "layers"
    )
    tokens = of["rows"] * of["max_length"] * of["gradient_accumulation_steps"] * number

    # Disk: the best and the last checkpoint, the prepared rows, and hidden states in two bytes per
    # number if they are stored.
    features = (
        METHODS[of["method"]].features * target.text.hidden_size * 2 if of["is_stored"] else 0
    )
    disk = (
        CHECKPOINTS * CHECKPOINT_BYTES * num_parameters
        + (PREPARED_BYTES + features) * of["num_tokens"]
    )
    return {
        "of": of,
        "target_parameters": target.parameters,
        "draft_parameters": num_parameters,
        "tokens_a_step": tokens,
        "gpu_gb": round(launch.device_bytes / 1e9),
        "hours": float(f"{of['max_steps'] * tokens / (rate * number) / 3600:.2g}"),
        "target_gb": round(2 * target.parameters / 1e9),
        "disk_gb": round(disk / 1e9),
    }


def find_device(gpu_gb: int) -> Device:
    """Return the GPU with this memory: an H100 with 80 GB, an H200 with 141 GB."""
    return {80: H100, 141: Device("H200", 989e12, 4.8e12)}[gpu_gb]


def count_layer_bytes(target: ModelConfigInfo) -> int:
    """Return the bytes of the target's layers, which no step reads if their outputs are stored."""
    # Weights of the transformer layers have `.layers.` in their names.
    layers = (size.numel() for name, size in target.model.named_parameters() if ".layers." in name)
    return TARGET_ITEMSIZE * sum(layers)


def format_header_line(need: dict[str, Any]) -> str:
    """Return the line of computed numbers in a recipe's header."""
    tokens = need["tokens_a_step"] * need["of"]["max_steps"]

    # Rows that are not packed may be shorter than max_length, so tokens and hours are upper bounds.
    most = "" if need["of"]["is_packed"] else "at most "
    what = (
        f"{need['gpu_gb']} GB on each GPU, {most}{need['hours']:g} hours for"
        f" {most}{tokens / 1e6:,.0f}M tokens"
    )
    return (
        f"# Computed: {what}, {need['disk_gb']:,} GB of disk in addition to the target's"
        f" {need['target_gb']:,}."
    )


def format_needs_table(needs: dict[str, Any]) -> str:
    """Return the table of docs/recipes.md."""
    return format_table(HEAD, (_format_row(name, need) for name, need in needs.items()))


def _format_row(name: str, need: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a recipe, in the order of HEAD."""
    of = need["of"]

    # The target has no name if its user is to choose it.
    most = "" if of["is_packed"] else "≤ "
    shard = " `target.shard=layers`" if of["shard"] == "layers" else ""
    target = (
        f"{name.partition('/')[0]} in bfloat16"
        if of["target"] == REQUIRED_MARK
        else f"`{of['target']}`"
    )
    return (
        f"[`{name}`](../recipes/{name}.yaml)",
        f"{target}, {_format_parameters(need['target_parameters'])}",
        _format_parameters(need["draft_parameters"]),
        f"`{of['launch']}`{shard}, {of['num_processes']} GPUs of {of['gpu_gb']} GB",
        f"{most}{need['tokens_a_step']:,} × {of['max_steps']:,}",
        f"{need['gpu_gb']}",
        f"{most}{need['hours']:g}",
        f"{need['disk_gb']:,} + {need['target_gb']:,}",
    )


def _format_parameters(parameters: int) -> str:
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


if __name__ == "__main__":
    sys.exit(run(main, Options))
