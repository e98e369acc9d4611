"""The recipe of EAGLE-1 heads."""

from specdistill.methods.chains.config import HeadRecipe, HeadSizes
from specdistill.methods.recipe import SoftLossConfig
from specdistill.recipe.fields import option, section


class EagleLossConfig(SoftLossConfig):
    """The section `loss:` of an EAGLE-1 recipe."""

    feature_weight: float = option(
        0.0,
        "weight of the SmoothL1 loss to the target's next hidden state, added to the divergence",
        ge=0,
    )
    noise: float = option(
        0.0, "maximum of the uniform noise added to the input hidden states", ge=0
    )


class EagleRecipe(HeadRecipe):
    """The recipe of an EAGLE-1 head."""

    draft: HeadSizes = section(HeadSizes)
    loss: EagleLossConfig = section(EagleLossConfig)


RECIPE = EagleRecipe
