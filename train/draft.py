"""Train a draft model by distillation: a smaller language model with the target's own vocabulary (DistillSpec, arXiv 2310.08461).

accelerate launch --config_file accelerate_configs/cpu.yaml train/draft.py recipe=pico/draft
"""

import sys

from specdistill import command
from specdistill.api import train_draft
from specdistill.methods.recipe import Recipe, TrainedRecipe, check_trainable


def main(recipe: TrainedRecipe) -> None:
    check_trainable(recipe, "train/draft.py")
    train_draft(recipe)


if __name__ == "__main__":
    sys.exit(command.run(main, Recipe))
