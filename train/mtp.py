"""Train a multi-token-prediction layer for a frozen target: its own, or a fresh one (DeepSeek-V3, arXiv 2412.19437; FastMTP, 2509.18362).

accelerate launch --config_file accelerate_configs/cpu.yaml train/mtp.py recipe=pico/mtp
"""

import sys
from functools import partial

from specdistill import command
from specdistill.data import training_data
from specdistill.methods.heads.config import HeadRecipe
from specdistill.methods.load import create_draft, implementation
from specdistill.methods.recipe import Recipe, check_trainable
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.run import TrainingRun


def main(recipe: HeadRecipe) -> None:
    check_trainable(recipe, "train/mtp.py")
    run = TrainingRun.open(recipe, target_dtype=recipe.target.dtype)
    method = implementation(recipe.method)

    # Target and data
    target = FrozenTarget.load(**vars(recipe.target))
    train_set, eval_set = training_data(recipe.data, target.tokenizer, target.model, fingerprint=target.fingerprint())

    # Draft, what it learns, and the run's record before its first step
    draft = create_draft(recipe, target, train_set)
    objective = method.objective(draft, recipe, target)
    run.record(target, train_set)

    # Train, and save the best
    save = partial(method.save, draft, target)
    trainer = run.trainer(draft, objective, target, train_set, eval_set, optimizer=recipe.optimizer, save=save)
    run.train(trainer)


if __name__ == "__main__":
    sys.exit(command.run(main, Recipe))
