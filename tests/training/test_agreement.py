"""Processes with another recipe are refused before any work; where a machine keeps things is its own affair."""

from pathlib import Path

import pytest

from specdistill.errors import UserError
from specdistill.methods.recipe import Recipe
from specdistill.processes import agree
from specdistill.recipe.load import load_recipe
from specdistill.training.run import recipe_keys
from tests.processes import run_processes


@pytest.mark.distributed
def test_a_recipe_is_compared_key_by_key(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        for key in ("data.seed=0", f"loss.step_decay=0.{rank}", f"train.max_steps={rank}"):
            own = [f"train.output_dir=run-{rank}", f"data.cache_dir=cache-{rank}", key]
            try:
                agree(recipe_keys(load_recipe(Recipe, ["recipe=pico/eagle3", *own]).model_dump()))
                print("alike")
            except UserError as error:
                print(error)

    for process in run_processes(tmp_path, check, 0, 0):
        same, decay, steps = process.out.splitlines()
        assert same == "alike"
        assert decay.startswith("loss.step_decay: got 0.1 in process 1 on ") and ", expected 0.0, as in process 0 on " in decay
        assert steps.startswith("train.max_steps: got 1 in process 1 on ")
