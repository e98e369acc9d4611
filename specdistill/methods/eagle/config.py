"""The recipe of EAGLE-1 heads."""

from specdistill.methods.chains.recipe import HeadLossConfig, HeadRecipe, HeadSizes
from specdistill.recipe.fields import option, section


class EagleDraftConfig(HeadSizes):
    fc_bias: bool = option(False, "a bias in fc, as SafeAILab's first heads have; vLLM loads none")


class EagleLossConfig(HeadLossConfig):
    feature_weight: float = option(
        0.0, "SmoothL1 to the target's next feature counts this much, in addition to the divergence", ge=0
    )
    noise: float = option(0.0, "uniform noise of at most this size on the features read", ge=0)


class EagleRecipe(HeadRecipe):
    draft: EagleDraftConfig = section(EagleDraftConfig)
    loss: EagleLossConfig = section(EagleLossConfig)


RECIPE = EagleRecipe
