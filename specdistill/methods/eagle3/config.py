"""The recipe of EAGLE-3 heads."""

from specdistill.methods.chains.recipe import HeadRecipe, HeadSizes
from specdistill.recipe.fields import option, section


class Eagle3DraftConfig(HeadSizes):
    aux_layers: list[int] | None = option(None, "target layers read, counted as 'after L layers'; null: [2, n//2, n-3]")
    vocab_size: int | None = option(None, "draft vocabulary, the target's most frequent tokens; null: all of them", ge=1)
    hidden_size: int | None = option(None, "null: the target's", ge=1)
    train_head: bool = option(
        True, "train the head's matrix; false keeps it as it starts: the target's rows, or those of draft.init"
    )
    fc_norm: bool = option(False, "EAGLE-3.1: normalise each auxiliary state before fc")
    norm_output: bool = option(False, "EAGLE-3.1: feed back the normalised hidden state")
    norm_before_residual: bool = option(False, "take the residual after the hidden norm; SGLang cannot express true")


class Eagle3Recipe(HeadRecipe):
    draft: Eagle3DraftConfig = section(Eagle3DraftConfig)


RECIPE = Eagle3Recipe
