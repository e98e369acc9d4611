"""Train a multi-token-prediction layer for a frozen target: its own, or a fresh one (DeepSeek-V3, arXiv 2412.19437; FastMTP, 2509.18362).

accelerate launch --config_file accelerate_configs/cpu.yaml train/mtp.py recipe=pico/mtp
"""

import sys
from functools import partial

from transformers import set_seed

from specdistill.command import run
from specdistill.data import training_data
from specdistill.losses.divergence import build_divergence
from specdistill.methods.heads.unroll import TrainingTimeTest
from specdistill.methods.mtp.checkpoint import build_mtp, save_mtp
from specdistill.methods.recipe import Recipe, check_trainable
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.arguments import check_precision, training_arguments
from specdistill.training.history import TrainingCurve
from specdistill.training.optimizer import build_optimizer
from specdistill.training.run_directory import RunDirectory
from specdistill.training.trainer import DraftTrainer


def main(recipe: Recipe) -> None:
    check_trainable(recipe, "train/mtp.py")
    arguments = training_arguments(recipe.train)
    check_precision(arguments, recipe.target.dtype)
    directory = RunDirectory.open(arguments.output_dir, recipe)
    set_seed(arguments.seed)
    loss = recipe.loss
    divergence = build_divergence(loss.divergence, jsd_beta=loss.jsd_beta)

    # Target
    target = FrozenTarget.load(**vars(recipe.target))

    # Data
    train_set, eval_set = training_data(recipe.data, target.tokenizer, target.model, fingerprint=target.fingerprint())

    # Draft
    draft = build_mtp(target, init=recipe.draft.init, num_layers=recipe.draft.num_layers or 1, seed=arguments.seed)

    # The run's record, before the first step
    if arguments.process_index == 0:
        directory.record(
            target=target.name, target_revision=target.revision, data_fingerprint=train_set._fingerprint, rows=len(train_set)
        )

    # Trainer
    trainer = DraftTrainer(
        TrainingTimeTest(draft, divergence, recipe.draft.ttt_steps, loss.step_decay, loss.temperature),
        target,
        arguments,
        train_set,
        eval_set,
        save=partial(save_mtp, draft),
        optimizer=build_optimizer(recipe.optimizer, draft, arguments),
        callbacks=[TrainingCurve(directory.path / "training_curve.png")],
    )

    # Train and save
    trainer.train(resume_from_checkpoint=directory.last_checkpoint())
    if trainer.is_world_process_zero():
        save_mtp(draft, directory.draft)  # the best one: the Trainer has loaded it back


if __name__ == "__main__":
    sys.exit(run(main, Recipe))
