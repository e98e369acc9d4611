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
runs/smollm2/methods, and the tables of docs/methods.md and docs/results.md show the results.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.drafts import describe_method, format_caption, reports_by_name, train
from bench.pages import write_between
from bench.smollm2 import FOLDER, Shape, build_small_keys, compare, fetch_all, is_script_option
from specdistill.cli.command import run
from specdistill.common.errors import ExitCode, UserError
from specdistill.common.project import ROOT
from specdistill.evaluation.report.phrases import (
    format_bracketed_interval,
    format_number,
    format_times,
)
from specdistill.evaluation.report.text import format_table
from specdistill.methods.recipe import Recipe
from specdistill.recipe.fields import Section, option
from specdistill.recipe.load import load_recipe
from specdistill.training.history import History, read_history

PAGE = ROOT / "docs" / "methods.md"
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
STEP_MULTIPLE = (
    10  # steps at equal minutes are whole tens, so that some methods need one training for both
)
LOOKUPS = ["ngram", "suffix"]
SINGLE_REQUEST_METHOD = "early_exit"  # it drafts only chains, and for one request at a time
K = 4

# The shapes of a round. None of them verifies more than K draft tokens.
CHAIN = Shape(K)
TREE = Shape(3, {"budget": K, "depth": 3, "top_k": 2})
BEHIND_LOOKUP = Shape(K, lookup_first={"draft_tokens": K})
# For each way of measuring: its keys, and the shapes in which drafts are measured.
MEASUREMENT_KEYS: dict[str, tuple[dict[str, Any], list[Shape]]] = {
    "T = 0": ({}, [CHAIN, TREE, BEHIND_LOOKUP]),
    "T = 1": ({"temperature": 1.0}, [CHAIN, TREE, BEHIND_LOOKUP]),
    "T = 0, 4 at a time": ({"batch_size": 4}, [CHAIN, TREE]),
    "T = 0, 16 at a time": ({"batch_size": 16, "num_prompts": 16}, [CHAIN]),
}

# The ways of measuring that every method supports, and the ways that `small=true` tries.
SINGLE_REQUEST_WAYS = ["T = 0", "T = 1"]
SMALL_RUN_WAYS = ["T = 0", "T = 0, 4 at a time"]
SIMULATED_METRICS = ["eval_acceptance_length", "eval_acceptance_length_sampled"]
Measured = dict[str, dict[str, dict[str, Any]]]  # by way and by candidate: the report


class Options(Section):
    """The options of this script."""

    small: bool = option(False, "little of everything")
    recipes: list[str] = option([*SECONDS], "recipes of recipes/smollm2", min_length=2)
    steps: int = option(100, "training steps of each at equal tokens", ge=1)
    minutes: float = option(3.2, "minutes of processor time of each at equal minutes", gt=0)
    longer: list[str] = option([], "recipes that are also trained longer, e.g. [eagle3,dspark]")
    longer_steps: int = option(200, "their training steps, evaluated after each quarter", ge=4)
    num_prompts: int = option(
        9, "prompts to measure on, at least as many as are decoded at a time", ge=4
    )
    max_new_tokens: int = option(32, "tokens generated per prompt", ge=1)


