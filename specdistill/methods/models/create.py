"""Draft models before training: plain Hugging Face causal language models, their initialization, LoRA, and what a step of theirs costs.

What a draft step costs against a target step, c, decides how much its acceptance is worth. At batch 1 a step reads every weight once
(memory-bound) and launches every layer in turn (launch-bound), so c is taken as the larger of two shares: of the weights read, and of
the layers. Both are served in the same dtype; the embedding table is looked up in and does not count, unless it is the head too.
"""

import copy
from dataclasses import replace
from typing import Any

import peft
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedModel

from specdistill.errors import UserError, logger, refusing
from specdistill.methods.models.checkpoint import INITIALIZATIONS, check_attention, load_draft_model
from specdistill.methods.models.vocabulary import describe_difference
from specdistill.methods.sizes import ModelShape, shape_of, weights_read
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.sharding import whole

# Fewer cannot copy what followed an earlier occurrence of a token (arXiv 2209.11895).
SHALLOWEST = 2
# The ends of the names of all parameters of a decoder built like Llama's or Qwen's, whose layers can be left out.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OTHERS = (
    "embed_tokens",
    "lm_head",
    "norm",
    "input_layernorm",
    "post_attention_layernorm",
    "q_norm",
    "k_norm",
)
PARAMETERS = {f"{name}.weight" for name in PROJECTIONS + OTHERS} | {
    f"{name}.bias" for name in PROJECTIONS
}


def create_draft_model(
    target: FrozenTarget,
    *,
    init: str | None = None,
    seed: int = 0,
    **sizes: int | None,
) -> PreTrainedModel:
    """A draft model in float32 on the target's device.

    Args:
        init: `layers` (also None), `scratch`, or a folder or Hub id.
        sizes: the fields of `ModelShape`. None takes the target's (a quarter of its layers).

    Raises UserError for settings that do not fit each other or the target.
    """
    init = init or "layers"
    given = {name: size for name, size in sizes.items() if size is not None}
    if init not in INITIALIZATIONS:
        draft, tokenizer = load_draft_model(init, key="draft.init", device=target.device)
        if difference := describe_difference(target.tokenizer, tokenizer):
            raise UserError("draft.init", got=difference, expected="the target's tokenizer")
        if (
            draft.config.get_text_config().vocab_size != target.vocab_size
        ):  # tables that are padded otherwise
            draft.resize_token_embeddings(target.vocab_size, mean_resizing=False)
        if given:
            name, size = next(iter(given.items()))
            raise UserError(f"draft.{name}", got=size, expected=f"null: {init} has its sizes")
    else:
        check_attention(target.model, "draft.init", f"{init} of {target.name}")
        if target.model.config is not target.config:
            got = f"{init} of {target.name}, a {type(target.model).__name__}, which is more than a language model"
            raise UserError("draft.init", got=got, expected="a trained smaller model")
        shape = replace(
            shape_of(target.config),
            num_layers=max(target.num_layers // 4, min(SHALLOWEST, target.num_layers)),
        )
        if init == "layers":
            if wrong := next((name for name in given if name != "num_layers"), None):
                raise UserError(
                    f"draft.{wrong}", got=given[wrong], expected="null: layers are copied whole"
                )
            draft = from_layers(target.model, given.get("num_layers", shape.num_layers))
        elif not given:
            raise UserError(
                "draft.init",
                got=f"{init} without a size",
                expected="sizes such as draft.hidden_size",
            )
        else:
            draft = resized(target.model, replace(shape, **given), seed=seed)
    _say_size(draft, target)
    return draft


def with_lora(
    draft: PreTrainedModel,
    *,
    rank: int,
    alpha: int = 16,
    dropout: float = 0.0,
    target_modules: list[str] | None = None,
) -> PreTrainedModel | peft.PeftModel:
    """Freeze the draft and give its linear layers updates B A x * alpha / rank, zero at first; rank 0 gives the draft as it is.

    Raises UserError when `target_modules` are no linear layers of the draft, and for a rank beyond that of its matrices.
    """
    if rank == 0:
        return draft
    if rank > (most := draft.config.get_text_config().hidden_size):
        raise UserError(
            "draft.lora.rank",
            got=rank,
            expected=f"at most {most}, the rank of the draft's own matrices",
        )
    modules: str | list[str] = "all-linear" if target_modules is None else target_modules
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=modules,
        task_type="CAUSAL_LM",
    )
    expected = "ends of names of the draft's linear layers, such as q_proj"
    with refusing(ValueError, "draft.lora.target_modules", target_modules, expected):
        return peft.get_peft_model(draft, config)


