"""The recipe of DFlash drafters."""

from specdistill.methods.blocks.recipe import BlockRecipe

RECIPE = BlockRecipe
