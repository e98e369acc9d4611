"""Machines with another recipe or other code are refused before any work; where a machine keeps things is its own affair."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from specdistill.errors import UserError
from specdistill.methods.recipe import Recipe
from specdistill.project import ROOT
from specdistill.recipe.load import load_recipe
from specdistill.training import agreement
from tests.processes import run_processes


@pytest.mark.distributed
def test_a_recipe_is_compared_key_by_key(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        for key in ("data.seed=0", f"loss.step_decay=0.{rank}", f"train.max_steps={rank}"):
            own = [f"train.output_dir=run-{rank}", f"data.cache_dir=cache-{rank}", key]
            recipe = load_recipe(Recipe, ["recipe=pico/eagle3", *own])
            said(lambda recipe=recipe: agreement.check_alike(recipe, ["torch"], "zero2"))
        said(lambda: agreement.check_alike(recipe.model_copy(update={"train": {}}), ["torch"], f"zero{2 + rank}"))

    def said(check: Callable[[], None]) -> None:
        try:
            check()
            print("alike")
        except UserError as error:
            print(error)

    for process in run_processes(tmp_path, check, 0, 0):
        same, decay, steps, launch = process.out.splitlines()
        assert same == "alike"
        assert decay.startswith("loss.step_decay: got 0.1 in process 1 on ") and ", expected 0.0, as in process 0 on " in decay
        assert steps.startswith("train.max_steps: got 1 in process 1 on ")
        assert launch.startswith("accelerate launch: got sharding zero3 in process 1 on ")


def test_code_is_told_apart_by_what_it_says_not_by_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = agreement.code_fingerprint()
    package = tmp_path / "specdistill"
    shutil.copytree(ROOT / "specdistill", package, ignore=shutil.ignore_patterns("__pycache__", "assets"))
    shutil.copytree(ROOT / "train", package / "_project" / "train")
    monkeypatch.setattr(agreement.specdistill, "__file__", str(package / "__init__.py"))
    monkeypatch.setattr(agreement, "ROOT", package / "_project")
    assert agreement.code_fingerprint() == here
    with (package / "losses" / "divergence.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert agreement.code_fingerprint() != here