def step_ratio(target: PreTrainedModel, draft: PreTrainedModel) -> float:
    """c, a draft step over a target step at batch 1: the larger of the shares of weights read and of layers (see the module)."""
    weights = weights_read(draft) / weights_read(target)
    layers: float = (
        draft.config.get_text_config().num_hidden_layers
        / target.config.get_text_config().num_hidden_layers
    )
    return max(weights, layers)


def _say_size(draft: PreTrainedModel, target: FrozenTarget) -> None:
    """Say what a step is expected to cost; warn of a draft that is larger than the target."""
    parameters, ratio, text = (
        draft.num_parameters(),
        step_ratio(target.model, draft),
        draft.config.get_text_config(),
    )
    logger.info(
        f"draft: {parameters:,} parameters, {text.num_hidden_layers} layers of {text.hidden_size}; "
        f"expected c = {ratio:.2f} (draft step / target step, the larger share of weights read and of layers)"
    )
    if parameters > target.num_parameters:
        # (K + 1) tokens for a cost of at least 1 + c K; with c > 1 that is largest at K = 1.
        bound = f"a predicted speedup of at most {2 / (1 + ratio):.2f}"
        larger = f"a draft of {parameters:,} parameters for a target of {target.num_parameters:,}, {bound}"
        logger.warning(f"{larger}: it cannot pay unless its steps are cheaper than its size says")


def evenly_spaced(num_layers: int, keep: int) -> list[int]:
    """`keep` indices in 0..num_layers - 1 at even distances, both ends among them; one index is the first."""
    return [round(index * (num_layers - 1) / max(keep - 1, 1)) for index in range(keep)]


def reshaped(config: Any, shape: ModelShape) -> Any:
    """A copy of a config with other sizes. Where layers differ in kind, each keeps the kind found at its relative depth.

    Its attention is the class's own: the target's may have no backward pass, or none in float32.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = None
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = [kinds[index] for index in evenly_spaced(len(kinds), shape.num_layers)]
    sizes = dict(vars(shape))
    config.update({"num_hidden_layers": sizes.pop("num_layers"), **sizes})
    return config


def resized(
    target: PreTrainedModel,
    shape: ModelShape,
    weights: dict[str, Tensor] | None = None,
    *,
    seed: int = 0,
) -> PreTrainedModel:
    """A model of the target's class in another shape, with these weights (all of them, and no other) or fresh ones. float32.

    Raises UserError for sizes that do not fit each other.
    """
    if shape.num_attention_heads % shape.num_key_value_heads:
        got = f"{shape.num_key_value_heads} for {shape.num_attention_heads} attention heads"
        raise UserError(
            "draft.num_key_value_heads", got=got, expected="a divisor of the attention heads"
        )
    config = reshaped(target.config, shape)
    with refusing(StrictDataclassError, "draft", "sizes", "sizes that fit each other"):
        config.validate()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = type(target)(config)
    if weights is not None:
        model.load_state_dict(weights)
        model.generation_config = copy.deepcopy(target.generation_config)
    return model.to(device=target.device, dtype=torch.float32).eval()


def from_layers(target: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """A copy of `num_layers` of the target's layers, evenly spaced with both ends, between its embedding and its head. float32.

    With all of them it is the target. Raises UserError for more layers than the target has.
    """
    check_decoder(target)
    own_shape = shape_of(target.config)
    if num_layers > own_shape.num_layers:
        raise UserError(
            "draft.num_layers",
            got=num_layers,
            expected=f"1 to {own_shape.num_layers}, the target's",
        )
    number = {
        str(old): str(new)
        for new, old in enumerate(evenly_spaced(own_shape.num_layers, num_layers))
    }
    weights = {}
    for name, tensor in target.state_dict().items():
        before, found, after = name.partition("layers.")
        old, _, rest = after.partition(".")
        if not found:
            weights[name] = whole(tensor)  # also of a target that processes share
        elif old in number:
            weights[f"{before}layers.{number[old]}.{rest}"] = whole(tensor)
    return resized(target, replace(own_shape, num_layers=num_layers), weights)


def check_decoder(target: PreTrainedModel) -> None:
    """Raises UserError when the target holds a parameter that is not known: it is then no decoder like Llama's."""
    unknown = sorted(
        {".".join(name.split(".")[-2:]) for name, _ in target.named_parameters()} - PARAMETERS
    )
    if unknown:
        got = f"a {target.config.model_type} target with {', '.join(unknown[:3])}"
        raise UserError(
            "draft.init",
            got=got,
            expected="a decoder built like Llama's or Qwen's, or a trained smaller model",
        )
