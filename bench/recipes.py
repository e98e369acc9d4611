"""What the recipes of published targets take, from themselves and from the targets' config.json. Nothing is measured, and nobody asked.

    python bench/recipes.py                  # exits with 1 where the record, a recipe's header or docs/recipes.md says something else
    python bench/recipes.py record=true      # writes them; only=qwen3-8b/eagle3 computes that one alone

Counted as `specdistill plan` counts: weights, gradients and AdamW's state in float32, frozen tables, the target or the part of it that
a GPU has, and activations, by running the code of a training step over tensors without content where a method can.
"""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.pages import write_between
from specdistill.command import run
from specdistill.errors import ExitCode
from specdistill.methods import METHODS
from specdistill.methods.recipe import Recipe
from specdistill.methods.sizes import Described, PlannedDraft, weights_read
from specdistill.planning.accounting import H100, Device, training_step
from specdistill.planning.estimates import BYTES_PER_COPIED, TRAINING_FLOPS, training_memory
from specdistill.planning.reading import read
from specdistill.progress import PREPARED_BYTES
from specdistill.project import RECIPES, ROOT
from specdistill.recipe.fields import Section, option
from specdistill.recipe.load import REQUIRED, load_recipe, merged
from specdistill.report.text import table

RECORD, PAGE = Path(__file__).with_name("results") / "recipes.json", ROOT / "docs" / "recipes.md"
LAUNCH = re.compile(r"accelerate_configs/(\w+)\.yaml --num_processes (\d+)")
COMPUTED = re.compile(r"^# Computed: .*$", re.MULTILINE)
# Bytes of a trained parameter on each of N GPUs: weight, gradient and two moments; under ZeRO-3 also the weight, while it is gathered.
TRAINED = {"ddp": lambda n: 16.0, "zero2": lambda n: 4 + 12 / n, "zero3": lambda n: 16 / n + 4}
CHECKPOINT_BYTES = 12  # of a parameter: weight and two moments
CHECKPOINTS = 2  # the best and the last one
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
    only: str | None = option(None, "compute this one alone; null: all")
    record: bool = option(
        False, "write bench/results/recipes.json, the recipes' headers and docs/recipes.md"
    )


def main(options: Options) -> ExitCode:
    names = [options.only] if options.only else published()
    recorded = load_record() if RECORD.exists() else {}
    found = {name: recorded.get(name) for name in published()} | {
        name: need(name) for name in names
    }
    for name in names:
        print(name, json.dumps(found[name]), flush=True)
    if options.record:
        RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        write_between(PAGE, "recipes", shown(found))
        for name in names:
            path = RECIPES / f"{name}.yaml"
            path.write_text(
                COMPUTED.sub(line(found[name]), path.read_text(encoding="utf-8")), encoding="utf-8"
            )
    others = [name for name in names if found[name] != recorded.get(name)]
    return ExitCode.CHECK_FAILED if others and not options.record else ExitCode.DONE


def load_record() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def published() -> list[str]:
    """Recipes whose header has a line of figures."""
    paths = (
        path
        for path in sorted(RECIPES.glob("*/*.yaml"))
        if COMPUTED.search(path.read_text(encoding="utf-8"))
    )
    return [path.relative_to(RECIPES).with_suffix("").as_posix() for path in paths]


