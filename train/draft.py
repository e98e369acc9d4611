"""Train a draft model by distillation: a smaller language model with the target's own vocabulary (DistillSpec, arXiv 2310.08461).

accelerate launch --config_file accelerate_configs/cpu.yaml train/draft.py recipe=pico/draft
"""

import sys
from functools import partial

from specdistill import command
from specdistill.gate.rules import load_gate
from specdistill.measurement.selection import decoded_acceptance_length
from specdistill.methods.draft_model.config import Recipe as DraftModelRecipe
from specdistill.methods.load import create_draft, implementation
from specdistill.methods.recipe import Recipe, check_trainable
from specdistill.methods.target_record import save_draft
from specdistill.produce.make import make_rows
from specdistill.rows.row_set import RowTarget, open_rows
from specdistill.suites.suite import check_suite
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.optimizer import build_optimizer
from specdistill.training.run import TrainingRun
from specdistill.training.trainer import DraftTrainer


def main(recipe: DraftModelRecipe) -> None:
    check_trainable(recipe, "train/draft.py")
    check_suite(recipe.eval.suite)  # with the gate it judges the draft later: a mistake in them shows now
    if recipe.selection is not None:
        check_suite(recipe.selection.suite, key="selection.suite")
    load_gate(recipe.gate)
    run = TrainingRun.open(recipe, target_dtype=recipe.target.dtype, eval_on_start=recipe.evaluates_first)
    method = implementation(recipe.method)

    # Target and data
    target = FrozenTarget.load(**vars(recipe.target))
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

    # Train, and save the best
    optimizer = build_optimizer(recipe.optimizer, draft, run.arguments)
    save, decode = partial(save_draft, method, target), decoded_acceptance_length(recipe, target)
    options = {"save": save, "decode": decode, "optimizer": optimizer}
    run.train(DraftTrainer(objective, target, run.arguments, train_set, eval_set, **options))


if __name__ == "__main__":
    sys.exit(command.run(main, Recipe))
