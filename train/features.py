"""Fill the feature store that a head's recipe names, for training to read: with hidden_states.mode=hybrid, and without training.

accelerate launch --config_file accelerate_configs/cpu.yaml train/features.py recipe=pico/eagle3 hidden_states.mode=hybrid …
"""

import sys

from specdistill import command
from specdistill.errors import UserError
from specdistill.methods.load import create_draft
from specdistill.methods.recipe import FeatureRecipe, Recipe, trainable
from specdistill.produce.features import feature_store
from specdistill.produce.job import Job
from specdistill.produce.make import open_rows
from specdistill.rows.row_set import RowTarget
from specdistill.suites.conversations import use_template
from specdistill.targets.frozen import FrozenTarget
from specdistill.terminal import result
from specdistill.training.arguments import autocast_dtype, check_precision, training_arguments


def main(recipe: Recipe) -> None:
    recipe = trainable(recipe)
    if not isinstance(recipe, FeatureRecipe):
        raise UserError(
            "method", got=recipe.method, expected="one whose drafts read the target's hidden states"
        )
    if recipe.hidden_states.mode != "hybrid":
        expected = "hybrid, with hidden_states.path: a store that is filled"
        raise UserError("hidden_states.mode", got=recipe.hidden_states.mode, expected=expected)
    arguments = training_arguments(recipe.train)
    check_precision(arguments, recipe.target.dtype)

    # Target and data
    target = FrozenTarget.load(
        **vars(recipe.target), layers_on_disk=not recipe.hidden_states.runs_layers
    )
    use_template(target.tokenizer, recipe)
    train_set, eval_set = open_rows(
        Job(recipe.data, RowTarget.of(target), recipe.measured_on, recipe.states_folder)
    )

    # Features of the layers that the draft reads, by passes as training makes them
    draft = create_draft(recipe, target, train_set)
    passes = {
        "autocast": autocast_dtype(arguments),
        "batch_size": arguments.train_batch_size,
        "force": recipe.data.force,
    }
    store = feature_store(
        recipe.hidden_states, target, draft.aux_layers, [train_set, eval_set], **passes
    )
    result(
        {"folder": recipe.hidden_states.path, "rows": store.num_rows, "missing": store.num_missing}
    )


if __name__ == "__main__":
    sys.exit(command.run(main, Recipe))
