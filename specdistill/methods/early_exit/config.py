"""The recipe of early exits."""

from specdistill.methods.recipe import DivergenceConfig, DraftSection, FeatureRecipe
from specdistill.recipe.fields import option, section
from specdistill.recipe.sections import EvalConfig


class ExitDraftConfig(DraftSection):
    exit_layer: int | None = option(
        None, "layers of the target that draft, its first; null: an eighth of them", ge=1
    )
    intermediate_size: int | None = option(
        None, "width of the exit's MLP; null: twice the target's hidden size", ge=1
    )


class ExitEvalConfig(EvalConfig):
    num_speculative_tokens: int = option(
        4, "K, draft tokens per round, also of simulated rounds in training", ge=1
    )


class ExitRecipe(FeatureRecipe):
    draft: ExitDraftConfig = section(ExitDraftConfig)
    loss: DivergenceConfig = section(DivergenceConfig)
    eval: ExitEvalConfig = section(ExitEvalConfig)


RECIPE = ExitRecipe
