"""The recipe of the toy method."""

from specdistill.methods.recipe import TrainedRecipe
from specdistill.recipe.fields import Section, option, section


class Draft(Section):
    confidence: float = option(0.5, "probability of a repetition before training", gt=0, lt=1)


class Recipe(TrainedRecipe):
    draft: Draft = section(Draft)
