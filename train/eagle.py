"""Train a head for a frozen target: EAGLE (arXiv 2401.15077), EAGLE-3 (2503.01840) or multi-token prediction (DeepSeek-V3, 2412.19437).

accelerate launch --config_file accelerate_configs/cpu.yaml train/eagle.py recipe=pico/eagle3
"""

import sys
from functools import partial

from specdistill import command
from specdistill.gate.rules import load_gate
from specdistill.measurement.selection import decoded_acceptance_length
from specdistill.methods.chains.recipe import HeadRecipe
from specdistill.methods.load import create_draft, implementation
from specdistill.methods.recipe import Recipe, check_trainable
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


def main(recipe: HeadRecipe) -> None:
    check_trainable(recipe, "train/eagle.py")
    check_suite(recipe.eval.suite)  # with the gate it judges the draft later: a mistake in them shows now
    if recipe.selection is not None:
        check_suite(recipe.selection.suite, key="selection.suite")
    load_gate(recipe.gate)
    run = TrainingRun.open(recipe, target_dtype=recipe.target.dtype, eval_on_start=recipe.evaluates_first)
    method = implementation(recipe.method)

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
    passes = {
        "autocast": autocast_dtype(run.arguments),
        "batch_size": run.arguments.train_batch_size,
        "force": recipe.data.force,
    }
    store = feature_store(hidden_states, target, getattr(draft, "aux_layers", ()), [train_set, eval_set], **passes)

    # Train, and save the best
    optimizer = build_optimizer(recipe.optimizer, draft, run.arguments)
    save, decode = partial(save_draft, method, target), decoded_acceptance_length(recipe, target)
    options = {"save": save, "decode": decode, "optimizer": optimizer, "store": store}
    run.train(DraftTrainer(objective, target, run.arguments, train_set, eval_set, **options))


if __name__ == "__main__":
    sys.exit(command.run(main, Recipe))
