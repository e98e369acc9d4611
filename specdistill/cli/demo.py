"""`specdistill demo`: train a draft for the bundled target, or take the shipped one; measure it."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from specdistill.common.errors import ExitCode, ResourceError, UserError, logger
from specdistill.common.project import RECIPES
from specdistill.common.terminal import JSON
from specdistill.methods.recipe import Recipe
from specdistill.recipe.fields import Section, option
from specdistill.recipe.load import load_own_keys, load_recipe
from specdistill.recipe.short_keys import select_recipe_keys

DEMO_RECIPE = "pico/eagle3"
DEMO_FOLDER = "runs/demo"
QUICK_FOLDER = "runs/demo-quick"
# A draft that was trained with DEMO_RECIPE.
SHIPPED_DRAFT = RECIPES / "pico" / "eagle3-draft"
# The sections of a recipe that are only read by training.
TRAINING_SECTIONS = {
    "data",
    "draft",
    "hidden_states",
    "loss",
    "on_policy",
    "optimizer",
    "selection",
    "train",
}


class DemoOptions(Section):
    """The keys of `specdistill demo` that are no keys of its recipe."""

    quick: bool = option(
        False,
        "train no draft: take a quick look (eval.quick) at the EAGLE-3 draft that ships with the"
        " package",
    )


def demo(arguments: list[str]) -> int:
    """Train and measure a draft for pico, the bundled target (minutes on a CPU).

    specdistill demo quick=true
    specdistill demo train.max_steps=50
    """
    options, recipe_keys = load_own_keys(DemoOptions, arguments)
    if options.quick:
        return _measure_shipped_draft(recipe_keys)

    # The user's keys come last, so that they override the keys of the demo. Loading the recipe
    # checks all keys: a mistake ends the command here, before the results of an earlier demo are
    # removed.
    keys = [f"recipe={DEMO_RECIPE}", f"train.output_dir={DEMO_FOLDER}", *recipe_keys]
    output_dir = load_recipe(Recipe, select_recipe_keys(keys)).train["output_dir"]

    # Remove the results of an earlier demo: only the demo's own folder, and only if it has
    # run/recipe.yaml, which training writes. The verb `train` checks any other folder.
    if output_dir == DEMO_FOLDER and (Path(DEMO_FOLDER) / "run" / "recipe.yaml").is_file():
        if Path(DEMO_FOLDER).is_symlink():
            raise UserError(
                "train.output_dir",
                got=f"{DEMO_FOLDER}, which is a link",
                expected="a folder. Remove the link, or choose a folder with train.output_dir=PATH",
            )
        shutil.rmtree(DEMO_FOLDER)

    # Train, then measure. With --json only the verb `eval` prints a result: its report.
    code = _run_verb("train", [key for key in keys if key != JSON])
    if code != ExitCode.DONE:
        return code
    return _run_verb("eval", keys)


def _measure_shipped_draft(recipe_keys: list[str]) -> int:
    """Take a quick look at the draft that ships with the package, and return the exit code.

    Args:
        recipe_keys: the user's keys, which override those of the demo.

    Raises:
        UserError: for a key that only training reads, because it would have no effect.
            `train.output_dir` is allowed.
    """
    for key in recipe_keys:
        section = key.partition("=")[0].partition(".")[0]
        if section in TRAINING_SECTIONS and not key.startswith("train.output_dir="):
            raise UserError(
                "quick",
                got=f"true with {key}",
                text=(
                    f"quick: quick=true trains no draft, so {key} has no effect. Remove {key}, or"
                    " type quick=false to train a draft."
                ),
            )
    keys = [
        f"recipe={DEMO_RECIPE}",
        f"train.output_dir={QUICK_FOLDER}",
        f"eval.draft={SHIPPED_DRAFT}",
        "eval.quick=true",
    ]
    code = _run_verb("eval", [*keys, *recipe_keys])
    # A quick look leaves its gate inconclusive. That is no failure of the demo.
    return ExitCode.DONE if code == ExitCode.INCONCLUSIVE else code


def _run_verb(verb: str, keys: list[str]) -> int:
    """Run a verb in a process of its own, as a user would, and return its exit code.

    Raises:
        ResourceError: if a signal killed the process, for example SIGKILL when memory ran out.
    """
    command = [verb, *keys]
    logger.info(f"$ specdistill {shlex.join(command)}")
    code = subprocess.run([sys.executable, "-m", "specdistill", *command], check=False).returncode
    # A negative code is minus the number of the signal that killed the process.
    if code < 0:
        raise ResourceError(
            f"specdistill {verb} was killed by signal {-code}",
            next_step="free memory and start again",
        )
    return code
