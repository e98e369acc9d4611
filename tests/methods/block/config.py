"""The recipe of the toy block drafter."""

from specdistill.methods.recipe import TrainedRecipe
from specdistill.recipe.fields import Section, option, section


class Draft(Section):
    block_size: int = option(3, "tokens drafted in one pass", ge=1)
    hidden_size: int = option(16, "width of the draft", ge=1)


class Loss(Section):
    num_anchors: int = option(4, "places of each row from which a block is drafted", ge=1)


class Recipe(TrainedRecipe):
    draft: Draft = section(Draft)
    loss: Loss = section(Loss)

    @property
    def num_positions(self) -> int:
        return self.draft.block_size
