"""The configurations that are measured."""

from dataclasses import replace
from typing import Any

import pytest

from specdistill.decoding.sampling import Sampling
from specdistill.decoding.tree import DynamicTree, StaticTree
from specdistill.evaluation.comparison.options import CompareOptions
from specdistill.evaluation.measurement.configurations import (
    MeasurementPlan,
    Settings,
    plan_configurations,
)
from specdistill.evaluation.statistics.records import Configuration
from specdistill.evaluation.suites.suite import Prompt
from specdistill.recipe.fields import Section
from specdistill.recipe.load import validate_recipe
from specdistill.recipe.sections import EvalConfig, SweepConfig, TreeConfig
from tests.refusals import refused

PROMPTS = [
    Prompt(f"p{number}", "ab"[number % 2], "x", (20 + number, 30, 40)) for number in range(2)
]
MAIN = MeasurementPlan(
    Settings(num_speculative_tokens=2, max_new_tokens=6, repeats=1, warmup=0), PROMPTS
)


def list_configurations(plans):
    return [plan.settings.configuration for plan in plans]


def test_a_sweep_varies_one_axis_at_a_time_around_the_main_configuration():
    cut = [PROMPTS[0]]
    axes = SweepConfig(num_speculative_tokens=[1, 2, 3], temperature=[0, 1], batch_size=[1, 2])
    plans = plan_configurations(MAIN, axes, {64: cut, 32: cut})
    assert list_configurations(plans) == [
        Configuration(2), Configuration(1), Configuration(3), Configuration(2, 1.0),
        Configuration(2, batch_size=2),
        Configuration(2, context_bucket="64"), Configuration(2, context_bucket="32"),
    ]  # fmt: skip
    assert [len(plan.prompts) for plan in plans] == [2, 2, 2, 2, 2, 1, 1]
    assert plans[3].settings == replace(MAIN.settings, sampling=Sampling(1.0))
    assert plan_configurations(MAIN, SweepConfig(), {}) == [MAIN]


def test_trees_are_swept_with_their_own_depth_and_other_k_are_chains():
    tree, other = DynamicTree(8, 3, 2), StaticTree((2, 1))
    main = MeasurementPlan(replace(MAIN.settings, num_speculative_tokens=3, tree=tree), PROMPTS)
    trees = [TreeConfig(**tree.settings), TreeConfig(**other.settings)]
    axes = SweepConfig(num_speculative_tokens=[3], batch_size=[2], tree=trees)
    assert list_configurations(plan_configurations(main, axes, {})) == [
        Configuration(3, tree=tree.settings),
        Configuration(3),
        Configuration(3, batch_size=2, tree=tree.settings),
        Configuration(2, tree=other.settings),
    ]


def test_a_sweep_keeps_the_settings_beside_its_axis():
    main = MeasurementPlan(replace(MAIN.settings, sampling=Sampling(0.7, 0.9, 5)), PROMPTS)
    assert plan_configurations(main, SweepConfig(temperature=[1.0]), {})[
        1
    ].settings.sampling == Sampling(1.0, 0.9, 5)


def test_a_tree_whose_depth_is_not_its_number_of_speculative_tokens_is_refused():
    tree = StaticTree((2, 2))
    with refused("eval.num_speculative_tokens", 3):
        Settings(num_speculative_tokens=3, max_new_tokens=8, tree=tree)


def test_a_batch_of_more_than_all_prompts_is_refused():
    with refused("eval.batch_size", "3 for 2 prompts"):
        MeasurementPlan(replace(MAIN.settings, batch_size=3), PROMPTS)


def test_a_second_shape_is_refused_with_compile():
    main = MeasurementPlan(replace(MAIN.settings, compile=True), PROMPTS)
    with refused("eval.compile", "true with 2 prompts"):
        plan_configurations(main, SweepConfig(batch_size=[2]), {})
    with refused("eval.compile", "true with a tree"):
        plan_configurations(main, SweepConfig(tree=[TreeConfig(branching=[2, 1])]), {})


@pytest.mark.parametrize("typed", [{}, {"max_new_tokens": 500, "repeats": 9, "num_prompts": 4}])
@pytest.mark.parametrize("schema", [EvalConfig, CompareOptions])
def test_a_quick_look_is_small_in_every_command(schema: type[Section], typed: dict[str, int]):
    required = {"target": {"model": "pico"}, "drafts": ["ngram", "suffix"], "output_dir": "out"}
    values = {name: required[name] for name in required if name in schema.model_fields}
    recorded: Any = validate_recipe(schema, {**values, **typed, "quick": True})
    config = recorded.limit_quick_look()
    settings = Settings.from_section(config)
    assert (settings.max_new_tokens, settings.repeats, settings.warmup) == (32, 1, 1)
    assert (config.num_prompts, config.sampling_draws) == (typed.get("num_prompts", 8), 0)
    assert settings.described["quick"] is True

    # A run records its own settings, so that it can be measured in full.
    whole = validate_recipe(schema, {**values, **typed})
    assert recorded.model_copy(update={"quick": False}).limit_quick_look() == whole


def test_a_quick_look_at_an_engine_does_not_set_the_sampling_draws():
    config = validate_recipe(EvalConfig, {"quick": True, "engine": "vllm"}).limit_quick_look()
    assert (config.num_prompts, config.sampling_draws) == (8, None)
