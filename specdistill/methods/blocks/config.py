"""The recipe of a block drafter: its sizes, its blocks and its loss.

Like other drafts that read features, it also says where the target's features come from.
"""

from pydantic import model_validator

from specdistill.common.errors import UserError
from specdistill.methods.recipe import FeatureRecipe, LayerSizes, SoftLossConfig
from specdistill.recipe.fields import option, section


class BlockDraftConfig(LayerSizes):
    """The sizes of a fresh block drafter, and the blocks that it is trained on."""

    NOT_OF_SHAPE = frozenset({"init", "vocab_size", "num_anchors", "mask_token_id"})

    num_layers: int = option(5, "decoder layers", ge=1)
    block_size: int = option(8, "positions of a block: one known token and masks", ge=2, le=64)
    num_anchors: int = option(
        256,
        "number of blocks that are trained per row of data.max_length tokens; each block begins one"
        " token before a token with a loss, so rows with few of these have fewer blocks",
        ge=1,
    )
    aux_layers: list[int] | None = option(
        None,
        "which hidden states of the target are read: a list of numbers L, each for the state after"
        " the first L of the target's n layers; null: five numbers, spread from 2 to n-2",
    )
    vocab_size: int | None = option(
        None, "size of the draft vocabulary, the most frequent tokens; null: the target's", ge=1
    )
    mask_token_id: int | None = option(
        None,
        "token id that stands for tokens not drafted yet (mask); null: that of draft.init, the"
        " tokenizer's mask token, or a token that does not occur in texts",
        ge=0,
    )
    is_causal: bool = option(
        False,
        "true: a position of a block attends to itself and earlier ones; false: to the whole block",
    )


class BlockLossConfig(SoftLossConfig):
    """The loss of a block drafter."""

    d_pace: float | None = option(
        None,
        "use D-PACE: the loss of a drafted position is weighted by the expected number of accepted"
        " tokens from this position on; if the draft gives a token the probability p, its chance"
        " to be accepted is taken as d_pace + (1 - d_pace) * p; null: weights by loss.step_decay",
        ge=0,
        le=1,
    )


class BlockRecipe(FeatureRecipe):
    """The recipe of a block drafter."""

    draft: BlockDraftConfig = section(BlockDraftConfig)
    loss: BlockLossConfig = section(BlockLossConfig)

    @property
    def num_positions(self) -> int:
        """The drafted positions of a block: all slots but the anchor's."""
        return self.draft.block_size - 1

    @model_validator(mode="after")
    def _check_position_weights(self) -> "BlockRecipe":
        """Raise UserError if a recipe states both `loss.step_decay` and `loss.d_pace`.

        Each of them determines the loss weights of drafted positions.
        """
        # `step_decay` has a default, so it only counts if the recipe states it.
        if self.loss.d_pace is not None and "step_decay" in self.loss.model_fields_set:
            raise UserError(
                "loss.step_decay",
                got=f"{self.loss.step_decay} with loss.d_pace={self.loss.d_pace}",
                expected="only one of the two keys",
            )
        return self


RECIPE = BlockRecipe
