"""The training of recipes and the tables of drafts that `make methods` and `make smollm2` share."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from specdistill.common.errors import ExitCode, UserError
from specdistill.evaluation.comparison.compare import Comparison, Entry, is_lossless
from specdistill.evaluation.report.phrases import (
    Report,
    describe_tree,
    format_bracketed_interval,
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_settings,
    format_size,
    format_times,
)
from specdistill.evaluation.report.text import format_table
from specdistill.methods import METHODS
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import format_recipe, load_recipe

TRAINING = "Training times exclude the generation of data."

# The columns of the table of methods.
HEAD = (
    "method",
    "acceptance length",
    "accepted at position 1, 2, …",
    "speedup",
    "lossless",
    "draft",
    "training",
)


def run_specdistill(verb: str, *arguments: str, accepts_failed_gate: bool = False) -> int:
    """Run a command of the package in a process of its own.

    If the command fails, this process ends with the same exit code.

    Args:
        verb: the command, such as `eval`.
        *arguments: its arguments.
        accepts_failed_gate: whether to return if the command's gate fails or is inconclusive,
            instead of ending this process.

    Returns:
        The exit code of the command.
    """
    # Show the command, as a user would type it, before its own output.
    print(f"$ specdistill {verb} {' '.join(arguments)}", flush=True)
    code = subprocess.run(
        [sys.executable, "-m", "specdistill", verb, *arguments], check=False
    ).returncode

    # The verdict of a gate, failed or inconclusive, may be a result. Any other error ends this
    # process.
    is_verdict = accepts_failed_gate and code in (ExitCode.CHECK_FAILED, ExitCode.INCONCLUSIVE)
    if code and not is_verdict:
        sys.exit(code)
    return code


def train(folder: Path, *keys: str, launch: str | None = None) -> None:
    """Train a recipe into a folder, or resume that training; do nothing if it is finished.

    Args:
        folder: the folder of the run.
        *keys: arguments of `specdistill train` that give the recipe.
        launch: a file of accelerate_configs/, without its suffix; None trains in one process.

    Raises:
        UserError: if the folder holds the training of another recipe, or of the same recipe with
            other keys.
    """
    # Refuse a folder in which another recipe was trained. Otherwise the draft of that recipe would
    # be measured as if this recipe had trained it.
    keys = (*keys, f"train.output_dir={folder}")
    record = folder / "run" / "recipe.yaml"
    recipe = format_recipe(load_recipe(Recipe, list(keys)))
    if record.is_file():
        recorded_sections = _select_training_sections(record.read_text(encoding="utf-8"))
        if recorded_sections != _select_training_sections(recipe):
            raise UserError(
                "train.output_dir",
                got=f"{folder}, where a draft was trained with another recipe or other keys",
                expected="a folder without a training run: move this folder away, or use its recipe"
                " and keys",
            )

    # A finished training has left its draft. An interrupted one resumes.
    if not (folder / "draft").is_dir():
        run_specdistill("train", *keys, *([f"launch={launch}"] if launch else []))


def _select_training_sections(recipe: str) -> dict[str, object]:
    """Return the sections of a recipe that affect training, given the YAML text of the recipe."""
    return {
        name: section
        for name, section in yaml.safe_load(recipe).items()
        if name not in ("eval", "gate", "publish")
    }


def format_caption(report: Report, measured_for: str, settings: str | None = None) -> str:
    """Return a sentence that says how a table was measured.

    Args:
        report: one of the reports of the table.
        measured_for: what was measured, and the command that measured it.
        settings: the settings that all lines of the table share; None for those of the report.
    """
    row = report["results"][0]
    threads = report["hardware"]["cpu_threads"]
    repeats = report["settings"]["repeats"]
    times = f"{repeats} times" if repeats > 1 else "once"
    return (
        f"Measured for {measured_for}: {settings or format_settings(report)},"
        f" {format_count(threads, 'thread')}; {row['num_prompts']} prompts, each decoded {times}"
        f" with each draft and {times} without."
    )


def format_methods_table(candidates: Sequence[Entry]) -> str:
    """Return a table with one line for each compared draft, in the order of METHODS."""
    order = list(METHODS)
    ordered = sorted(
        candidates, key=lambda candidate: order.index(candidate["report"]["draft"]["method"])
    )
    return format_table(HEAD, map(_format_line, ordered))


def _format_line(candidate: Entry) -> list[str]:
    """Return the cells of a draft's line, in the order of the columns HEAD."""
    report = candidate["report"]
    training = candidate["training"]
    row = report["results"][0]
    return [
        f"`{describe_method(report)}`",
        f"{format_number(row['mean_acceptance_length'])}"
        f"{format_bracketed_interval(row, 'mean_acceptance_length')}",
        " ".join(format_percent(rate) for rate in row["acceptance_rate_per_position"]),
        f"{format_times(row['speedup'])}{format_bracketed_interval(row, 'speedup')}",
        "yes" if is_lossless(report) else "NO",
        format_size(report["draft"]["bytes"]) if report["draft"]["bytes"] else "–",
        format_duration(training["seconds"]) if training and training["seconds"] else "–",
    ]


def describe_method(report: Report) -> str:
    """Return the method of a report's draft, such as `eagle3`.

    If a lookup proposes before the draft does, the lookup's method comes first: `ngram+eagle3`.
    """
    lookup = report["settings"].get("drafting", {}).get("lookup_first")
    method = str(report["draft"]["method"])
    return f"{lookup['method']}+{method}" if lookup else method


def reports_by_name(comparison: Comparison) -> dict[str, Report]:
    """Return the report of each candidate by its name, in the order of the drafts."""
    return {candidate["name"]: candidate["report"] for candidate in comparison["candidates"]}


def describe_shape(report: Report) -> str:
    """Return a sentence that says how a draft was used, for the text below a table.

    The sentence describes the tree, or the lookup that proposes before the draft does. It is empty
    for a draft that proposes a chain without a lookup.
    """
    method = describe_method(report)
    settings = report["settings"]

    # With a lookup in front, a round takes the tokens that the lookup finds. If it finds none, the
    # draft proposes a tree or a chain.
    lookup = settings.get("drafting", {}).get("lookup_first")
    if lookup:
        shape = (
            describe_tree(lookup.get("draft_tree")) or f"chain of {lookup['draft_tokens']} tokens"
        )
        return (
            f"Where the last {lookup['min']} or more tokens occurred before, `{method}` proposes up"
            f" to {settings['num_speculative_tokens']} that followed them; elsewhere its draft"
            f" proposes a {shape}."
        )
    if settings["tree"]:
        return f"`{method}` proposes a {describe_tree(settings['tree'])}; K is the tree's depth."
    return ""
