"""`specdistill train`: train a draft, or the bundled target pico itself."""

import runpy
import sys

from specdistill.cli.data import check_named_files
from specdistill.cli.launch import LaunchOptions, import_libraries, launch
from specdistill.common.errors import ExitCode, UserError
from specdistill.common.project import ROOT
from specdistill.methods import METHODS
from specdistill.methods.recipe import DEFAULT_METHOD, Recipe, TrainedRecipe, check_trainable
from specdistill.recipe.load import load_own_keys, load_recipe, merge_values
from specdistill.recipe.short_keys import TRAIN, select_recipe_keys

# The script that trained pico. Its recipes have keys of their own.
TARGET_SCRIPT = ROOT / "train" / "target.py"


def train(arguments: list[str]) -> int:
    """Train a draft (on several GPUs with launch=ddp).

    specdistill train recipe=pico/eagle3
    specdistill train recipe=mine.yaml train.output_dir=runs/mine train.num_train_epochs=2
    specdistill train recipe=mine.yaml launch=ddp num_processes=8
    """
    # Separate the keys of the launcher from the keys of the recipe. Flags such as --json set no
    # values, and have no `=`.
    launch_options, recipe_arguments = load_own_keys(LaunchOptions, arguments)
    keys = select_recipe_keys(recipe_arguments, TRAIN)
    values = merge_values([key for key in keys if "=" in key])

    # A recipe may train the bundled target pico instead of a draft. Only the script TARGET_SCRIPT
    # knows the keys of such a recipe. The script runs in this process, as if it had been started
    # with `python`.
    if is_target_recipe(arguments):
        import_libraries()
        if launch_options.launch is not None:
            return launch(TARGET_SCRIPT, recipe_arguments, launch_options)
        sys.argv = [str(TARGET_SCRIPT), *recipe_arguments]
        runpy.run_path(str(TARGET_SCRIPT), run_name="__main__")
        return ExitCode.DONE

    # Check the method, the recipe and its files before torch is imported, which is slow. `method`
    # is None if no method has the name that was typed; `load_recipe` then raises the error.
    method = METHODS.get(str(values.get("method", DEFAULT_METHOD)))
    if method is not None and not method.is_trained:
        raise UserError(
            "method",
            got=f"{values['method']}, which needs no training",
            expected=" or ".join(name for name, row in METHODS.items() if row.is_trained),
        )
    recipe = load_recipe(Recipe, keys)
    assert isinstance(recipe, TrainedRecipe)  # The check of the method above ensures this.
    check_named_files(recipe)

    # Train in this process, or in the processes that accelerate starts.
    import_libraries()
    if launch_options.launch is not None:
        return launch(ROOT / "train" / "eagle.py", recipe_arguments, launch_options)
    # This module imports torch, so it is imported only here.
    from specdistill.workflows.train import train_draft

    train_draft(check_trainable(recipe))
    return ExitCode.DONE


def is_target_recipe(arguments: list[str]) -> bool:
    """Return whether the recipe trains the bundled target pico instead of a draft.

    Only such a recipe has a section `curriculum`.

    Args:
        arguments: the arguments of `specdistill train`.
    """
    # Flags, such as --json, have no `=`, and set no values.
    return "curriculum" in merge_values(
        [key for key in select_recipe_keys(arguments, TRAIN) if "=" in key]
    )
