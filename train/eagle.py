"""Train a head for a frozen target: EAGLE (arXiv 2401.15077), EAGLE-3 (2503.01840) or multi-token prediction (DeepSeek-V3, 2412.19437);
or an early exit (2309.08168); or a block drafter: DFlash (2602.06036) or DSpark (2607.05147).

accelerate launch --config_file accelerate_configs/cpu.yaml train/eagle.py recipe=pico/eagle3
"""

import sys

from specdistill import command
from specdistill.api import train_draft
from specdistill.methods.recipe import Recipe, TrainedRecipe, check_trainable


def main(recipe: TrainedRecipe) -> None:
    check_trainable(recipe, "train/eagle.py")
    train_draft(recipe)


if __name__ == "__main__":
    sys.exit(command.run(main, Recipe))
