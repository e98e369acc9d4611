"""Train a draft model by distillation: a smaller language model with the target's own vocabulary.

DistillSpec (arXiv 2310.08461), or PARD (2504.18583), which drafts in parallel.

accelerate launch --config_file accelerate_configs/cpu.yaml train/draft.py recipe=pico/draft
"""

import sys

from specdistill.cli.command import run
from specdistill.methods.recipe import Recipe, check_trainable
from specdistill.recipe.short_keys import TRAIN
from specdistill.workflows.train import train_draft


def main(recipe: Recipe) -> None:
    """Train the draft model of a recipe."""
    train_draft(check_trainable(recipe))


if __name__ == "__main__":
    sys.exit(run(main, Recipe, shorthands=TRAIN))
