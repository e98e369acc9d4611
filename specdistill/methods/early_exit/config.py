"""The recipe of early exits."""

from specdistill.methods.recipe import DivergenceConfig, DraftSection, FeatureRecipe
from specdistill.recipe.fields import option, section
from specdistill.recipe.sections import EvalConfig


class ExitDraftConfig(DraftSection):
    """The section `draft:` of an early exit's recipe."""

    exit_layer: int | None = option(
        None, "how many of the target's first layers draft; null: an eighth of its layers", ge=1
    )
    intermediate_size: int | None = option(
        None, "width of the exit's MLP; null: twice the target's hidden size", ge=1
    )


class ExitEvalConfig(EvalConfig):
    """The section `eval:` of an early exit's recipe."""

    num_speculative_tokens: int = option(
        4, "draft tokens per round (K), also for the simulated acceptance length in training", ge=1
    )


class ExitRecipe(FeatureRecipe):
    """The recipe of an early exit."""

    draft: ExitDraftConfig = section(ExitDraftConfig)
    loss: DivergenceConfig = section(DivergenceConfig)
    eval: ExitEvalConfig = section(ExitEvalConfig)


RECIPE = ExitRecipe
