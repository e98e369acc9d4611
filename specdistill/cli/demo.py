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
    # Keys of the user come last, so that they override those of the demo. Loading the recipe checks
    # them first, so that a mistake in a key does not delete the results of an earlier demo.
    keys = [f"recipe={DEMO_RECIPE}", f"train.output_dir={DEMO_FOLDER}", *arguments]
    output_dir = load_recipe(Recipe, select_recipe_keys(keys)).train["output_dir"]

    # Remove the results of an earlier demo. Only a folder that a training wrote is removed; `train`
    # decides about a folder with another name or other content.
    if output_dir == DEMO_FOLDER and (Path(DEMO_FOLDER) / "run" / "recipe.yaml").is_file():
        if Path(DEMO_FOLDER).is_symlink():
            raise UserError(
                "train.output_dir",
                got=f"{DEMO_FOLDER}, which is a link",
                expected="a folder. Remove the link, or type train.output_dir=PATH",
            )
        shutil.rmtree(DEMO_FOLDER)

    # Run each verb in a process of its own, as a user would, and stop at the first that fails.
    for verb in ("train", "eval"):
        # With --json only the verb `eval` prints a result, its report.
        command = [verb, *(key for key in keys if verb == "eval" or key != JSON)]
        logger.info(f"$ specdistill {shlex.join(command)}")
        code = subprocess.run(
            [sys.executable, "-m", "specdistill", *command], check=False
        ).returncode
        # A negative code is the number of the signal that ended the process, mostly SIGKILL when
        # memory runs out.
        if code < 0:
            raise ResourceError(
                f"specdistill {verb} was killed by signal {-code}",
                next_step="free memory and start again",
            )
        if code != ExitCode.DONE:
            return code
    return ExitCode.DONE
