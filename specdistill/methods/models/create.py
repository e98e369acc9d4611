"""Create draft models: plain Hugging Face causal language models, from layers or from scratch.

This file also adds LoRA, and estimates what a draft step costs.

c is the cost of a draft step in units of a target step. It decides how much acceptance is worth. At
batch 1 a step reads every weight once (memory-bound) and launches every layer in turn
(launch-bound). So c is taken as the larger of two shares: of the weights that are read, and of the
layers. Draft and target are served in the same dtype. The embedding table is only looked up in, so
it does not count, unless it is the head too.
"""

import copy
from dataclasses import replace
from typing import Any

import peft
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from specdistill.common.errors import UserError, convert_errors, logger, make_unused_key_error
from specdistill.methods.models.checkpoint import INITIALIZATIONS, check_attention, load_draft_model
from specdistill.methods.sizes import ModelShape, count_weights_read, read_model_shape
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.sharding import gather_whole

# The fewest layers of a draft by default. A single attention layer cannot copy what followed an
# earlier occurrence of a token: such an induction head takes two layers (arXiv 2209.11895).
MIN_LAYERS = 2
# The modules that hold the parameters of a decoder built like Llama's or Qwen's. Each layer of such
# a decoder only adds to the residual stream, so layers can be left out.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OTHER_MODULES = (
    "embed_tokens",
    "lm_head",
    "norm",
    "input_layernorm",
    "post_attention_layernorm",
    "q_norm",
    "k_norm",
)
DECODER_HINT = "a decoder built like Llama's or Qwen's, or a trained smaller model"
KNOWN_PARAMETERS = {f"{name}.weight" for name in PROJECTIONS + OTHER_MODULES} | {
    f"{name}.bias" for name in PROJECTIONS
}


def create_draft_model(
    target: FrozenTarget,
    *,
    init: str | None = None,
    seed: int = 0,
    **sizes: int | None,
) -> PreTrainedModel:
    """Create a draft model in float32 on the target's device.

    Args:
        target: the target.
        init: where the weights come from: `layers` (the default) copies layers of the target,
            `scratch` draws fresh weights, and a folder or Hub id names a trained model, which
            `check_initialization` has checked.
        seed: the seed of fresh weights.
        **sizes: fields of `ModelShape`, such as `num_layers` and `hidden_size`. None means the
            target's size, or for `num_layers` a quarter of the target's layers.

    Raises:
        UserError: for settings that contradict each other or do not fit the target.
    """
    init = init or "layers"
    given_sizes = {name: size for name, size in sizes.items() if size is not None}
    if init in INITIALIZATIONS:
        draft = _build_from_target(target, init, given_sizes, seed)
    else:
        draft = _load_trained_model(target, init, given_sizes)
    _log_size(draft, target)
    return draft


def _load_trained_model(
    target: FrozenTarget, init: str, given_sizes: dict[str, int]
) -> PreTrainedModel:
    """Load a trained model, and resize its embedding and LM head to the target's vocabulary.

    Args:
        target: the target.
        init: a folder or a Hub id.
        given_sizes: the sizes that the recipe states. A trained model has its own, so any size is
            an error.
    """
    draft, _ = load_draft_model(init, key="draft.init", device=target.device)

    # Models of one family may have the same tokens, but pad their embeddings to different sizes.
    # Rows that are added belong to no token, so plain random values (no `mean_resizing`) will do.
    if draft.config.get_text_config().vocab_size != target.vocab_size:
        draft.resize_token_embeddings(target.vocab_size, mean_resizing=False)

    # The sizes cannot be changed.
    if given_sizes:
        name, size = next(iter(given_sizes.items()))
        raise make_unused_key_error(
            f"draft.{name}", size, f"draft.init={init} has sizes of its own"
        )
    return draft