def settings(name: str) -> dict[str, Any]:
    """What a recipe says of the figures below."""
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    values = merged([f"recipe={name}"])
    model = values["target"]["model"]
    recipe: Any = load_recipe(
        Recipe, [f"recipe={name}", *([f"target.model={name}"] if model == REQUIRED else [])]
    )
    launch = LAUNCH.search(text)
    memory = re.search(r"GPUs of (\d+) GB", text)
    assert launch and memory, name
    stored = getattr(recipe, "hidden_states", None)
    return {
        "method": recipe.method,
        "target": model,
        "launch": launch[1],
        "num_processes": int(launch[2]),
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


def need(name: str) -> dict[str, Any]:
    """A recipe's settings and what they come to: parameters, bytes of each GPU and of the disk, hours of all GPUs together."""
    of = settings(name)
    folder = (RECIPES / name).parent
    target = replace(read(str(folder), key="target.model"), name=of["target"])
    given = (
        read(str(folder / "draft"), key="draft.init")
        if (folder / "draft").is_dir() and of["method"] == "draft_model"
        else None
    )
    plan = METHODS[of["method"]].implementation().planned
    draft: PlannedDraft = plan(target, given, of["draft"])
    number, parts = of["num_processes"], draft.parts
    held, rate = _step(of, target, draft)
    tokens = of["rows"] * of["max_length"] * of["gradient_accumulation_steps"] * number
    features = (
        METHODS[of["method"]].features * target.text.hidden_size * 2 if of["is_stored"] else 0
    )
    disk = (
        CHECKPOINTS * CHECKPOINT_BYTES * parts.parameters
        + (PREPARED_BYTES + features) * of["num_tokens"]
    )
    return {
        "of": of,
        "target_parameters": target.parameters,
        "draft_parameters": parts.parameters,
        "tokens_a_step": tokens,
        "gpu_gb": round(
            (_target_bytes(of, target) + TRAINED[of["launch"]](number) * parts.parameters + held)
            / 1e9
        ),
        "hours": float(f"{of['max_steps'] * tokens / (rate * number) / 3600:.2g}"),
        "target_gb": round(2 * target.parameters / 1e9),
        "disk_gb": round(disk / 1e9),
    }


def _step(of: dict[str, Any], target: Described, draft: PlannedDraft) -> tuple[float, float]:
    """Bytes of activations and frozen tables; tokens that one GPU trains on in a second."""
    num_tokens, read_of_target = (
        of["rows"] * of["max_length"],
        0 if of["is_stored"] else weights_read(target.model),
    )
    assert draft.shape is not None
    rough = training_memory(
        draft.parts, 0, draft.shape, draft.vocabulary, of["ttt_steps"], num_tokens
    )
    tables = BYTES_PER_COPIED * draft.parts.copied
    if draft.build is None:
        return tables + rough["activations"], TRAINING_FLOPS / (
            2 * read_of_target + 6 * draft.parts.read * of["ttt_steps"]
        )
    steps = {"ttt_steps": of["ttt_steps"]}
    ledger = training_step(
        of["method"], draft.build, steps, target, rows=of["rows"], length=of["max_length"]
    )
    rate = device_of(of["gpu_gb"]).tokens_per_second(
        ledger, num_tokens, 2 * read_of_target * num_tokens
    )
    return tables + ledger.peak, rate


def device_of(gpu_gb: int) -> Device:
    """An H100 or an H200, by its memory."""
    return {80: H100, 141: Device("H200", 989e12, 4.8e12)}[gpu_gb]


def _target_bytes(of: dict[str, Any], target: Described) -> float:
    """In 16 bits, on each GPU: all of it; a part of its layers, with one that is gathered; or embedding, norm and head."""
    layers = 2 * sum(
        size.numel() for name, size in target.model.named_parameters() if ".layers." in name
    )
    rest = 2 * target.parameters - layers
    if of["is_stored"]:
        return rest
    if of["shard"] == "layers":
        return rest + layers / of["num_processes"] + layers / target.text.num_hidden_layers
    return rest + layers


def line(need: dict[str, Any]) -> str:
    """The figures as a recipe's header has them."""
    tokens = need["tokens_a_step"] * need["of"]["max_steps"]
    most = "" if need["of"]["is_packed"] else "at most "
    what = f"{need['gpu_gb']} GB on each GPU, {most}{need['hours']:g} hours for {most}{tokens / 1e6:,.0f}M tokens"
    return f"# Computed: {what}, {need['disk_gb']:,} GB of disk in addition to the target's {need['target_gb']:,}."


def shown(needs: dict[str, Any]) -> str:
    return table(HEAD, (_row(name, need) for name, need in needs.items()))


def _row(name: str, need: dict[str, Any]) -> tuple[str, ...]:
    of = need["of"]
    most = "" if of["is_packed"] else "≤ "
    shard = " `target.shard=layers`" if of["shard"] == "layers" else ""
    target = (
        f"{name.partition('/')[0]} in bfloat16" if of["target"] == REQUIRED else f"`{of['target']}`"
    )
    return (
        f"[`{name}`](../recipes/{name}.yaml)",
        f"{target}, {_billions(need['target_parameters'])}",
        _billions(need["draft_parameters"]),
        f"`{of['launch']}`{shard}, {of['num_processes']} GPUs of {of['gpu_gb']} GB",
        f"{most}{need['tokens_a_step']:,} × {of['max_steps']:,}",
        f"{need['gpu_gb']}",
        f"{most}{need['hours']:g}",
        f"{need['disk_gb']:,} + {need['target_gb']:,}",
    )


def _billions(parameters: int) -> str:
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


if __name__ == "__main__":
    sys.exit(run(main, Options))
