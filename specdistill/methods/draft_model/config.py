"""The recipe of draft models."""

from specdistill.methods.models.recipe import DraftModelRecipe

RECIPE = DraftModelRecipe
