"""Compute and store the hidden states of the target that a training reads, without training.

`specdistill data features` does this, for example on another machine than the training.
"""

from typing import NamedTuple

from specdistill.common.errors import UserError
from specdistill.data.produce.features import open_feature_store
from specdistill.data.rows.packing import check_coverage
from specdistill.data.rows.row_set import RowTarget
from specdistill.evaluation.suites.conversations import use_template
from specdistill.methods.load import create_draft, load_method
from specdistill.methods.recipe import FeatureRecipe, TrainedRecipe
from specdistill.recipe.sections import HybridStates
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.arguments import (
    build_training_arguments,
    check_precision,
    find_autocast_dtype,
)
from specdistill.training.loss_tokens import select_learnable_rows
from specdistill.workflows.check_training import check_training
from specdistill.workflows.make_data import open_rows


class StoredFeatures(NamedTuple):
    """The size of a store of hidden states, and what it lacks for a training.

    Attributes:
        folder: the folder of the store.
        rows: the number of rows whose hidden states the store has.
        missing: the number of rows of the training whose hidden states the store does not have.
    """

    folder: str | None
    rows: int
    missing: int


def store_features(recipe: TrainedRecipe) -> StoredFeatures:
    """Store the hidden states that training with this recipe reads.

    Training can then read the hidden states of the target from the disk, instead of running the
    target in each step. Every process of a launch calls this function, and each process computes a
    share of the hidden states.

    Args:
        recipe: the recipe of the training.

    Returns:
        The folder of the store, and how many rows of the training it has and lacks.

    Raises:
        UserError: for a method that reads no hidden states, and for any `hidden_states.mode` other
            than `hybrid`, because only this mode fills a store.
    """
    # Check that the recipe names a store to fill.
    if not isinstance(recipe, FeatureRecipe):
        raise UserError(
            "method",
            got=recipe.method,
            expected="a method whose drafts read the target's hidden states",
        )
    if not isinstance(recipe.hidden_states, HybridStates):
        expected = "hybrid, with the folder of the store in hidden_states.path"
        raise UserError("hidden_states.mode", got=recipe.hidden_states.mode, expected=expected)

    # The store is computed in the precision that training with these arguments uses.
    arguments = build_training_arguments(recipe.train)
    check_precision(arguments, recipe.target.dtype)

    # Check everything that can be checked without loading weights.
    job = check_training(recipe)

    # Load the target and open the rows. If servers compute all hidden states, this process does not
    # run the target's layers, so their weights stay on the disk.
    target = FrozenTarget.load(
        **vars(recipe.target), layers_on_disk=not recipe.hidden_states.runs_layers
    )
    use_template(target.tokenizer, recipe)
    train_rows, eval_rows = open_rows(job.load_target(RowTarget.from_target(target)))

    # Build the draft, which says which layers it reads. Build its objective, which says from which
    # rows the draft can learn. Only the hidden states of these rows are stored.
    draft = create_draft(recipe, target, train_rows)
    check_coverage(train_rows, target.vocab_size, draft, getattr(recipe.draft, "init", None))
    objective = load_method(recipe.method).build_objective(draft, recipe, target)
    row_sets = select_learnable_rows([train_rows, eval_rows], objective, recipe.data)

    # Compute the hidden states with the batch size and precision of training.
    store = open_feature_store(
        recipe.hidden_states,
        target,
        getattr(draft, "aux_layers", ()),
        row_sets,
        autocast=find_autocast_dtype(arguments),
        batch_size=arguments.train_batch_size,
        force=recipe.data.force,
    )
    assert store is not None  # In the mode `hybrid` there always is a store.
    return StoredFeatures(recipe.hidden_states.path, store.num_rows, store.num_missing)
