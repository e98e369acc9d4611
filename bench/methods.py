"""Compare every method on the pico suite, in one run, and write the table of docs/methods.md.

    make methods

trains each method by its recipe if that is not done yet (runs/methods/<method>), compares all of
them (runs/methods/comparison.json, with the report of each), and writes the table of
docs/methods.md. This takes twenty to forty minutes on two CPU cores.
"""

import json
import sys
from pathlib import Path

from bench.drafts import TRAINING, format_caption, format_methods_table, run_specdistill, train
from bench.pages import write_between
from specdistill.advice.plan.estimates import find_recipe
from specdistill.common.errors import ExitCode
from specdistill.common.project import ROOT
from specdistill.methods import METHODS

FOLDER = Path("runs/methods")


def main() -> int:
    """Train a draft for pico with each method, compare the drafts, and write the table."""
    # Train each method, unless its draft exists.
    recipes = find_pico_recipes()
    for method, recipe in recipes.items():
        train(FOLDER / method, f"recipe={recipe}")

    # Compare all drafts and n-gram lookup in one run, so that all are measured on the same machine
    # at the same time.
    drafts = [str(FOLDER / method / "draft") for method in recipes]
    drafts.append("ngram")
    run_specdistill(
        "compare",
        "target=pico",
        f"drafts=[{','.join(drafts)}]",
        "suite=pico",
        f"output_dir={FOLDER}",
        *sys.argv[1:],
    )

    # Write the table.
    comparison = json.loads((FOLDER / "comparison.json").read_text(encoding="utf-8"))
    candidates = comparison["candidates"]
    caption = format_caption(candidates[0]["report"], "pico by `make methods`")
    text = f"{caption} {TRAINING}\n\n{format_methods_table(candidates)}"
    write_between(ROOT / "docs" / "methods.md", "methods", text)
    print(text)
    return ExitCode.DONE


def find_pico_recipes() -> dict[str, str]:
    """Return the recipe that trains each method for pico; methods without one are left out."""
    recipes = {}
    for method in METHODS:
        recipe, _ = find_recipe(method, "pico")
        if recipe and recipe.startswith("pico/"):
            recipes[method] = recipe
    return recipes


if __name__ == "__main__":
    sys.exit(main())
