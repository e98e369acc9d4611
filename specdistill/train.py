"""Training a draft, from its recipe to the best checkpoint of its run: what `train/eagle.py` and `train/draft.py` do."""

from functools import partial
from typing import Any

from specdistill.gate.rules import load_gate
from specdistill.measurement.selection import decoded_acceptance_length
from specdistill.methods.load import create_draft, implementation
from specdistill.methods.recipe import TrainedRecipe
from specdistill.methods.target_record import save_draft
from specdistill.produce.features import feature_store
from specdistill.produce.make import make_rows
from specdistill.recipe.sections import HiddenStatesConfig
from specdistill.rows.row_set import RowTarget, open_rows
from specdistill.suites.suite import check_suite
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.arguments import autocast_dtype
from specdistill.training.optimizer import build_optimizer
from specdistill.training.run import TrainingRun
from specdistill.training.trainer import DraftTrainer


def train(recipe: TrainedRecipe) -> TrainingRun:
    """The run whose folder then holds the draft. Every process of a launch calls it. Raises UserError for what cannot be trained so."""
    check_suite(recipe.eval.suite)  # with the gate it judges the draft later: an error in them shows now
    if recipe.selection is not None:
        check_suite(recipe.selection.suite, key="selection.suite")
    load_gate(recipe.gate)
    run = TrainingRun.open(recipe, target_dtype=recipe.target.dtype, eval_on_start=recipe.evaluates_first)
    method = implementation(recipe.method)
    assert method.objective is not None, recipe.method

    # Target and data
    hidden_states = getattr(recipe, "hidden_states", HiddenStatesConfig())  # which heads have
    runs_layers = hidden_states.runs_layers or recipe.selection is not None
    target = FrozenTarget.load(**vars(recipe.target), layers_on_disk=not runs_layers)
    train_set, eval_set = open_rows(recipe.data, RowTarget.of(target), measured_on=recipe.measured_on, make=make_rows)

    # Draft, what it learns, and the run's record before its first step
    draft = create_draft(recipe, target, train_set)
    objective = method.objective(draft, recipe, target)
    run.record(
        target=target.name,
        target_revision=target.revision,
        target_weights=target.identity.weights,
        data_fingerprint=train_set._fingerprint,
        rows=len(train_set),
    )

    # Features that are kept, where each step does not have the target make its own
    autocast, rows = autocast_dtype(run.arguments), run.arguments.train_batch_size
    passes: dict[str, Any] = {"autocast": autocast, "batch_size": rows, "force": recipe.data.force}
    store = feature_store(hidden_states, target, getattr(draft, "aux_layers", ()), [train_set, eval_set], **passes)

    # Train, and save the best
    optimizer = build_optimizer(recipe.optimizer, draft, run.arguments)
    save, decode = partial(save_draft, method, target), decoded_acceptance_length(recipe, target)
    options: dict[str, Any] = {"save": save, "decode": decode, "optimizer": optimizer, "store": store}
    run.train(DraftTrainer(objective, target, run.arguments, train_set, eval_set, **options))
    return run
