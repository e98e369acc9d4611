"""The recipe of a head that drafts chains: how deep it is unrolled, and its sizes."""

from typing import Any

from specdistill.methods.recipe import FeatureRecipe, LayerSizes, SoftLossConfig
from specdistill.recipe.fields import Section, option, section


class HeadDraftConfig(Section):
    """The unroll and the initialization of a head."""

    ttt_steps: int = option(5, "unrolled steps of the training-time test; 1: EAGLE, more: HASS", ge=1)
    init: str | None = option(None, "initialization: the folder or Hub id of a trained draft; null: new weights")


class HeadSizes(LayerSizes, HeadDraftConfig):
    """Sizes of a fresh EAGLE head."""

    def shape(self) -> dict[str, Any]:
        """What a fresh head is built from: every key but the vocabulary, the unroll, the initialization and what trains."""
        return self.model_dump(exclude={"vocab_size", "ttt_steps", "init", "train_head"})


class HeadRecipe(FeatureRecipe):
    draft: HeadDraftConfig = section(HeadDraftConfig)
    loss: SoftLossConfig = section(SoftLossConfig)

    @property
    def num_positions(self) -> int:
        return self.draft.ttt_steps
