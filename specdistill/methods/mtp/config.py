"""The recipe of multi-token-prediction layers, whose shape is the target's own."""

from specdistill.methods.chains.recipe import HeadDraftConfig, HeadRecipe
from specdistill.recipe.fields import option, section


class MtpDraftConfig(HeadDraftConfig):
    init: str | None = option(
        None,
        "initialization: scratch, or the folder or Hub id of a trained draft; null: the target's own layer",
    )


class MtpRecipe(HeadRecipe):
    FRESH = ("scratch",)

    draft: MtpDraftConfig = section(MtpDraftConfig)


RECIPE = MtpRecipe
