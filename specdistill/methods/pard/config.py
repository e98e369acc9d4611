"""The recipe of draft models that draft in one pass."""

from specdistill.methods.models.config import DraftModelDraftConfig, ModelRecipe
from specdistill.recipe.fields import option, section


class PardDraftConfig(DraftModelDraftConfig):
    """The section `draft:` of a PARD recipe."""

    NOT_OF_SHAPE = frozenset(
        {"lora", "parallel_tokens", "retention", "min_retention", "mask_token_id"}
    )

    parallel_tokens: int = option(
        8,
        "K, tokens that are predicted after each token in one training pass: the first by the token"
        " itself, the others by K - 1 masks placed after it",
        ge=1,
        le=64,
    )
    retention: float = option(
        0.7,
        "share of the tokens, chosen at random, that mask 1 follows in training; for mask i it is"
        " retention ** i (conditional drop, to save time); 1: every token has all masks",
        gt=0,
        le=1,
    )
    min_retention: float = option(
        0.2,
        "least share of the tokens that mask i follows in training; it replaces retention ** i"
        " where that is smaller",
        ge=0,
        le=1,
    )
    mask_token_id: int | None = option(
        None,
        "id of the mask token, which stands for each token that is not drafted yet; null: the mask"
        " of draft.init, the tokenizer's mask, or a token that texts do not hold",
        ge=0,
    )


class PardRecipe(ModelRecipe):
    """The recipe of a PARD draft model."""

    draft: PardDraftConfig = section(PardDraftConfig)

    @property
    def num_positions(self) -> int:
        """The number of drafted positions that training computes for each token."""
        return self.draft.parallel_tokens


RECIPE = PardRecipe