def main(options: Options) -> ExitCode:
    """Train the drafts, measure them, and write the tables."""
    # Load the recipes, which must train on the same rows.
    keys = {name: build_keys(name, options) for name in options.recipes}
    recipes: dict[str, Any] = {
        name: load_recipe(Recipe, recipe_arguments) for name, recipe_arguments in keys.items()
    }
    check_same_data(recipes)
    place = (FOLDER / "small" if options.small else FOLDER) / "methods"
    fetch_all()

    def trained(steps: Mapping[str, int], evaluations: int = 1) -> list[str]:
        """Train recipes for these numbers of steps, and return the folders of the drafts."""
        folders = [place / f"{name}-{num_steps}" for name, num_steps in steps.items()]
        for folder, (name, num_steps) in zip(folders, steps.items(), strict=True):
            train(
                folder,
                *keys[name],
                *build_step_keys(recipes[name], num_steps, evaluations),
                launch="cpu_processes",
            )
        return [str(folder / "draft") for folder in folders]

    # Train each recipe for equally many tokens, then for equally many minutes, then some for
    # longer.
    tokens = trained(dict.fromkeys(recipes, options.steps))
    minutes = trained(
        {
            name: max(1, round(options.minutes * 60 / SECONDS[name] / STEP_MULTIPLE))
            * STEP_MULTIPLE
            for name in recipes
        }
    )
    longer = trained(dict.fromkeys(options.longer, options.longer_steps), evaluations=4)

    # Measure the drafts that had equal minutes, in each way.
    first, *_ = recipes.values()
    phase = {
        "target.model": first.target.model,
        "target.dtype": first.target.dtype,
        "suite": first.eval.suite,
        "num_prompts": options.num_prompts,
        "max_new_tokens": options.max_new_tokens,
        "repeats": 1,
        "sampling_draws": 0,
    }
    by_minutes = measure(
        place / "minutes", minutes, phase, SMALL_RUN_WAYS if options.small else [*MEASUREMENT_KEYS]
    )

    # Write the tables: all ways in docs/methods.md, and chains of single requests in the README.
    sections = [
        describe_measurement(by_minutes),
        format_methods_table(by_minutes),
        "At equal tokens, simulated on held-out rows, in chains of four:",
        format_simulated_table([*tokens, *longer]),
    ]
    shown = "\n\n".join(sections)
    print(shown, flush=True)
    if not options.small:
        write_between(PAGE, "smollm2_methods", shown)
        chains_alone = {way: select_chains(by_minutes[way]) for way in SINGLE_REQUEST_WAYS}
        write_between(
            ROOT / "docs" / "results.md",
            "smollm2_methods",
            f"{describe_measurement(chains_alone)}\n\n{format_methods_table(chains_alone)}",
        )
    return ExitCode.DONE


def build_keys(name: str, options: Options) -> list[str]:
    """Return the keys of a recipe for this comparison.

    Features are computed in every step, because filling a store would spare one method work that
    the others do. A head is unrolled for as many steps as it drafts.
    """
    # Leave out keys of sections that this method lacks.
    recipe = f"recipe=smollm2/{name}"
    recipe_of_name: Any = load_recipe(Recipe, [recipe])
    online = (
        ["hidden_states.mode=online", "hidden_states.path=null"]
        if "hidden_states" in recipe_of_name.model_fields_set
        else []
    )
    deep = [f"draft.ttt_steps={K}"] if hasattr(recipe_of_name.draft, "ttt_steps") else []
    small = build_small_keys(name) if options.small else []
    k = f"eval.num_speculative_tokens={K}"  # for the simulated acceptance length
    return [
        recipe,
        *online,
        *deep,
        k,
        *small,
        *(argument for argument in sys.argv[1:] if not is_script_option(argument, Options)),
    ]


def check_same_data(recipes: Mapping[str, Any]) -> None:
    """Check that all recipes are trained on the same rows.

    Raises:
        UserError: if they are not.
    """
    # Compare each recipe's section `data` with that of the first.
    first, *remaining_names = recipes
    for recipe_name in remaining_names:
        first_data, two = (recipes[name].data.model_dump() for name in (first, recipe_name))
        differing = next((key for key in first_data if first_data[key] != two[key]), None)
        if differing:
            got = (
                f"{two[differing]} in smollm2/{recipe_name} and {first_data[differing]} in"
                f" smollm2/{first}"
            )
            raise UserError(
                f"data.{differing}", got=got, expected="the same in all: their drafts are compared"
            )


def build_step_keys(recipe: Any, num_steps: int, evaluations: int) -> list[str]:
    """Return the keys that train a recipe for this number of steps.

    The share of warm-up is that of the recipe.

    Args:
        recipe: the recipe.
        num_steps: training steps.
        evaluations: how often the draft is evaluated and saved, at even distances.
    """
    # Keep the recipe's share of warm-up steps.
    warmup = max(1, round(num_steps * recipe.train["warmup_steps"] / recipe.train["max_steps"]))
    step_values = {"max_steps": num_steps, "warmup_steps": warmup} | dict.fromkeys(
        ("eval_steps", "save_steps"), num_steps // evaluations
    )
    return [f"train.{name}={value}" for name, value in step_values.items()]


