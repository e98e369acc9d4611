"""The recipe of EAGLE-3 heads."""

from specdistill.methods.chains.config import HeadRecipe, HeadSizes
from specdistill.recipe.fields import option, section


class Eagle3DraftConfig(HeadSizes):
    """The section `draft:` of an EAGLE-3 recipe."""

    aux_layers: list[int] | None = option(
        None, "auxiliary layers of the target: hidden states after L layers; null: 2, n//2, n-3"
    )
    vocab_size: int | None = option(
        None, "size of the draft vocabulary, the most frequent tokens; null: the target's", ge=1
    )
    hidden_size: int | None = option(None, "hidden size; null: the target's", ge=1)
    train_head: bool = option(
        True, "train the LM head; false: keep the target's rows, or those of draft.init"
    )
    fc_norm: bool = option(False, "EAGLE-3.1: normalise each auxiliary state before fc")
    norm_output: bool = option(False, "EAGLE-3.1: feed back the normalised hidden state")
    norm_before_residual: bool = option(
        False, "take the residual after the hidden norm; SGLang does not support true"
    )


class Eagle3Recipe(HeadRecipe):
    """The recipe of an EAGLE-3 head."""

    draft: Eagle3DraftConfig = section(Eagle3DraftConfig)


RECIPE = Eagle3Recipe
