"""Train a multi-token-prediction layer: the target's own, or a fresh one (arXiv 2412.19437).

accelerate launch --config_file accelerate_configs/cpu.yaml train/mtp.py recipe=pico/mtp
"""

import sys

from specdistill.cli.command import run
from specdistill.methods.recipe import Recipe, check_trainable
from specdistill.recipe.short_keys import TRAIN
from specdistill.workflows.train import train_draft


def main(recipe: Recipe) -> None:
    """Train the multi-token-prediction layer of a recipe."""
    train_draft(check_trainable(recipe))


if __name__ == "__main__":
    sys.exit(run(main, Recipe, shorthands=TRAIN))
