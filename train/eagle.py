"""Train a draft of the method that its recipe names.

A head for a frozen target: EAGLE (arXiv 2401.15077), EAGLE-3 (2503.01840), multi-token prediction
(DeepSeek-V3, 2412.19437) or an early exit (2309.08168). A block drafter: DFlash (2602.06036) or
DSpark (2607.05147).

accelerate launch --config_file accelerate_configs/cpu.yaml train/eagle.py recipe=pico/eagle3
"""

import sys

from specdistill.cli.command import run
from specdistill.methods.recipe import Recipe, check_trainable
from specdistill.recipe.short_keys import TRAIN
from specdistill.workflows.train import train_draft


def main(recipe: Recipe) -> None:
    """Train the draft of a recipe."""
    train_draft(check_trainable(recipe))


if __name__ == "__main__":
    sys.exit(run(main, Recipe, shorthands=TRAIN))
