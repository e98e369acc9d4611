"""The recipe of draft models that draft in one pass."""

from typing import Any

from specdistill.methods.models.recipe import DraftModelDraftConfig, DraftModelEvalConfig, ModelLossConfig
from specdistill.methods.recipe import TrainedRecipe
from specdistill.recipe.fields import option, section


class PardDraftConfig(DraftModelDraftConfig):
    parallel_tokens: int = option(8, "tokens predicted in one pass in training: by a token and the masks after it", ge=1, le=64)
    retention: float = option(
        0.7, "mask i follows this share to the power i of the tokens (conditional drop); 1: all", gt=0, le=1
    )
    min_retention: float = option(0.2, "least share of the tokens that a mask follows", ge=0, le=1)
    mask_token_id: int | None = option(
        None,
        "token in the place of what is not drafted yet; null: that of draft.init, the tokenizer's mask, or a token that is never generated",
        ge=0,
    )

    def shape(self) -> dict[str, Any]:
        return {name: value for name, value in super().shape().items() if name in DraftModelDraftConfig.model_fields}


class PardRecipe(TrainedRecipe):
    FRESH = ("scratch",)

    draft: PardDraftConfig = section(PardDraftConfig)
    loss: ModelLossConfig = section(ModelLossConfig)
    eval: DraftModelEvalConfig = section(DraftModelEvalConfig)

    @property
    def num_positions(self) -> int:
        return self.draft.parallel_tokens


RECIPE = PardRecipe
