"""The recipe of a head that drafts chains: its sizes, its unroll, its loss, and where the target's features come from."""

from typing import Any

from pydantic import model_validator

from specdistill.errors import UserError
from specdistill.methods.recipe import DIVERGENCE, TrainedRecipe
from specdistill.recipe.fields import Section, option, section
from specdistill.recipe.sections import HiddenStatesConfig


class HeadDraftConfig(Section):
    """The unroll and the initialization of a head."""

    ttt_steps: int = option(5, "unrolled steps of the training-time test; 1: EAGLE, more: HASS", ge=1)
    init: str | None = option(None, "initialization: the folder or Hub id of a trained head; null: new weights")


class HeadSizes(HeadDraftConfig):
    """Sizes of a fresh EAGLE head; null takes the target's."""

    num_layers: int = option(1, "decoder layers of the head", ge=1)
    intermediate_size: int | None = option(None, "MLP width; null: the target's", ge=1)
    num_attention_heads: int | None = option(None, "null: the target's", ge=1)
    num_key_value_heads: int | None = option(None, "null: the target's", ge=1)
    head_dim: int | None = option(None, "null: the target's", ge=2, multiple_of=2)
    sliding_window: int | None = option(None, "sliding attention window in tokens; null: full attention", ge=2)

    def shape(self) -> dict[str, Any]:
        """What a fresh head is built from: every key but the vocabulary, the unroll, the initialization and what trains."""
        return self.model_dump(exclude={"vocab_size", "ttt_steps", "init", "train_head"})


class HeadLossConfig(Section):
    divergence: Any = option("forward_kl", DIVERGENCE)
    step_decay: float = option(0.8, "loss weight of unrolled step k is step_decay ** k", ge=0, le=1)
    temperature: float = option(1.0, "divides both sets of logits", ge=0.01)


class HeadRecipe(TrainedRecipe):
    draft: HeadDraftConfig = section(HeadDraftConfig)
    loss: HeadLossConfig = section(HeadLossConfig)
    hidden_states: HiddenStatesConfig = section(HiddenStatesConfig)

    @property
    def num_positions(self) -> int:
        return self.draft.ttt_steps

    @model_validator(mode="after")
    def _features_are_stored_of_targets_that_stay(self) -> "HeadRecipe":
        if self.hidden_states.mode != "online" and self.target.shard != "none":
            got = f"{self.target.shard} with hidden_states.mode={self.hidden_states.mode}"
            raise UserError("target.shard", got=got, expected="none, or hidden_states.mode=online")
        return self
