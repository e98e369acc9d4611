"""Every method for SmolLM2-135M-Instruct on the same data: as many training tokens, or minutes, each, and as many draft tokens verified.

    make smollm2-methods                       # what is done stays done when it is killed: hours on two CPU cores
    make smollm2-methods ARGS="small=true"     # the line on little of everything, in minutes: its numbers mean nothing

takes the target, the prompts and the answers of `make smollm2`. Trains each recipe of recipes/smollm2 for as many steps (equal tokens),
each for as many as take the same time (equal minutes), and those of `longer=` longer, evaluated on the way; heads that feed their states
back for as many steps as they draft. Measures them, n-gram and suffix lookup, each draft as a tree and behind n-gram lookup, greedily and
at temperature 1, one request and several at a time: a round never verifies more than K draft tokens. Leaves a comparison for each way of
measuring in runs/smollm2/methods, and the tables of docs/methods.md and of the README.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.drafts import caption, drafts_by, reports, train
from bench.pages import write_between
from bench.smollm2 import FOLDER, Shape, compare, fetch_all, is_own, small_keys
from specdistill.command import run
from specdistill.errors import ExitCode, UserError
from specdistill.methods.recipe import Recipe
from specdistill.project import ROOT
from specdistill.recipe.fields import Section, option
from specdistill.recipe.load import load_recipe
from specdistill.report.phrases import between, number, per_round, times
from specdistill.report.text import table
from specdistill.training.history import History, read_history

PAGE = ROOT / "docs" / "methods.md"
# Of a step over a row of 384 tokens, in processor time of one thread on an AMD EPYC, evaluations left out.
SECONDS = {
    "eagle3": 1.60,
    "dflash": 1.63,
    "dspark": 1.98,
    "pard": 2.70,
    "draft": 1.88,
    "mtp": 1.96,
    "early_exit": 1.04,
}
TENS = 10  # steps at equal minutes are whole tens, so that some methods need one training for both
LOOKUPS = ["ngram", "suffix"]
ONE_SEQUENCE = "early_exit"  # drafts chains for one request at a time
K = 4
CHAIN, TREE = Shape(K), Shape(3, {"budget": K, "depth": 3, "top_k": 2})
BEHIND_LOOKUP = Shape(K, lookup_first={"draft_tokens": K})
# Of each way of measuring, its keys, and in what shapes drafts are measured so.
WAYS: dict[str, tuple[dict[str, Any], list[Shape]]] = {
    "T = 0": ({}, [CHAIN, TREE, BEHIND_LOOKUP]),
    "T = 1": ({"temperature": 1.0}, [CHAIN, TREE, BEHIND_LOOKUP]),
    "T = 0, 4 at a time": ({"batch_size": 4}, [CHAIN, TREE]),
    "T = 0, 16 at a time": ({"batch_size": 16, "num_prompts": 16}, [CHAIN]),
}
ONE_AT_A_TIME, OF_SMALL = ["T = 0", "T = 1"], ["T = 0", "T = 0, 4 at a time"]
SIMULATED = ["eval_acceptance_length", "eval_acceptance_length_sampled"]
Measured = dict[str, dict[str, dict[str, Any]]]  # by way and by candidate: the report


class Options(Section):
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
    keys = {name: keys_of(name, options) for name in options.recipes}
    recipes: dict[str, Any] = {name: load_recipe(Recipe, given) for name, given in keys.items()}
    check_same_data(recipes)
    place = (FOLDER / "small" if options.small else FOLDER) / "methods"
    fetch_all()

    def trained(steps: Mapping[str, int], evaluations: int = 1) -> list[str]:
        """The drafts of recipes after so many steps."""
        folders = [place / f"{name}-{num_steps}" for name, num_steps in steps.items()]
        for folder, (name, num_steps) in zip(folders, steps.items(), strict=True):
            train(
                folder,
                *keys[name],
                *of_steps(recipes[name], num_steps, evaluations),
                launch="cpu_processes",
            )
        return [str(folder / "draft") for folder in folders]

    tokens = trained(dict.fromkeys(recipes, options.steps))
    minutes = trained(
        {
            name: max(1, round(options.minutes * 60 / SECONDS[name] / TENS)) * TENS
            for name in recipes
        }
    )
    longer = trained(dict.fromkeys(options.longer, options.longer_steps), evaluations=4)

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
    by_minutes = measure(place / "minutes", minutes, phase, OF_SMALL if options.small else [*WAYS])

    sections = [
        said(by_minutes),
        methods_table(by_minutes),
        "At equal tokens, simulated on held-out rows, in chains of four:",
        simulated([*tokens, *longer]),
    ]
    shown = "\n\n".join(sections)
    print(shown, flush=True)
    if not options.small:
        write_between(PAGE, "smollm2_methods", shown)
        chains_alone = {way: without_trees(by_minutes[way]) for way in ONE_AT_A_TIME}
        write_between(
            ROOT / "README.md",
            "smollm2_methods",
            f"{said(chains_alone)}\n\n{methods_table(chains_alone)}",
        )
    return ExitCode.DONE


def keys_of(name: str, options: Options) -> list[str]:
    """A recipe's keys: features made in every step, since filling a store would spare one method what the others do; a head as deep as it
    drafts.
    """
    recipe = f"recipe=smollm2/{name}"
    whole: Any = load_recipe(Recipe, [recipe])
    online = (
        ["hidden_states.mode=online", "hidden_states.path=null"]
        if "hidden_states" in whole.model_fields_set
        else []
    )
    deep = [f"draft.ttt_steps={K}"] if hasattr(whole.draft, "ttt_steps") else []
    small = small_keys(name) if options.small else []
    k = f"eval.num_speculative_tokens={K}"  # of what is simulated
    return [
        recipe,
        *online,
        *deep,
        k,
        *small,
        *(each for each in sys.argv[1:] if not is_own(each, Options)),
    ]


def check_same_data(recipes: Mapping[str, Any]) -> None:
    """Raises UserError where recipes are not trained on the same rows."""
    first, *others = recipes
    for other in others:
        one, two = (recipes[name].data.model_dump() for name in (first, other))
        if differing := next((key for key in one if one[key] != two[key]), None):
            got = f"{two[differing]} in smollm2/{other} and {one[differing]} in smollm2/{first}"
            raise UserError(
                f"data.{differing}", got=got, expected="the same in all: their drafts are compared"
            )


def of_steps(recipe: Any, num_steps: int, evaluations: int) -> list[str]:
    """Keys for so many steps of a recipe, with the same share of warm-up; evaluated equally often in all of them."""
    warmup = max(1, round(num_steps * recipe.train["warmup_steps"] / recipe.train["max_steps"]))
    named = {"max_steps": num_steps, "warmup_steps": warmup} | dict.fromkeys(
        ("eval_steps", "save_steps"), num_steps // evaluations
    )
    return [f"train.{name}={value}" for name, value in named.items()]


def measure(
    place: Path, drafts: Sequence[str], phase: Mapping[str, Any], ways: Sequence[str]
) -> Measured:
    """Drafts, and the lookups, in one paired run for each way of measuring; without what a draft cannot do."""
    found = {}
    for way in ways:
        keys, shapes = WAYS[way]
        candidates = [
            (draft, shape)
            for shape in shapes
            for draft in drafts
            if ONE_SEQUENCE not in draft or not ("batch_size" in keys or shape is TREE)
        ]
        folder = place / way.replace(" = ", "").replace(", ", "-").replace(" ", "-")
        found[way] = reports(
            compare(
                folder, [*candidates, *((lookup, CHAIN) for lookup in LOOKUPS)], {**phase, **keys}
            )
        )
    return found


# What is written


def said(measured: Measured) -> str:
    """How the tables were measured."""
    report = next(iter(next(iter(measured.values())).values()))
    return caption(
        report,
        "SmolLM2-135M-Instruct, dequantised from Q4_1, by `make smollm2-methods`",
        f"up to {K} draft tokens verified",
    )


def methods_table(measured: Measured) -> str:
    """A line for each candidate: what it accepts and how fast it is, each way."""
    accepted = [way for way in measured if way in ONE_AT_A_TIME]
    in_batches = accepted != [*measured]
    computed = ["speedup, T = 0, compute-bound (computed)"] if in_batches else []
    speedups = [*(f"speedup, {way}" for way in measured), *computed]
    head = ["drafts by", "steps", *(f"acceptance length, {way}" for way in accepted), *speedups]
    lines = []
    for name, report in measured[accepted[0]].items():
        rows = [found[name]["results"][0] if name in found else {} for found in measured.values()]
        lengths = [length(row) for way, row in zip(measured, rows, strict=True) if way in accepted]
        model = report["draft"]["model"]
        steps = f"{history_of(model).steps}" if model else "–"
        cells = [f"{times(row.get('speedup'))}{between(row, 'speedup')}" for row in rows]
        cells += [times(at_large_batches(rows[0]))] if in_batches else []
        lines.append([what(report), steps, *lengths, *cells])
    return table(head, lines)


def at_large_batches(row: Mapping[str, Any]) -> float:
    """The speedup where a pass costs in proportion to its tokens, and the draft nothing: tokens generated per token verified."""
    verified = row["num_rounds"] + row["num_draft_tokens"]
    return float(row["tokens_per_round"] * row["num_rounds"] / verified)


def length(row: Mapping[str, Any]) -> str:
    """An acceptance length with its interval; of a candidate that was not measured so, none."""
    value = row.get("mean_acceptance_length")
    return (
        f"{number(value)}{between(row, 'mean_acceptance_length')} {per_round(row)}".strip()
        if row
        else number(value)
    )


def without_trees(found: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: report for name, report in found.items() if not report["settings"]["tree"]}


def what(report: Mapping[str, Any]) -> str:
    return f"`{drafts_by(report)}`{', a tree' if report['settings']['tree'] else ''}"


def history_of(draft: str) -> History:
    history = read_history(Path(draft), key="drafts")
    assert history, draft
    return history


def simulated(drafts: Sequence[str]) -> str:
    """Simulated acceptance lengths, greedy and sampled: a line for each evaluation of each training."""
    lines = [
        (
            f"`{Path(draft).parent.name.rpartition('-')[0]}`",
            f"{entry['step']}",
            *(number(entry[name]) for name in SIMULATED),
        )
        for draft in drafts
        for entry in history_of(draft).log
        if entry.get("step") and SIMULATED[0] in entry
    ]
    return table(("trained", "steps", *ONE_AT_A_TIME), lines)


if __name__ == "__main__":
    sys.exit(
        run(main, Options, [argument for argument in sys.argv[1:] if is_own(argument, Options)])
    )
