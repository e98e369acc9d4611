"""Recipe keys that the heads share."""

from typing import Any

from specdistill.methods.recipe import TrainedRecipe
from specdistill.recipe.fields import Section, option, section

DIVERGENCE = (
    "how the draft's distribution is compared with the target's: a name of specdistill/losses/divergence.py; "
    "{name: jsd, beta: 0.3} sets its options; a list of {name, weight} adds several up"
)


class HeadDraft(Section):
    """The unroll and the initialization of a head."""

    ttt_steps: int = option(5, "steps the training-time test unrolls; 1 is plain EAGLE, more is HASS", ge=1)
    init: str | None = option(None, "initialization: the folder of a trained head; null: fresh weights")


class HeadSizes(HeadDraft):
    """Sizes of a fresh EAGLE head; null takes the target's."""

    num_layers: int = option(1, "decoder layers of the head", ge=1)
    intermediate_size: int | None = option(None, "MLP width; null: the target's", ge=1)
    num_attention_heads: int | None = option(None, "null: the target's", ge=1)
    num_key_value_heads: int | None = option(None, "null: the target's", ge=1)
    head_dim: int | None = option(None, "null: the target's", ge=1)
    sliding_window: int | None = option(None, "positions a head sees, itself included; null: all of them", ge=2)

    def shape(self) -> dict[str, Any]:
        """What a fresh head is built from: every key but the vocabulary, the unroll and the initialization."""
        return self.model_dump(exclude={"vocab_size", "ttt_steps", "init"})


class HeadLoss(Section):
    divergence: Any = option("forward_kl", DIVERGENCE)
    step_decay: float = option(0.8, "weight of unroll step k is step_decay ** k", ge=0, le=1)
    temperature: float = option(1.0, "divides both sets of logits", ge=0.01)


class HeadRecipe(TrainedRecipe):
    draft: HeadDraft = section(HeadDraft)
    loss: HeadLoss = section(HeadLoss)
