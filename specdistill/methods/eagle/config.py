"""The recipe of EAGLE-1 heads."""

from specdistill.methods.chains.config import HeadRecipe, HeadSizes
from specdistill.methods.recipe import SoftLossConfig
from specdistill.recipe.fields import option, section


class EagleLossConfig(SoftLossConfig):
    """The section `loss:` of an EAGLE-1 recipe."""

    feature_weight: float = option(
        0.0,
        "weight of the SmoothL1 loss between predicted and true next hidden state of the target,"
        " added to the divergence",
        ge=0,
    )
    noise: float = option(
        0.0,
        "largest size of the uniform noise that training adds to the head's input hidden states",
        ge=0,
    )


class EagleRecipe(HeadRecipe):
    """The recipe of an EAGLE-1 head."""

    draft: HeadSizes = section(HeadSizes)
    loss: EagleLossConfig = section(EagleLossConfig)


RECIPE = EagleRecipe
