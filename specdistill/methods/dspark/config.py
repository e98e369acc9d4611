"""The recipe of DSpark drafters."""

from typing import Literal

from specdistill.methods.blocks.config import BlockDraftConfig, BlockLossConfig, BlockRecipe
from specdistill.recipe.fields import option, section


class DSparkDraftConfig(BlockDraftConfig):
    """The section `draft:` of a DSpark recipe."""

    markov_rank: int = option(
        256,
        "rank of the correction that the previous token adds to a token's logits",
        ge=1,
    )
    markov_head_type: Literal["vanilla", "gated", "rnn"] = option(
        "vanilla",
        "what the correction reads; vanilla: the previous token; gated: the hidden state too; rnn:"
        " all previous tokens of the block; vLLM supports vanilla only",
    )
    enable_confidence_head: bool = option(
        True, "train a head that estimates each draft token's chance of acceptance"
    )


class DSparkLossConfig(BlockLossConfig):
    """The section `loss:` of a DSpark recipe."""

    confidence_weight: float = option(
        1.0, "weight of the confidence head's loss, which is added to the divergence", ge=0
    )


class DSparkRecipe(BlockRecipe):
    """The recipe of a DSpark drafter."""

    draft: DSparkDraftConfig = section(DSparkDraftConfig)
    loss: DSparkLossConfig = section(DSparkLossConfig)

    @property
    def num_positions(self) -> int:
        """The drafted positions of a block: all slots, because the anchor's slot predicts too."""
        return self.draft.block_size


RECIPE = DSparkRecipe
