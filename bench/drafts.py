"""What `make methods` and `make smollm2` share: a training of each recipe, and a comparison as a table with a line for each method."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from specdistill.comparison.compare import is_lossless
from specdistill.errors import ExitCode, UserError
from specdistill.methods import METHODS
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_recipe, recipe_yaml
from specdistill.report.phrases import (
    between,
    counted,
    duration,
    number,
    per_round,
    percent,
    settings_line,
    size,
    times,
    tree,
)
from specdistill.report.text import table

TRAINING = "Training is the time of its steps, without the generation of its data."
HEAD = (
    "method",
    "acceptance length",
    "accepted at position 1, 2, …",
    "speedup",
    "lossless",
    "draft",
    "training",
)


def specdistill(verb: str, *arguments: str, failing: bool = False) -> int:
    """Run a command of the package; this process ends with its exit code when that is not 0, or of a gate where one may be `failing`."""
    print(f"$ specdistill {verb} {' '.join(arguments)}", flush=True)
    code = subprocess.run(
        [sys.executable, "-m", "specdistill", verb, *arguments], check=False
    ).returncode
    if code and not (failing and code in (ExitCode.CHECK_FAILED, ExitCode.INCONCLUSIVE)):
        sys.exit(code)
    return code


def train(folder: Path, *keys: str, launch: str | None = None) -> None:
    """Train the recipe that `keys` give into a folder, or finish that; nothing where that is done.

    launch: a file of accelerate_configs/, without its suffix; None: in one process. Raises UserError where another training is.
    """
    keys = (*keys, f"train.output_dir={folder}")
    record = folder / "run" / "recipe.yaml"
    recipe = recipe_yaml(load_recipe(Recipe, list(keys)))
    if record.is_file() and _training(record.read_text(encoding="utf-8")) != _training(recipe):
        got = f"{folder}, where another recipe, or the same with other keys, was trained"
        raise UserError(
            "train.output_dir",
            got=got,
            expected="the recipe and the keys of then, or no such folder: move it away",
        )
    if not (folder / "draft").is_dir():
        specdistill("train", *keys, *([f"launch={launch}"] if launch else []))


def _training(recipe: str) -> dict[str, Any]:
    """A recipe without what is done with the draft once it is trained."""
    return {
        name: section
        for name, section in yaml.safe_load(recipe).items()
        if name not in ("eval", "gate", "publish")
    }


def caption(report: Mapping[str, Any], measured_for: str, settings: str | None = None) -> str:
    """How a table was measured, in a sentence. settings: of all its lines; None: those of the report."""
    row, threads, repeats = (
        report["results"][0],
        report["hardware"]["cpu_threads"],
        report["settings"]["repeats"],
    )
    repetitions = f"{repeats} repetitions" if repeats > 1 else "one repetition"
    return (
        f"Measured for {measured_for}: {settings or settings_line(report)}, {counted(threads, 'thread')}; {row['num_prompts']} prompts, "
        f"one paired run of {repetitions}."
    )


def methods_table(candidates: Sequence[Mapping[str, Any]]) -> str:
    """One line for each candidate, methods in the order of the project's own table."""
    order = list(METHODS)
    ordered = sorted(
        candidates, key=lambda candidate: order.index(candidate["report"]["draft"]["method"])
    )
    return table(HEAD, map(_line, ordered))


def _line(candidate: Mapping[str, Any]) -> list[str]:
    report, training = candidate["report"], candidate["training"]
    row = report["results"][0]
    return [
        f"`{drafts_by(report)}`",
        ", ".join(
            filter(
                None,
                [
                    f"{number(row['mean_acceptance_length'])}{between(row, 'mean_acceptance_length')}",
                    per_round(row),
                ],
            )
        ),
        " ".join(percent(rate) for rate in row["acceptance_rate_per_position"]),
        f"{times(row['speedup'])}{between(row, 'speedup')}",
        "yes" if is_lossless(report) else "NO",
        size(report["draft"]["bytes"]) if report["draft"]["bytes"] else "–",
        duration(training["seconds"]) if training and training["seconds"] else "–",
    ]


def drafts_by(report: Mapping[str, Any]) -> str:
    """The method, after the lookup that stands in front of it."""
    lookup = report["settings"].get("drafting", {}).get("lookup_first")
    return "+".join(filter(None, (lookup and lookup["method"], report["draft"]["method"])))


def reports(comparison: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each candidate's report by its name, in the order of the drafts."""
    return {candidate["name"]: candidate["report"] for candidate in comparison["candidates"]}


def drafts_what(report: dict[str, Any]) -> str:
    """What a round drafts, in a sentence, where it is a tree or behind an n-gram lookup; else empty."""
    method, settings = drafts_by(report), report["settings"]
    if lookup := settings.get("drafting", {}).get("lookup_first"):
        behind = tree(lookup.get("draft_tree")) or f"chain of {lookup['draft_tokens']}"
        return (
            f"`{method}` looks up {settings['num_speculative_tokens']} tokens where the last {lookup['min']} or more occurred before; "
            f"elsewhere its draft drafts a {behind}."
        )
    return (
        f"`{method}` drafts a {tree(settings['tree'])}, whose depth is its K."
        if settings["tree"]
        else ""
    )
