"""What recipes of published targets take is what bench/results/recipes.json says; their headers and docs/recipes.md say it, too."""

from typing import Any

import pytest

from specdistill.project import RECIPES
from tests.scripts import load_script

recipes: Any = load_script("bench/recipes.py")
RECORD = recipes.load_record()
# Of transformers' own class of each, built from its config.json on the meta device; a tied head counts once.
PARAMETERS = {
    "deepseek-v3": 671_026_404_352,
    "gemma-3-27b": 27_432_406_640,
    "gpt-oss-20b": 20_914_757_184,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-small-24b": 23_572_403_200,
    "phi-4": 14_659_507_200,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-9b": 8_953_803_264,
}


def test_every_recipe_of_a_published_target_has_a_record():
    assert list(RECORD) == recipes.published()


@pytest.mark.parametrize("name", RECORD)
def test_the_record_is_of_the_recipe_as_it_stands_and_its_header_says_so(name: str):
    assert recipes.settings(name) == RECORD[name]["of"]
    assert RECORD[name]["target_parameters"] == PARAMETERS[name.partition("/")[0]]
    assert recipes.line(RECORD[name]) in (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", RECORD)
def test_it_fits_the_gpus_that_its_header_names(name: str):
    need = RECORD[name]
    assert recipes.device_of(need["of"]["gpu_gb"]).holds(1e9 * need["gpu_gb"])


def test_the_page_shows_the_record():
    assert recipes.shown(RECORD) in recipes.PAGE.read_text(encoding="utf-8")


@pytest.mark.long  # targets of up to 70B parameters on the meta device
@pytest.mark.parametrize("name", ["llama-3.1-8b/eagle3", "qwen3-30b-a3b/eagle3", "llama-3.3-70b/draft"])
def test_it_is_computed_alike(name: str):
    assert recipes.need(name) == RECORD[name]
