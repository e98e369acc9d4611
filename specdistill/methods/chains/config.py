"""The recipe of a head that drafts chains: how deep it is unrolled, and its sizes."""

from specdistill.methods.recipe import DraftSection, FeatureRecipe, LayerSizes, SoftLossConfig
from specdistill.recipe.fields import option, section


class HeadDraftConfig(DraftSection):
    """The unroll and the initialization of a head."""

    NOT_OF_SHAPE = frozenset({"init", "ttt_steps", "vocab_size", "train_head"})

    ttt_steps: int = option(
        5,
        "draft steps in a row that training unrolls (training-time test); 1: as EAGLE, more: as"
        " HASS",
        ge=1,
    )


class HeadSizes(HeadDraftConfig, LayerSizes):
    """The sizes of a fresh EAGLE head."""


class HeadRecipe(FeatureRecipe):
    """The recipe of a head that drafts chains."""

    draft: HeadDraftConfig = section(HeadDraftConfig)
    loss: SoftLossConfig = section(SoftLossConfig)

    @property
    def num_positions(self) -> int:
        """The drafted positions in training: one for each unrolled step."""
        return self.draft.ttt_steps
