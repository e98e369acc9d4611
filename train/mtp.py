"""Train a multi-token-prediction layer for a frozen target: its own, or a fresh one (DeepSeek-V3, arXiv 2412.19437; FastMTP, 2509.18362).

accelerate launch --config_file accelerate_configs/cpu.yaml train/mtp.py recipe=pico/mtp
"""

import sys
from functools import partial

from specdistill import command
from specdistill.data import training_data
from specdistill.losses.divergence import build_divergence
from specdistill.methods.heads.unroll import TrainingTimeTest
from specdistill.methods.mtp.checkpoint import build_mtp, save_mtp
from specdistill.methods.recipe import Recipe, check_trainable
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.optimizer import build_optimizer
from specdistill.training.run import TrainingRun
from specdistill.training.trainer import DraftTrainer


def main(recipe: Recipe) -> None:
    check_trainable(recipe, "train/mtp.py")
    run = TrainingRun.open(recipe)
    loss = recipe.loss
    divergence = build_divergence(loss.divergence, jsd_beta=loss.jsd_beta)

    # Target
    target = FrozenTarget.load(**vars(recipe.target))

    # Data
    train_set, eval_set = training_data(recipe.data, target.tokenizer, target.model, fingerprint=target.fingerprint())

    # Draft
    draft = build_mtp(target, init=recipe.draft.init, num_layers=recipe.draft.num_layers or 1, seed=run.seed)

    run.record(target, train_set)

    # Trainer
    trainer = DraftTrainer(
        TrainingTimeTest(draft, divergence, recipe.draft.ttt_steps, loss.step_decay, loss.temperature),
        target,
        run.arguments,
        train_set,
        eval_set,
        save=partial(save_mtp, draft),
        optimizer=build_optimizer(recipe.optimizer, draft, run.arguments),
        callbacks=run.callbacks,
    )

    run.train(trainer)


if __name__ == "__main__":
    sys.exit(command.run(main, Recipe))
