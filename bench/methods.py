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

# By method, the recipe that trains it for pico. Methods without such a recipe are left out.
RECIPES = {
    method: name
    for method in METHODS
    if (name := find_recipe(method, "pico")[0] or "").startswith("pico/")
}


def main() -> int:
    """Train all methods, compare them, and write the table."""
    # Train each method, unless its draft exists.
    for name, recipe in RECIPES.items():
        train(FOLDER / name, f"recipe={recipe}")

    # Compare all drafts and n-gram lookup in one run, so that they meet the same machine.
    drafts = ",".join([*(str(FOLDER / name / "draft") for name in RECIPES), "ngram"])
    run_specdistill(
        "compare",
        "target=pico",
        f"drafts=[{drafts}]",
        "suite=pico",
        f"output_dir={FOLDER}",
        *sys.argv[1:],
    )

    # Write the table.
    comparison = json.loads((FOLDER / "comparison.json").read_text(encoding="utf-8"))
    candidates = comparison["candidates"]
    measured = format_caption(candidates[0]["report"], "pico by `make methods`")
    shown = f"{measured} {TRAINING}\n\n{format_methods_table(candidates)}"
    write_between(ROOT / "docs" / "methods.md", "methods", shown)
    print(shown)
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
