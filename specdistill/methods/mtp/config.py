"""The recipe of multi-token-prediction layers, which have the shape of the target's layers."""

from specdistill.methods.chains.config import HeadDraftConfig, HeadRecipe
from specdistill.recipe.fields import option, section


class MtpDraftConfig(HeadDraftConfig):
    """The section `draft:` of a recipe for a multi-token-prediction layer."""

    init: str | None = option(
        None,
        "where the weights come from: scratch (random weights), or the folder or Hub id of a"
        " trained draft; null: the layer in the target's own checkpoint",
    )


class MtpRecipe(HeadRecipe):
    """The recipe of a multi-token-prediction layer."""

    FRESH = ("scratch",)

    draft: MtpDraftConfig = section(MtpDraftConfig)


RECIPE = MtpRecipe
