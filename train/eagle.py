"""Train a draft of any method that its recipe names. A head for a frozen target: EAGLE (arXiv 2401.15077), EAGLE-3 (2503.01840) or
multi-token prediction (DeepSeek-V3, 2412.19437); an early exit (2309.08168); a block drafter: DFlash (2602.06036) or DSpark (2607.05147).

accelerate launch --config_file accelerate_configs/cpu.yaml train/eagle.py recipe=pico/eagle3
"""

import sys

from specdistill import command
from specdistill.api import train_draft
from specdistill.methods.recipe import Recipe, trainable


def main(recipe: Recipe) -> None:
    train_draft(trainable(recipe))


if __name__ == "__main__":
    sys.exit(command.run(main, Recipe))
