"""The recipe of EAGLE-1 heads."""

from specdistill.methods.chains.recipe import HeadRecipe, HeadSizes
from specdistill.methods.recipe import SoftLossConfig
from specdistill.recipe.fields import option, section


class EagleDraftConfig(HeadSizes):
    fc_bias: bool = option(False, "bias in fc, as in SafeAILab's first heads; vLLM does not load it")


class EagleLossConfig(SoftLossConfig):
    feature_weight: float = option(
        0.0, "weight of the SmoothL1 loss to the target's next hidden state, added to the divergence", ge=0
    )
    noise: float = option(0.0, "maximum of the uniform noise added to the input hidden states", ge=0)


class EagleRecipe(HeadRecipe):
    draft: EagleDraftConfig = section(EagleDraftConfig)
    loss: EagleLossConfig = section(EagleLossConfig)


RECIPE = EagleRecipe