def measure(
    place: Path, drafts: Sequence[str], phase: Mapping[str, Any], ways: Sequence[str]
) -> Measured:
    """Measure drafts and lookups in one comparison for each way of measuring.

    Shapes and batches that a draft does not support are left out.
    """
    reports_by_way = {}
    for way in ways:
        keys, shapes = MEASUREMENT_KEYS[way]

        # List drafts and shapes that go together in this way of measuring. Lookups draft chains.
        candidates = []
        for shape in shapes:
            for draft in drafts:
                if SINGLE_REQUEST_METHOD not in draft or not (
                    "batch_size" in keys or shape is TREE
                ):
                    candidates.append((draft, shape))
        folder = place / way.replace(" = ", "").replace(", ", "-").replace(" ", "-")
        reports_by_way[way] = reports_by_name(
            compare(
                folder, [*candidates, *((lookup, CHAIN) for lookup in LOOKUPS)], {**phase, **keys}
            )
        )
    return reports_by_way


# Write the tables


def describe_measurement(measured: Measured) -> str:
    """Return a sentence that says how the tables were measured."""
    report = next(iter(next(iter(measured.values())).values()))
    return format_caption(
        report,
        "SmolLM2-135M-Instruct, dequantised from Q4_1, by `make smollm2-methods`",
        f"up to {K} draft tokens verified",
    )


def format_methods_table(measured: Measured) -> str:
    """Return a table of the candidates: what each accepts and how fast it is, in each way."""
    # The columns: acceptance length for single requests, speedup for every way.
    accepted = [way for way in measured if way in SINGLE_REQUEST_WAYS]
    in_batches = accepted != [*measured]
    computed = ["speedup, T = 0, compute-bound (computed)"] if in_batches else []
    speedups = [*(f"speedup, {way}" for way in measured), *computed]
    head = ["drafts by", "steps", *(f"acceptance length, {way}" for way in accepted), *speedups]

    # A line for each candidate, in the order of the first way. In other ways it may be missing.
    lines = []
    for name, report in measured[accepted[0]].items():
        rows = [
            reports_of_way[name]["results"][0] if name in reports_of_way else {}
            for reports_of_way in measured.values()
        ]
        lengths = [
            format_length(row) for way, row in zip(measured, rows, strict=True) if way in accepted
        ]
        model = report["draft"]["model"]
        steps = f"{load_history(model).steps}" if model else "–"
        cells = [
            f"{format_times(row.get('speedup'))}{format_bracketed_interval(row, 'speedup')}"
            for row in rows
        ]
        cells += [format_times(compute_bound_speedup(rows[0]))] if in_batches else []
        lines.append([describe_candidate(report), steps, *lengths, *cells])
    return format_table(head, lines)


def compute_bound_speedup(row: Mapping[str, Any]) -> float:
    """Return the speedup if a pass costs in proportion to its tokens, and the draft nothing.

    It is the number of tokens generated per token verified.
    """
    # Each round verifies its draft tokens and the target's own token.
    verified = row["num_rounds"] + row["num_draft_tokens"]
    return float(row["mean_acceptance_length"] * row["num_rounds"] / verified)


def format_length(row: Mapping[str, Any]) -> str:
    """Return an acceptance length with its interval; an empty row has none."""
    value = row.get("mean_acceptance_length")
    return (
        f"{format_number(value)}{format_bracketed_interval(row, 'mean_acceptance_length')}"
        if row
        else format_number(value)
    )


def select_chains(reports_of_way: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the reports of the candidates that do not draft trees."""
    return {
        name: report for name, report in reports_of_way.items() if not report["settings"]["tree"]
    }


def describe_candidate(report: Mapping[str, Any]) -> str:
    """Return what a candidate drafts by, as tables show it."""
    return f"`{describe_method(report)}`{', a tree' if report['settings']['tree'] else ''}"


def load_history(draft: str) -> History:
    """Return the training history of a draft."""
    history = read_history(Path(draft), key="drafts")
    assert history, draft
    return history


def format_simulated_table(drafts: Sequence[str]) -> str:
    """Return a table of simulated acceptance lengths, greedy and sampled.

    It has a line for each evaluation of each training.
    """
    # A line for each evaluation in the training history of each draft.
    lines = []
    for draft in drafts:
        for entry in load_history(draft).log:
            if entry.get("step") and SIMULATED_METRICS[0] in entry:
                lines.append(
                    (
                        f"`{Path(draft).parent.name.rpartition('-')[0]}`",
                        f"{entry['step']}",
                        *(format_number(entry[name]) for name in SIMULATED_METRICS),
                    )
                )
    return format_table(("trained", "steps", *SINGLE_REQUEST_WAYS), lines)


if __name__ == "__main__":
    sys.exit(
        run(
            main,
            Options,
            [argument for argument in sys.argv[1:] if is_script_option(argument, Options)],
        )
    )
