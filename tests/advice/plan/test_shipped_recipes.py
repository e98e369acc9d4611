"""Recipes of the package are recommended for every model with the sizes of their target."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from specdistill.advice.plan.estimates import list_own_recipes
from specdistill.advice.plan.plan import Plan, make_plan
from specdistill.advice.plan.reading import read_model_config
from specdistill.cli.launch import LaunchOptions
from specdistill.cli.plan import print_plan
from specdistill.common.documents import read_json
from specdistill.common.project import RECIPES
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_own_keys, load_recipe

LLAMA: dict[str, Any] = read_json(RECIPES / "llama-3.1-8b" / "config.json")
TARGETS = sorted(path.parent.name for path in RECIPES.glob("*/config.json"))
# None of these keys changes the shape of a weight.
FINE_TUNE = {
    "_name_or_path": "org/my-fine-tune", "torch_dtype": "float16", "eos_token_id": 128009,
    "head_dim": 128, "max_position_embeddings": 32768, "rope_scaling": None,
    "transformers_version": "4.55.0",
}  # fmt: skip


def write_config(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def find_recipes(folder: str | Path) -> list[str]:
    return list_own_recipes(read_model_config(str(folder), key="target.model"))


@pytest.fixture(scope="module")
def plan_of_fine_tune(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = write_config(tmp_path_factory.mktemp("mine"), LLAMA | FINE_TUNE)
    return make_plan(read_model_config(folder, key="target.model"))


@pytest.mark.parametrize("name", TARGETS)
def test_the_target_of_a_shipped_recipe_is_recognised_by_its_config(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("runs/smollm2/target").mkdir(parents=True)
    recipes = sorted(f"{name}/{path.stem}" for path in (RECIPES / name).glob("*.yaml"))
    assert find_recipes(RECIPES / name) == recipes


def test_recipes_whose_data_is_not_there_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert find_recipes(RECIPES / "smollm2") == []


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 128258},
        {"num_hidden_layers": 31},
        {"intermediate_size": 14000},
        {"num_key_value_heads": 4},
        {"tie_word_embeddings": True},
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "rope_scaling": None},
    ],
)
def test_a_target_with_another_shape_has_no_shipped_recipe(change: dict[str, Any], tmp_path: Path):
    assert find_recipes(write_config(tmp_path, LLAMA | FINE_TUNE | change)) == []


def test_a_fine_tune_gets_the_commands_of_the_recipe(plan_of_fine_tune: Plan):
    recommendation = plan_of_fine_tune.recommendation
    target = plan_of_fine_tune.target["model"]
    assert (recommendation["method"], recommendation["recipe"]) == ("eagle3", "llama-3.1-8b/eagle3")
    server, make, train = map(shlex.split, str(recommendation["start"]).splitlines())
    assert server == ["vllm", "serve", target, "--data-parallel-size", "8"]
    assert make[:3] == ["specdistill", "data", "make"] and train[:2] == ["specdistill", "train"]
    launch, keys = load_own_keys(LaunchOptions, train[2:])
    assert (launch.launch, launch.num_processes) == ("ddp", 8)
    recipes: list[Any] = [load_recipe(Recipe, keys), load_recipe(Recipe, make[3:])]
    shipped: Any = load_recipe(Recipe, ["recipe=llama-3.1-8b/eagle3"])
    for recipe in recipes:
        assert (recipe.target.model, recipe.target.revision) == (target, None)
        assert (recipe.data, recipe.draft) == (shipped.data, shipped.draft)


def test_the_alternatives_are_the_other_recipe_and_a_generated_command(
    plan_of_fine_tune: Plan, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "100")
    generated = str(plan_of_fine_tune.recommendation["generated"])
    method = generated.splitlines()[-1].split()[2].removeprefix("recipe=small/")
    screens = {}
    for details in (False, True):
        print_plan(plan_of_fine_tune, [], None, details=details)
        screens[details] = " ".join(capsys.readouterr().out.replace("\\\n", " ").split())
        first, _, rest = screens[details].partition("Alternatives: ")
        assert first.startswith("Recommended: llama-3.1-8b/eagle3, ") and "recipe" in first
        assert rest.startswith("llama-3.1-8b/draft (") and f", {method} (" in rest
    assert generated in screens[True] and generated not in screens[False]


def test_a_draft_of_a_recipe_has_the_size_of_the_model_that_it_starts_from(
    plan_of_fine_tune: Plan,
):
    row = next(row for row in plan_of_fine_tune.methods if row.method == "draft_model")
    assert (row.recipe, row.draft) == ("llama-3.1-8b/draft", None)
    assert row.parameters == 1_235_814_400  # Llama-3.2-1B
