"""The recipe of EAGLE-3 heads."""

from specdistill.methods.chains.config import HeadRecipe, HeadSizes
from specdistill.recipe.fields import option, section


class Eagle3DraftConfig(HeadSizes):
    """The section `draft:` of an EAGLE-3 recipe."""

    aux_layers: list[int] | None = option(
        None,
        "which hidden states of the target are read: a list of numbers L, each for the state after"
        " the first L of the target's n layers; null: 2, n//2, n-3",
    )
    vocab_size: int | None = option(
        None, "size of the draft vocabulary, the most frequent tokens; null: the target's", ge=1
    )
    hidden_size: int | None = option(None, "hidden size; null: the target's", ge=1)
    train_head: bool = option(
        True, "train the LM head; false: keep the target's LM head, or that of draft.init"
    )
    fc_norm: bool = option(
        False,
        "EAGLE-3.1: normalise each hidden state of the target before the linear layer that combines"
        " them (fc)",
    )
    norm_output: bool = option(
        False,
        "EAGLE-3.1: the head's next draft step reads its hidden state after the final norm; false:"
        " before the final norm",
    )
    norm_before_residual: bool = option(
        False,
        "first layer: take the residual after the norm of the hidden state; SGLang does not support"
        " true",
    )


class Eagle3Recipe(HeadRecipe):
    """The recipe of an EAGLE-3 head."""

    draft: Eagle3DraftConfig = section(Eagle3DraftConfig)


RECIPE = Eagle3Recipe
