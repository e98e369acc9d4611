"""Every method on the pico suite, in one paired run, and the table of them in docs/methods.md.

    make methods

trains each method by its recipe where that is not done yet (runs/methods/<method>), compares them (runs/methods/comparison.json, with each
one's report), and writes the table of docs/methods.md. Twenty to forty minutes on two CPU cores.
"""

import json
import sys
from pathlib import Path

from bench.drafts import TRAINING, caption, methods_table, specdistill, train
from bench.pages import write_between
from specdistill.errors import ExitCode
from specdistill.methods import METHODS
from specdistill.planning.estimates import recipe_for
from specdistill.project import ROOT

FOLDER = Path("runs/methods")
RECIPES = {
    method: name
    for method in METHODS
    if (name := recipe_for(method, "pico")[0] or "").startswith("pico/")
}


def main() -> int:
    for name, recipe in RECIPES.items():
        train(FOLDER / name, f"recipe={recipe}")
    drafts = ",".join([*(str(FOLDER / name / "draft") for name in RECIPES), "ngram"])
    specdistill(
        "compare",
        "target=pico",
        f"drafts=[{drafts}]",
        "suite=pico",
        f"output_dir={FOLDER}",
        *sys.argv[1:],
    )
    comparison = json.loads((FOLDER / "comparison.json").read_text(encoding="utf-8"))
    candidates = comparison["candidates"]
    measured = caption(candidates[0]["report"], "pico by `make methods`")
    shown = f"{measured} {TRAINING}\n\n{methods_table(candidates)}"
    write_between(ROOT / "docs" / "methods.md", "methods", shown)
    print(shown)
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