def _build_from_target(
    target: FrozenTarget, init: str, given_sizes: dict[str, int], seed: int
) -> PreTrainedModel:
    """Build a smaller model of the target's class: from copied layers, or with fresh weights.

    Args:
        target: the target.
        init: `layers` copies layers of the target; `scratch` draws fresh weights.
        given_sizes: the sizes that the recipe states, by fields of `ModelShape`.
        seed: the seed of fresh weights.
    """
    # Check that a model of the target's class can draft.
    check_attention(target.model, "draft.init", f"{init} of {target.name}")

    # The text config of a multimodal target is only a part of its model's config. Such a model
    # cannot be resized.
    if target.model.config is not target.config:
        raise UserError(
            "draft.init",
            got=(
                f"{init} of {target.name}, a {type(target.model).__name__}, which is not only a"
                " language model but has further parts"
            ),
            expected="the folder or Hub id of a trained smaller model",
        )
    if init == "layers":
        check_decoder(target.model)

    # By default the draft has a quarter of the target's layers, but at least two, if the target has
    # as many.
    with convert_errors(
        (AttributeError, RuntimeError), "draft.init", f"{init} of {target.name}", DECODER_HINT
    ):
        default_shape = replace(
            read_model_shape(target.config),
            num_layers=max(target.num_layers // 4, min(MIN_LAYERS, target.num_layers)),
        )

    # A model from scratch needs sizes, because in the target's sizes it would draft too slowly.
    if init == "scratch":
        if not given_sizes:
            raise UserError(
                "draft.init",
                got=f"{init} without a size",
                expected="at least one size, such as draft.hidden_size=256",
            )
        return build_resized(target.model, replace(default_shape, **given_sizes), seed=seed)

    # Copied layers keep the target's sizes. Only their number can be chosen.
    for name, size in given_sizes.items():
        if name != "num_layers":
            raise make_unused_key_error(
                f"draft.{name}", size, "draft.init=layers copies layers of the target whole"
            )
    return from_layers(target.model, given_sizes.get("num_layers", default_shape.num_layers))


def add_lora(
    draft: PreTrainedModel,
    *,
    rank: int,
    alpha: int = 16,
    dropout: float = 0.0,
    target_modules: list[str] | None = None,
) -> PreTrainedModel | peft.PeftModel:
    """Freeze a draft, and add trainable LoRA updates B A x * alpha / rank to its linear layers.

    B is zero at first, so the draft computes the same as before until it is trained.

    Args:
        draft: the draft.
        rank: the rank of the updates; 0 returns the draft as it is, without LoRA.
        alpha: scales the updates.
        dropout: the dropout that is applied to the input x of the updates.
        target_modules: the ends of the names of the layers that get updates, such as `q_proj`.
            None updates all linear layers but the LM head.

    Raises:
        UserError: if `target_modules` matches no linear layer of the draft, or if the rank is above
            the hidden size.
    """
    if rank == 0:
        return draft

    # B A has at most the rank of the matrices that it is added to.
    max_rank = draft.config.get_text_config().hidden_size
    if rank > max_rank:
        raise UserError(
            "draft.lora.rank",
            got=rank,
            expected=f"at most {max_rank}, the draft's hidden size",
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
    with convert_errors(ValueError, "draft.lora.target_modules", target_modules, expected):
        return peft.get_peft_model(draft, config)


def step_ratio(target: PreTrainedModel, draft: PreTrainedModel) -> float:
    """Estimate c, the cost of a draft step divided by the cost of a target step at batch 1.

    The estimate is the larger of two ratios between draft and target: of the weights that a step
    reads, and of the layers.
    """
    # At batch 1 the time of a step goes either into reading weights or into launching kernels,
    # whose number grows with the layers.
    weights_share = count_weights_read(draft) / count_weights_read(target)
    layers_share: float = (
        draft.config.get_text_config().num_hidden_layers
        / target.config.get_text_config().num_hidden_layers
    )
    return max(weights_share, layers_share)


def _log_size(draft: PreTrainedModel, target: FrozenTarget) -> None:
    """Log a draft's size and the expected cost of a step; warn if it is larger than its target."""
    parameters = draft.num_parameters()
    ratio = step_ratio(target.model, draft)
    text = draft.config.get_text_config()
    logger.info(
        f"draft: {parameters:,} parameters, {text.num_hidden_layers} layers, hidden size"
        f" {text.hidden_size}; a draft step should cost about {ratio:.2f} of a target step."
        " This estimate is the ratio of their weights read per step, or of their numbers of layers,"
        " whichever is larger."
    )
    if parameters > target.num_parameters:
        # A round with K draft tokens gives at most K + 1 tokens, and costs at least 1 + c K steps
        # of the target, where c is the ratio. With c > 1 the bound (K + 1) / (1 + c K) is greatest
        # at K = 1: it is 2 / (1 + c).
        logger.warning(
            f"The draft has {parameters:,} parameters, the target {target.num_parameters:,}. The"
            f" predicted speedup is at most {2 / (1 + ratio):.2f}, unless the draft's steps"
            " are cheaper than its size suggests."
        )


def choose_evenly_spaced(num_layers: int, keep: int) -> list[int]:
    """Return `keep` evenly spaced indices from 0 to num_layers - 1, both ends included.

    For keep = 1 the only index is 0. `max(keep - 1, 1)` avoids a division by zero then.
    """
    return [round(index * (num_layers - 1) / max(keep - 1, 1)) for index in range(keep)]


def resize_config(config: PreTrainedConfig, shape: ModelShape) -> PreTrainedConfig:
    """Return a copy of a model's config with other sizes.

    If the config says the kind of each layer, such as full or sliding attention, each layer of the
    copy gets the kind of the layer at the same relative depth.
    """
    # Use the default attention of the class. The target's implementation may have no backward pass,
    # or none in float32.
    config = copy.deepcopy(config)
    config._attn_implementation = None

    # Choose the kinds of the layers, and set the sizes.
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = [
            kinds[index] for index in choose_evenly_spaced(len(kinds), shape.num_layers)
        ]
    sizes = dict(vars(shape))
    config.update({"num_hidden_layers": sizes.pop("num_layers"), **sizes})
    return config


def build_resized(
    target: PreTrainedModel,
    shape: ModelShape,
    weights: dict[str, Tensor] | None = None,
    *,
    seed: int = 0,
) -> PreTrainedModel:
    """Build a model of the target's class in another shape, in float32.

    Args:
        target: the target.
        shape: the sizes of the model.
        weights: all weights of the model, by name; None draws fresh weights.
        seed: the seed of fresh weights.

    Raises:
        UserError: for sizes that do not fit each other.
    """
    # transformers repeats each key/value head for a whole number of attention heads, but does not
    # check that the number is whole.
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise UserError(
            "draft.num_key_value_heads",
            got=f"{shape.num_key_value_heads} for {shape.num_attention_heads} attention heads",
            expected="a divisor of the attention heads",
        )
    config = resize_config(target.config, shape)
    with convert_errors(StrictDataclassError, "draft", "sizes", "sizes that fit each other"):
        config.validate()

    # `fork_rng` restores the caller's random state afterwards.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = type(target)(config)
    if weights is not None:
        # Strict loading: a name that is missing or unexpected is an error.
        model.load_state_dict(weights)
        model.generation_config = copy.deepcopy(target.generation_config)
    draft: PreTrainedModel = model.to(device=target.device, dtype=torch.float32).eval()
    return draft


def from_layers(target: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """Build a draft in float32 from the target's embedding, LM head and some of its layers.

    The copied layers are evenly spaced, and include the first and the last one. If all layers are
    copied, the draft computes the same as the target.

    Args:
        target: the target.
        num_layers: how many layers are copied.

    Raises:
        UserError: if the target has fewer layers, or is no decoder like Llama's (see
            `check_decoder`).
    """
    check_decoder(target)
    target_shape = read_model_shape(target.config)
    if num_layers > target_shape.num_layers:
        raise UserError(
            "draft.num_layers",
            got=num_layers,
            expected=f"1 to {target_shape.num_layers}, the number of the target's layers",
        )

    # Number the copied layers from 0: `layers.8.…` may become `layers.1.…`. All weights outside
    # the layers keep their names. `gather_whole` collects a weight whose parts are on several
    # processes.
    new_numbers = {
        str(old): str(new)
        for new, old in enumerate(choose_evenly_spaced(target_shape.num_layers, num_layers))
    }
    weights = {}
    for name, tensor in target.state_dict().items():
        prefix, separator, suffix = name.partition("layers.")
        old_number, _, name_in_layer = suffix.partition(".")
        if not separator:
            weights[name] = gather_whole(tensor)
        elif old_number in new_numbers:
            weights[f"{prefix}layers.{new_numbers[old_number]}.{name_in_layer}"] = gather_whole(
                tensor
            )
    return build_resized(target, replace(target_shape, num_layers=num_layers), weights)


def check_decoder(target: PreTrainedModel) -> None:
    """Check that a target is a decoder like Llama's, whose layers can be copied.

    Raises:
        UserError: for a parameter that such a decoder does not have.
    """
    # Compare the last two parts of each parameter's name, such as `q_proj.weight`, with the known
    # ones.
    names = {".".join(name.split(".")[-2:]) for name, _ in target.named_parameters()}
    unknown = sorted(names - KNOWN_PARAMETERS)
    if unknown:
        got = f"layers of a {target.config.model_type} target with {', '.join(unknown[:3])}"

        # `scratch` can only be suggested for a config whose sizes can be changed.
        config = target.config
        can_be_resized = config is config.get_text_config() and hasattr(config, "intermediate_size")
        alternatives = (
            "draft.init=scratch with draft.num_layers=2, or draft.init=PATH"
            if can_be_resized
            else "draft.init=PATH"
        )
        raise UserError(
            "draft.init",
            got=got,
            expected=(
                f"{alternatives} of a trained smaller model; only layers like Llama's are copied"
            ),
        )
