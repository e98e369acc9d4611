r"""Fill the store of hidden states that a recipe names, for trainings to read.

accelerate launch --config_file accelerate_configs/cpu.yaml train/features.py \
    recipe=pico/eagle3 hidden_states.mode=hybrid hidden_states.path=runs/features
"""

import sys

from specdistill.cli.command import run
from specdistill.common.terminal import print_result
from specdistill.methods.recipe import Recipe, check_trainable
from specdistill.recipe.short_keys import TRAIN
from specdistill.workflows.features import store_features


def main(recipe: Recipe) -> None:
    """Fill the store of hidden states that a recipe names, and print how many rows it holds."""
    stored = store_features(check_trainable(recipe))
    print_result(stored._asdict())


if __name__ == "__main__":
    sys.exit(run(main, Recipe, shorthands=TRAIN))
