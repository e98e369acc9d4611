"""The recipe of the toy block drafter."""

from specdistill.methods.recipe import TrainedRecipe
from specdistill.recipe.fields import Section, option, section


class BlockDraftConfig(Section):
    block_size: int = option(3, "tokens drafted in one pass", ge=1)
    hidden_size: int = option(16, "width of the draft", ge=1)


class BlockLossConfig(Section):
    num_anchors: int = option(4, "places of each row from which a block is drafted", ge=1)


class BlockRecipe(TrainedRecipe):
    draft: BlockDraftConfig = section(BlockDraftConfig)
    loss: BlockLossConfig = section(BlockLossConfig)

    @property
    def num_positions(self) -> int:
        return self.draft.block_size


RECIPE = BlockRecipe
