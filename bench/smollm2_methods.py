"""Compare every method for SmolLM2-135M-Instruct, trained on the same data.

All methods have the same number of training tokens, or of minutes, and verify the same number of
draft tokens.

    make smollm2-methods  # what is done stays done when it is killed: hours on two CPU cores
    # all steps on little data, in minutes: the numbers mean nothing
    make smollm2-methods ARGS="small=true"

It takes the target, the prompts and the answers of `make smollm2`. Each recipe of recipes/smollm2
is trained for the same number of steps (equal tokens), and for as many steps as take the same time
(equal minutes). Recipes in `longer=` are also trained longer, and evaluated on the way. Heads that
feed their states back train as many steps of the unroll as they draft.

The drafts, n-gram lookup and suffix lookup are measured greedily and at temperature 1, one request
and several at a time. Each draft is also measured as a tree and behind n-gram lookup. A round never
verifies more than K draft tokens. There is a comparison for each way of measuring in
runs/smollm2/methods/minutes, and the table of docs/results.md shows the results.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.drafts import describe_method, format_caption, reports_by_name, train
from bench.pages import write_between
from bench.smollm2 import (
    FOLDER,
    Phase,
    Shape,
    build_small_keys,
    compare,
    fetch_all,
    is_script_option,
)
from specdistill.cli.command import run
from specdistill.common.errors import ExitCode, UserError
from specdistill.common.project import ROOT
from specdistill.evaluation.report.phrases import (
    Report,
    ResultRow,
    format_bracketed_interval,
    format_number,
    format_times,
)
from specdistill.evaluation.report.text import format_table
from specdistill.methods.recipe import Recipe
from specdistill.recipe.fields import Section, option
from specdistill.recipe.load import load_recipe
from specdistill.training.history import History, read_history

PAGE = ROOT / "docs" / "results.md"
# The seconds of a step over a row of 384 tokens, in processor time of one thread on an AMD EPYC.
# Evaluations are left out.
SECONDS = {
    "eagle3": 1.60,
    "dflash": 1.63,
    "dspark": 1.98,
    "pard": 2.70,
    "draft": 1.88,
    "mtp": 1.96,
    "early_exit": 1.04,
}
# Steps at equal minutes are whole tens, so that some methods need one training for both.
STEP_MULTIPLE = 10
LOOKUPS = ["ngram", "suffix"]
SINGLE_REQUEST_METHOD = "early_exit"  # it drafts only chains, and for one request at a time
K = 4

# The shapes of a round. None of them verifies more than K draft tokens.
CHAIN = Shape(K)
TREE = Shape(3, {"budget": K, "depth": 3, "top_k": 2})
BEHIND_LOOKUP = Shape(K, lookup_first={"draft_tokens": K})
# For each way of measuring: its keys, and the shapes in which drafts are measured.
MEASUREMENT_KEYS: dict[str, tuple[Phase, list[Shape]]] = {
    "T = 0": ({}, [CHAIN, TREE, BEHIND_LOOKUP]),
    "T = 1": ({"temperature": 1.0}, [CHAIN, TREE, BEHIND_LOOKUP]),
    "T = 0, 4 at a time": ({"batch_size": 4}, [CHAIN, TREE]),
    "T = 0, 16 at a time": ({"batch_size": 16, "num_prompts": 16}, [CHAIN]),
}

# The ways of measuring that every method supports, and the ways that `small=true` tries.
SINGLE_REQUEST_WAYS = ["T = 0", "T = 1"]
SMALL_RUN_WAYS = ["T = 0", "T = 0, 4 at a time"]
SIMULATED_METRICS = ["eval_acceptance_length", "eval_acceptance_length_sampled"]
Reports = Mapping[str, Report]  # name of a draft or lookup -> its report
Measured = Mapping[str, Reports]  # name of a way of measuring -> its reports
Recipes = Mapping[str, Any]  # name -> recipe; the recipes of different methods differ in sections


class Options(Section):
    """The options of this script."""

    small: bool = option(
        False, "try all steps with little data, in minutes; the numbers mean nothing"
    )
    recipes: list[str] = option(
        [*SECONDS], "names of the recipes in recipes/smollm2 to compare", min_length=2
    )
    steps: int = option(
        100, "training steps of each recipe, for the comparison at equal tokens", ge=1
    )
    minutes: float = option(
        3.2,
        "minutes of processor time for training each recipe, for the comparison at equal time",
        gt=0,
    )
    longer: list[str] = option(
        [], "recipes that are also trained for longer_steps steps, e.g. [eagle3,dspark]"
    )
    longer_steps: int = option(
        200,
        "training steps of the recipes in longer=; they are evaluated four times on the way",
        ge=4,
    )
    num_prompts: int = option(
        9, "number of prompts to measure on; at least 4, because 4 are decoded at a time", ge=4
    )
    max_new_tokens: int = option(32, "tokens to generate for each prompt", ge=1)


def main(options: Options) -> ExitCode:
    """Train a draft with each method, measure all of them, and write the tables."""
    # Load the recipes, and check that they train on the same data.
    keys = {name: build_keys(name, options) for name in options.recipes}
    recipes: Recipes = {name: load_recipe(Recipe, keys[name]) for name in options.recipes}
    check_same_data(recipes)
    place = (FOLDER / "small" if options.small else FOLDER) / "methods"
    fetch_all()

    # Train each recipe for equally many tokens, then for equally many minutes. Train some longer.
    train_drafts = partial(train_recipes, place, recipes, keys)
    token_drafts = train_drafts(dict.fromkeys(recipes, options.steps))
    minute_drafts = train_drafts({name: count_steps(name, options.minutes) for name in recipes})
    longer_drafts = train_drafts(
        dict.fromkeys(options.longer, options.longer_steps), num_evaluations=4
    )

    # Measure the drafts that trained for equal minutes, in several ways: greedily, sampled, and in
    # batches. All ways share these settings.
    first, *_ = recipes.values()
    shared_settings = {
        "target.model": first.target.model,
        "target.dtype": first.target.dtype,
        "suite": first.eval.suite,
        "num_prompts": options.num_prompts,
        "max_new_tokens": options.max_new_tokens,
        "repeats": 1,
        "sampling_draws": 0,
    }
    ways = SMALL_RUN_WAYS if options.small else list(MEASUREMENT_KEYS)
    by_minutes = measure(place / "minutes", minute_drafts, shared_settings, ways)

    # Write the table of what was measured. What was simulated at equal tokens is only printed.
    text = f"{describe_measurement(by_minutes)}\n\n{format_methods_table(by_minutes)}"
    print(f"{text}\n\nAt equal tokens, simulated on held-out rows, in chains of four:\n")
    print(format_simulated_table([*token_drafts, *longer_drafts]), flush=True)
    if not options.small:
        write_between(PAGE, "smollm2_methods", text)
    return ExitCode.DONE


def count_steps(name: str, minutes: float) -> int:
    """Return how many training steps of a recipe take this many minutes of processor time.

    SECONDS has the time of one step. The number of steps is rounded to a multiple of STEP_MULTIPLE,
    and is at least STEP_MULTIPLE.
    """
    multiples = round(minutes * 60 / SECONDS[name] / STEP_MULTIPLE)
    return max(1, multiples) * STEP_MULTIPLE


def train_recipes(
    place: Path,
    recipes: Recipes,
    keys: Mapping[str, Sequence[str]],
    num_steps_by_recipe: Mapping[str, int],
    num_evaluations: int = 1,
) -> list[str]:
    """Train some recipes, each for its number of steps, and return the folders of the drafts.

    Args:
        place: the folder in which each training has a folder of its own.
        recipes: all recipes, by name.
        keys: arguments of `specdistill train` that give each recipe, by name.
        num_steps_by_recipe: the recipes to train, each with its training steps.
        num_evaluations: how often each draft is evaluated and saved during its training.
    """
    drafts = []
    for name, num_steps in num_steps_by_recipe.items():
        folder = place / f"{name}-{num_steps}"
        step_keys = build_step_keys(recipes[name], num_steps, num_evaluations)
        train(folder, *keys[name], *step_keys, launch="cpu_processes")
        drafts.append(str(folder / "draft"))
    return drafts


def build_keys(name: str, options: Options) -> list[str]:
    """Return the arguments of `specdistill train` for a recipe, the same settings for each method.

    Hidden states are computed in every step. Some methods could read them from disk instead, but
    would then have less work than the others, so that minutes of training could not be compared. A
    head is unrolled for K steps, because it drafts K tokens per round.
    """
    # Set only keys that the recipe has: methods differ in their sections.
    recipe: Any = load_recipe(Recipe, [f"recipe=smollm2/{name}"])
    keys = [f"recipe=smollm2/{name}"]
    if "hidden_states" in recipe.model_fields_set:
        keys += ["hidden_states.mode=online", "hidden_states.path=null"]
    if hasattr(recipe.draft, "ttt_steps"):
        keys.append(f"draft.ttt_steps={K}")

    # The acceptance length is simulated during training with this K.
    keys.append(f"eval.num_speculative_tokens={K}")
    if options.small:
        keys += build_small_keys(name)

    # Keys on the command line come last, so that they take precedence over the ones above.
    keys += [argument for argument in sys.argv[1:] if not is_script_option(argument, Options)]
    return keys


def check_same_data(recipes: Recipes) -> None:
    """Check that all recipes have the same section `data`, so that they train on the same rows.

    Raises:
        UserError: if a key of that section differs between two recipes.
    """
    # Compare each recipe with the first.
    first, *remaining_names = recipes
    first_data = recipes[first].data.model_dump()
    for name in remaining_names:
        data = recipes[name].data.model_dump()
        for key, first_value in first_data.items():
            if data[key] != first_value:
                raise UserError(
                    f"data.{key}",
                    got=f"{data[key]} in recipe smollm2/{name} and {first_value} in recipe"
                    f" smollm2/{first}",
                    expected="the same value in all recipes, because their drafts are compared",
                )


def build_step_keys(recipe: Any, num_steps: int, num_evaluations: int) -> list[str]:
    """Return recipe keys that set the steps of training, of warm-up and between evaluations.

    Args:
        recipe: the recipe.
        num_steps: training steps.
        num_evaluations: how often the draft is evaluated and saved, at even distances.
    """
    # Warm-up takes the same share of all steps as in the recipe.
    warmup = max(1, round(num_steps * recipe.train["warmup_steps"] / recipe.train["max_steps"]))
    steps_between_evaluations = num_steps // num_evaluations
    return [
        f"train.max_steps={num_steps}",
        f"train.warmup_steps={warmup}",
        f"train.eval_steps={steps_between_evaluations}",
        f"train.save_steps={steps_between_evaluations}",
    ]


def measure(
    place: Path, drafts: Sequence[str], shared_settings: Phase, ways: Sequence[str]
) -> Measured:
    """Compare all drafts and lookups, once for each way of measuring.

    Trees and batches are left out for a draft that does not support them.

    Args:
        place: the folder in which each comparison has a folder of its own.
        drafts: the folders of the drafts.
        shared_settings: the keys of `specdistill compare` that all comparisons share.
        ways: the names of the ways of measuring: keys of MEASUREMENT_KEYS, such as `T = 0`.

    Returns:
        The reports of all drafts and lookups by name, separately for each of `ways`.
    """
    reports_by_way = {}
    for way in ways:
        keys, shapes = MEASUREMENT_KEYS[way]

        # List the combinations of drafts and shapes to measure. SINGLE_REQUEST_METHOD supports
        # neither batches nor trees; the folder of its draft contains its name. Lookups propose
        # chains only.
        candidates = []
        for shape in shapes:
            needs_support = "batch_size" in keys or shape is TREE
            for draft in drafts:
                if not needs_support or SINGLE_REQUEST_METHOD not in draft:
                    candidates.append((draft, shape))
        candidates += [(lookup, CHAIN) for lookup in LOOKUPS]

        # Run the comparison in a folder that is named after the way of measuring.
        folder = place / way.replace(" = ", "").replace(", ", "-").replace(" ", "-")
        comparison = compare(folder, candidates, {**shared_settings, **keys})
        reports_by_way[way] = reports_by_name(comparison)
    return reports_by_way


# Write the tables


def describe_measurement(measured: Measured) -> str:
    """Return a sentence that says how, and on which prompts, the tables were measured.

    Args:
        measured: for each way of measuring, such as `T = 0` or `T = 0, 4 at a time`, the report of
            each draft.
    """
    # The sentence names the number of prompts and of threads. They are those of the first draft in
    # the first way of measuring.
    first_way, *_ = measured
    first_report, *_ = measured[first_way].values()
    return format_caption(
        first_report,
        "SmolLM2-135M-Instruct, dequantised from Q4_1, by `make smollm2-methods`",
        f"up to {K} draft tokens verified",
    )


def format_methods_table(measured: Measured) -> str:
    """Return a table with a line for each draft: its acceptance length and its speedup.

    Args:
        measured: for each way of measuring, such as `T = 0` or `T = 0, 4 at a time`, the report of
            each draft.
    """
    # Choose the columns: the acceptance length for the ways with one request at a time, and the
    # speedup for all ways.
    single_request_ways = [way for way in measured if way in SINGLE_REQUEST_WAYS]
    head = ["drafts by", "steps"]
    head += [f"acceptance length, {way}" for way in single_request_ways]
    head += [f"speedup, {way}" for way in measured]

    # Write a line for each draft that was measured in the first way. Where it was not measured in
    # another way, its cells have the sign for a missing number.
    lines = []
    for name, report in measured[single_request_ways[0]].items():
        rows: dict[str, ResultRow] = {}
        for way, reports in measured.items():
            rows[way] = reports[name]["results"][0] if name in reports else {}
        model = report["draft"]["model"]
        cells = [describe_candidate(report), f"{load_history(model).steps}" if model else "–"]
        cells += [format_length(rows[way]) for way in single_request_ways]
        for row in rows.values():
            interval = format_bracketed_interval(row, "speedup")
            cells.append(f"{format_times(row.get('speedup'))}{interval}")
        lines.append(cells)
    return format_table(head, lines)


def format_length(row: ResultRow) -> str:
    """Format the acceptance length of a row with its confidence interval, for a table.

    The row is empty if the draft was not measured in this way. An empty row gives the sign for a
    missing number.
    """
    interval = format_bracketed_interval(row, "mean_acceptance_length") if row else ""
    return f"{format_number(row.get('mean_acceptance_length'))}{interval}"


def describe_candidate(report: Report) -> str:
    """Return the name of a draft in a table: its method, and ", a tree" if it drafts trees."""
    tree = ", a tree" if report["settings"]["tree"] else ""
    return f"`{describe_method(report)}`{tree}"


def load_history(draft: str) -> History:
    """Read the history of a draft's training, which must exist."""
    history = read_history(Path(draft), key="drafts")
    assert history, draft
    return history


def format_simulated_table(drafts: Sequence[str]) -> str:
    """Return a table of the acceptance lengths that were simulated during training.

    It has a line for each evaluation of each draft, with the greedy and the sampled length.

    Args:
        drafts: the folders of the drafts.
    """
    lines = []
    for draft in drafts:
        for entry in load_history(draft).log:
            if entry.get("step") and SIMULATED_METRICS[0] in entry:
                # The folder of a run is named after the recipe and the steps: `eagle3-100/draft`.
                recipe, _, _ = Path(draft).parent.name.rpartition("-")
                lengths = [format_number(entry[name]) for name in SIMULATED_METRICS]
                lines.append([f"`{recipe}`", f"{entry['step']}", *lengths])
    return format_table(("trained", "steps", *SINGLE_REQUEST_WAYS), lines)


if __name__ == "__main__":
    sys.exit(
        run(
            main,
            Options,
            [argument for argument in sys.argv[1:] if is_script_option(argument, Options)],
        )
    )
