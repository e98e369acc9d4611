"""The recipe of a draft that is a model of its own.

It says the draft's sizes, its loss, how it decodes, and which sequences it generates itself.
"""

from typing import Any, Literal

from pydantic import model_validator

from specdistill.common.errors import UserError
from specdistill.methods.recipe import DIVERGENCE, DraftSection, TrainedRecipe
from specdistill.recipe.fields import Condition, Section, option, section
from specdistill.recipe.sections import DECODING_IN_PROCESS, EvalConfig

LORA_IS_USED = Condition("when draft.lora.rank is above 0", lambda lora: lora.rank > 0)
LABELS_ARE_SOFT = Condition("with loss.labels=soft", lambda loss: loss.labels == "soft")
VOCABULARY_IS_TRANSLATED = Condition(
    "with heterogeneous_vocab=true", lambda draft: draft.heterogeneous_vocab
)
GENERATION_IS_ON = Condition(
    "when on_policy.fraction is above 0", lambda on_policy: on_policy.fraction > 0
)


class LoraConfig(Section):
    """The section `draft.lora:`, for LoRA updates (arXiv 2106.09685)."""

    rank: int = option(0, "LoRA rank; 0: train all weights", ge=0)
    alpha: int = option(
        16, "LoRA alpha: updates are scaled by alpha / rank", ge=1, condition=LORA_IS_USED
    )
    dropout: float = option(
        0.0, "dropout on the input of the LoRA updates", ge=0, lt=1, condition=LORA_IS_USED
    )
    target_modules: list[str] | None = option(
        None,
        "linear layers with LoRA updates, by the end of their names, such as q_proj; null: all but"
        " the LM head",
        condition=LORA_IS_USED,
    )


class DraftModelDraftConfig(DraftSection):
    """The section `draft:` of a draft model's recipe."""

    NOT_OF_SHAPE = frozenset({"lora"})

    init: str | None = option(
        None,
        "where the weights come from: layers (copied from the target, the default), scratch (random"
        " weights), or the folder or Hub id of a trained model",
    )
    num_layers: int | None = option(None, "decoder layers; null: chosen by draft.init", ge=1)
    hidden_size: int | None = option(None, "hidden size; null: the target's", ge=1)
    intermediate_size: int | None = option(None, "MLP width; null: the target's", ge=1)
    num_attention_heads: int | None = option(None, "attention heads; null: the target's", ge=1)
    num_key_value_heads: int | None = option(None, "key/value heads; null: the target's", ge=1)
    head_dim: int | None = option(
        None, "size of an attention head; null: the target's", ge=2, multiple_of=2
    )
    lora: LoraConfig = section(LoraConfig)


class ModelLossConfig(Section):
    """The section `loss:` of a draft model's recipe."""

    divergence: Any = option("forward_kl", DIVERGENCE, condition=LABELS_ARE_SOFT)
    temperature: float = option(
        1.0,
        "temperature of the loss: divides the logits of draft and target",
        ge=0.01,
        condition=LABELS_ARE_SOFT,
    )
    labels: Literal["soft", "hard"] = option(
        "soft",
        "what the draft learns; soft: the target's distributions; hard: the tokens of the data",
    )


class OnPolicyConfig(Section):
    """The section `on_policy:`, for rows that the draft generates."""

    fraction: float = option(
        0.0,
        "fraction of training batches that the draft generates and the target scores",
        ge=0,
        le=1,
    )
    temperature: float = option(
        1.0, "sampling temperature of the draft; 0 is greedy", ge=0, condition=GENERATION_IS_ON
    )
    prompt_tokens: int = option(
        32,
        "tokens from the start of each row that are the prompt of on-policy generation",
        ge=1,
        condition=GENERATION_IS_ON,
    )
    num_tokens: int = option(
        64,
        "most tokens that the draft generates after each prompt",
        ge=1,
        condition=GENERATION_IS_ON,
    )


class DraftModelEvalConfig(EvalConfig):
    """The section `eval:` of a draft model's recipe."""

    num_speculative_tokens: int = option(
        4, "K, draft tokens per round, in decoding and in the metrics of training", ge=1
    )
    heterogeneous_vocab: bool = option(
        False,
        "allow a draft with another tokenizer; it proposes only tokens that both tokenizers have",
        condition=DECODING_IN_PROCESS,
    )
    token_replacements: dict[str, str] = option(
        {},
        "{text of a target token: text that the draft reads and writes instead}, e.g."
        ' {"<|end|>": "</s>"} for tokens of two chat templates that mean the same',
        condition=VOCABULARY_IS_TRANSLATED,
    )


class ModelRecipe(TrainedRecipe):
    """The recipe of a draft that is a model of its own, however it drafts."""

    FRESH = ("scratch",)

    draft: DraftModelDraftConfig = section(DraftModelDraftConfig)
    loss: ModelLossConfig = section(ModelLossConfig)
    eval: DraftModelEvalConfig = section(DraftModelEvalConfig)


class DraftModelRecipe(ModelRecipe):
    """The recipe of a draft model."""

    on_policy: OnPolicyConfig = section(OnPolicyConfig)

    @model_validator(mode="after")
    def _check_on_policy(self) -> "DraftModelRecipe":
        """Check that a recipe with hard labels has no on-policy batches."""
        if self.on_policy.fraction and self.loss.labels == "hard":
            raise UserError(
                "on_policy.fraction",
                got=self.on_policy.fraction,
                expected=(
                    "0: with loss.labels=hard the target does not score what the draft generates"
                ),
            )
        return self


RECIPE = DraftModelRecipe
