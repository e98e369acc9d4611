"""The recipe of draft models."""

from typing import Any, Literal

from pydantic import model_validator

from specdistill.errors import UserError
from specdistill.methods.recipe import DIVERGENCE, TrainedRecipe
from specdistill.recipe.fields import ReadWhen, Section, option, section
from specdistill.recipe.sections import IN_PROCESS, EvalConfig

ADAPTED = ReadWhen("when draft.lora.rank is above 0", lambda lora: lora.rank > 0)
SOFT = ReadWhen("with loss.labels=soft", lambda loss: loss.labels == "soft")
TRANSLATED = ReadWhen("with heterogeneous_vocab=true", lambda it: it.heterogeneous_vocab)
SELECTS = ReadWhen("with loss.reference", lambda loss: loss.reference is not None)
GENERATES = ReadWhen("when on_policy.fraction is above 0", lambda on_policy: on_policy.fraction > 0)


class LoraConfig(Section):
    rank: int = option(0, "rank of the update of each adapted matrix; 0 trains all weights", ge=0)
    alpha: int = option(16, "the update is scaled by alpha / rank", ge=1, read_when=ADAPTED)
    dropout: float = option(0.0, "dropout of the update's input", ge=0, lt=1, read_when=ADAPTED)
    target_modules: list[str] | None = option(
        None, "linear layers adapted, by the end of their name; null: all but the head", read_when=ADAPTED
    )


class DraftModelDraftConfig(Section):
    init: str | None = option(
        None,
        "initialization: layers (also null) | width | scratch, or a trained model: a folder or a Hub id, e.g. org/name@revision",
    )
    num_layers: int | None = option(None, "decoder layers; null: the initialization's choice", ge=1)
    hidden_size: int | None = option(None, "null: the target's", ge=1)
    intermediate_size: int | None = option(None, "MLP width; null: the target's", ge=1)
    num_attention_heads: int | None = option(None, "null: the target's", ge=1)
    num_key_value_heads: int | None = option(None, "null: the target's", ge=1)
    head_dim: int | None = option(None, "null: the target's", ge=2, multiple_of=2)
    max_parameters: int | None = option(None, "most parameters of the draft; its shape is then proposed", ge=1)
    allow_larger: bool = option(False, "allow a draft with more parameters than the target")
    lora: LoraConfig = section(LoraConfig)

    def shape(self) -> dict[str, Any]:
        """Initialization, sizes and their limits."""
        return self.model_dump(exclude={"lora"})


class DraftModelLossConfig(Section):
    divergence: Any = option("forward_kl", DIVERGENCE, read_when=SOFT)
    temperature: float = option(1.0, "divides both sets of logits", ge=0.01, read_when=SOFT)
    labels: Literal["soft", "hard"] = option("soft", "learn the target's distributions, or the sequence's own tokens")
    reference: str | None = option(None, "folder of a draft that says which tokens can be learnt (AdaSPEC)")
    selected: float = option(0.4, "share of the loss tokens kept when there is a reference", ge=0.01, le=1, read_when=SELECTS)


class OnPolicyConfig(Section):
    fraction: float = option(0.0, "share of the batches that the draft generates and the target scores", ge=0, le=1)
    temperature: float = option(1.0, "at which the draft generates; 0 is greedy", ge=0, read_when=GENERATES)
    prompt_tokens: int = option(32, "tokens kept from the beginning of a row", ge=1, read_when=GENERATES)
    num_tokens: int = option(64, "tokens the draft generates after them", ge=1, read_when=GENERATES)


class DraftModelEvalConfig(EvalConfig):
    num_speculative_tokens: int = option(4, "K, draft tokens per round, in training also those of a simulated round", ge=1)
    confidence_threshold: float | None = option(
        None, "stop drafting where the best next token is less probable; null: never", ge=0, le=1, read_when=IN_PROCESS
    )
    draft_context: Literal["refuse", "window"] = option(
        "refuse", "a sequence longer than the draft's context: refused, or seen in part", read_when=IN_PROCESS
    )
    heterogeneous_vocab: bool = option(
        False, "a draft with another tokenizer: draft over the tokens both have", read_when=IN_PROCESS
    )
    token_replacements: dict[str, str] = option(
        {}, "tokens of the target, each with the draft's text that stands for it", read_when=TRANSLATED
    )


class DraftModelRecipe(TrainedRecipe):
    FRESH = ("scratch",)

    draft: DraftModelDraftConfig = section(DraftModelDraftConfig)
    loss: DraftModelLossConfig = section(DraftModelLossConfig)
    on_policy: OnPolicyConfig = section(OnPolicyConfig)
    eval: DraftModelEvalConfig = section(DraftModelEvalConfig)

    @model_validator(mode="after")
    def _target_scores_what_is_generated(self) -> "DraftModelRecipe":
        if self.on_policy.fraction and self.loss.labels == "hard":
            expected = "0: with loss.labels=hard the target does not score what the draft generates"
            raise UserError("on_policy.fraction", got=self.on_policy.fraction, expected=expected)
        return self


RECIPE = DraftModelRecipe
