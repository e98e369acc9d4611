"""Headers of recipes and docs/recipes.md state the needs that bench/results/recipes.json holds."""

from typing import Any

import pytest

from specdistill.advice.plan.budget import USABLE_MEMORY_SHARE
from specdistill.common.project import RECIPES
from tests.scripts import load_script

recipes: Any = load_script("bench/recipes.py")
RECORD = recipes.load_record()


def test_every_recipe_of_a_published_target_has_a_record():
    assert list(RECORD) == recipes.list_published_recipes()


@pytest.mark.parametrize("name", RECORD)
def test_the_record_matches_the_recipe_and_its_header(name: str):
    assert recipes.read_settings(name) == RECORD[name]["of"]
    assert (
        recipes.format_header_line(RECORD[name])
        in (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    )


@pytest.mark.parametrize("name", RECORD)
def test_a_recipe_fits_the_gpus_that_its_header_names(name: str):
    need = RECORD[name]
    gib = {80: 80, 141: 140}[need["of"]["gpu_gb"]]  # GiB of an H100 and of an H200
    assert 1e9 * need["gpu_gb"] <= USABLE_MEMORY_SHARE * gib * 2**30


def test_the_page_shows_the_record():
    assert recipes.format_needs_table(RECORD) in recipes.PAGE.read_text(encoding="utf-8")


def test_the_page_of_llama_shows_its_record():
    need = RECORD["llama-3.1-8b/eagle3"]
    page = (recipes.PAGE.parent / "llama-3.1-8b.md").read_text(encoding="utf-8")
    assert f"| {need['hours']} hours on eight H100, {need['gpu_gb']} GB on each |" in page
    assert f"| disk: run and rows | {need['disk_gb']} GB |" in page
    assert f"| disk: the target | {need['target_gb']} GB |" in page


@pytest.mark.long  # targets of up to 70B parameters on the meta device
@pytest.mark.parametrize(
    "name", ["llama-3.1-8b/eagle3", "qwen3-30b-a3b/eagle3", "llama-3.3-70b/draft"]
)
def test_the_computed_needs_equal_the_record(name: str):
    assert recipes.compute_needs(name) == RECORD[name]
