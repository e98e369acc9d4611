"""Recipes: what to train, on what, and how it is measured. Strict: an unknown, missing, mistyped or unread key is a `UserError`."""

from specdistill.recipe.fields import ReadWhen, Section, describe, like, option, section
from specdistill.recipe.load import find_recipe, load_recipe, merged, recipe_yaml, save_recipe, split_argument, validate
from specdistill.recipe.sections import (
    DataConfig,
    EvalConfig,
    RegenerateConfig,
    SweepConfig,
    TargetConfig,
    TargetRecipe,
    TreeConfig,
)

__all__ = [
    "DataConfig",
    "EvalConfig",
    "ReadWhen",
    "RegenerateConfig",
    "Section",
    "SweepConfig",
    "TargetConfig",
    "TargetRecipe",
    "TreeConfig",
    "describe",
    "find_recipe",
    "like",
    "load_recipe",
    "merged",
    "option",
    "recipe_yaml",
    "save_recipe",
    "section",
    "split_argument",
    "validate",
]
