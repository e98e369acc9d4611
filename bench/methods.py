"""Every method on the pico suite, in one paired run, and the table of them in the README.

    make methods

trains each method by its recipe where that is not done yet (runs/methods/<method>), compares them (runs/methods/comparison.json, with each
one's report beside it), and writes the README's table. About twenty minutes on two CPU cores.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdistill.comparison.compare import is_lossless
from specdistill.errors import ExitCode
from specdistill.methods import METHODS
from specdistill.methods.recipe import Recipe
from specdistill.planning.rows import recipe_for
from specdistill.project import ROOT
from specdistill.recipe.load import load_recipe, recipe_yaml
from specdistill.report.phrases import a_round, between, duration, number, percent, settings_line, size, times
from specdistill.report.text import table, write_between

FOLDER = Path("runs/methods")
RECIPES = {method: name for method in METHODS if (name := recipe_for(method, "pico")[0] or "").startswith("pico/")}
HEAD = ("method", "acceptance length", "accepted at position 1, 2, …", "speedup", "lossless", "draft", "training")


def main() -> int:
    for name, recipe in RECIPES.items():
        keys = [f"recipe={recipe}", f"train.output_dir={FOLDER / name}"]
        record = FOLDER / name / "run" / "recipe.yaml"
        if (FOLDER / name / "draft").is_dir() and record.read_text(encoding="utf-8") == recipe_yaml(load_recipe(Recipe, keys)):
            continue
        shutil.rmtree(FOLDER / name, ignore_errors=True)  # of another recipe, or unfinished
        specdistill("train", *keys)
    drafts = ",".join([*(str(FOLDER / name / "draft") for name in RECIPES), "ngram"])
    specdistill("compare", "target=pico", f"drafts=[{drafts}]", "suite=pico", f"output_dir={FOLDER}", *sys.argv[1:])
    comparison = json.loads((FOLDER / "comparison.json").read_text(encoding="utf-8"))
    shown = f"{caption(comparison['candidates'][0]['report'])}\n\n{methods_table(comparison['candidates'])}"
    write_between(ROOT / "README.md", "methods", shown)
    print(shown)
    return ExitCode.DONE


def specdistill(verb: str, *arguments: str) -> None:
    """Run a command of the package; this process ends with its exit code when that is not 0."""
    print(f"$ specdistill {verb} {' '.join(arguments)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "specdistill", verb, *arguments], check=False).returncode
    if code:
        sys.exit(code)


def caption(report: Mapping[str, Any]) -> str:
    """How the table was measured, in a sentence."""
    settings, row, threads = report["settings"], report["results"][0], report["hardware"]["cpu_threads"]
    return (
        f"Measured for pico by `make methods`: {settings_line(report)}, {threads} threads; {row['num_prompts']} prompts, one paired run "
        f"of {settings['repeats']} repetitions. Training is the time of its steps, without the generation of its data."
    )


def methods_table(candidates: Sequence[Mapping[str, Any]]) -> str:
    """One line a method, in the order of the project's own table."""
    order = list(METHODS)
    ordered = sorted(candidates, key=lambda candidate: order.index(candidate["report"]["draft"]["method"]))
    return table(HEAD, (_line(candidate) for candidate in ordered))


def _line(candidate: Mapping[str, Any]) -> list[str]:
    report, training = candidate["report"], candidate["training"]
    row = report["results"][0]
    return [
        f"`{report['draft']['method']}`",
        ", ".join(
            filter(None, [f"{number(row['mean_acceptance_length'])}{between(row, 'mean_acceptance_length')}", a_round(row)])
        ),
        " ".join(percent(rate) for rate in row["acceptance_rate_per_position"]),
        f"{times(row['speedup'])}{between(row, 'speedup')}",
        "yes" if is_lossless(report) else "NO",
        size(report["draft"]["bytes"]) if report["draft"]["bytes"] else "–",
        duration(training["seconds"]) if training else "–",
    ]


if __name__ == "__main__":
    sys.exit(main())
