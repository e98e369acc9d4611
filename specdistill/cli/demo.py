"""`specdistill demo`: run the verbs train and eval one after the other for the bundled target."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from specdistill.common.errors import ExitCode, ResourceError, UserError, logger
from specdistill.common.terminal import JSON
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_recipe
from specdistill.recipe.short_keys import select_recipe_keys

DEMO_RECIPE = "pico/eagle3"
DEMO_FOLDER = "runs/demo"


def demo(arguments: list[str]) -> int:
    """Train and measure a draft for pico, the bundled target (minutes on a CPU).

    specdistill demo train.max_steps=50
    """
    # The user's keys come last, so that they override the keys of the demo. Loading the recipe
    # checks all keys: a mistake ends the command here, before the results of an earlier demo are
    # removed.
    keys = [f"recipe={DEMO_RECIPE}", f"train.output_dir={DEMO_FOLDER}", *arguments]
    output_dir = load_recipe(Recipe, select_recipe_keys(keys)).train["output_dir"]

    # Remove the results of an earlier demo: only the demo's own folder, and only if a training
    # wrote it, so that it has run/recipe.yaml. The verb `train` checks any other folder.
    if output_dir == DEMO_FOLDER and (Path(DEMO_FOLDER) / "run" / "recipe.yaml").is_file():
        if Path(DEMO_FOLDER).is_symlink():
            raise UserError(
                "train.output_dir",
                got=f"{DEMO_FOLDER}, which is a link",
                expected="a folder. Remove the link, or choose a folder with train.output_dir=PATH",
            )
        shutil.rmtree(DEMO_FOLDER)

    # Run each verb in a process of its own, as a user would. Stop at the first verb that fails.
    for verb in ("train", "eval"):
        # With --json only the verb `eval` prints a result: its report.
        command = [verb, *(key for key in keys if verb == "eval" or key != JSON)]
        logger.info(f"$ specdistill {shlex.join(command)}")
        code = subprocess.run(
            [sys.executable, "-m", "specdistill", *command], check=False
        ).returncode
        # A negative code is the number of the signal that ended the process, for example SIGKILL
        # when memory runs out.
        if code < 0:
            raise ResourceError(
                f"specdistill {verb} was killed by signal {-code}",
                next_step="free memory and start again",
            )
        if code != ExitCode.DONE:
            return code
    return ExitCode.DONE
