"""Draft models before training: plain Hugging Face causal language models, their initialization, LoRA, and what a step of theirs costs.

What a draft step costs against a target step, c, decides how much its acceptance is worth. At batch 1 a step reads every weight once
(memory-bound) and launches every layer in turn (launch-bound), so c is taken as the larger of two shares: of the weights read, and of
the layers. Both are served in the same dtype; the embedding table is a look-up and does not count, unless it is the head too.
Depth is what a small model pays for (arXiv 2402.01528): proposals are wide and shallow.
"""

import logging
from dataclasses import replace
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdistill.errors import UserError
from specdistill.methods.draft_model.checkpoint import INITIALIZATIONS, check_attention, load_alike
from specdistill.methods.draft_model.pruning import from_layers, from_width, reshaped, resized
from specdistill.methods.sizes import Shape, shape_of, weights_read
from specdistill.targets.frozen import FrozenTarget

logger = logging.getLogger(__name__)

# Fewer cannot copy what followed an earlier occurrence of a token (arXiv 2209.11895).
SHALLOWEST = 2


def create_draft_model(
    target: FrozenTarget,
    *,
    init: str | None = None,
    max_parameters: int | None = None,
    calibration: Tensor | None = None,
    seed: int = 0,
    allow_larger: bool = False,
    **sizes: int | None,
) -> PreTrainedModel:
    """A draft model in float32 on the target's device.

    Args:
        init: `layers` (also None), `width`, `scratch`, or a folder or Hub id.
        max_parameters: with no size given, the shape is proposed to fit; the draft is refused when it has more.
        calibration: token ids [R, T] that `width` measures activations on.
        allow_larger: warn of a draft with more parameters than the target instead of refusing it.
        sizes: the fields of `Shape`. None takes the target's (a quarter of its layers), unless `max_parameters` decides.

    Raises UserError for settings that do not fit each other or the target.
    """
    init = init or "layers"
    given = {name: size for name, size in sizes.items() if size is not None}
    if init not in INITIALIZATIONS:
        draft = load_alike(init, target, key="draft.init")
        if given:
            name, size = next(iter(given.items()))
            raise UserError(f"draft.{name}", got=size, expected=f"null: {init} has its sizes")
    else:
        check_attention(target.model, "draft.init", f"{init} of {target.name}")
        draft = _from_target(target, init, given, max_parameters, calibration, seed)
    _check_size(draft, target, max_parameters, allow_larger)
    return draft


def with_lora(
    draft: PreTrainedModel, *, rank: int, alpha: int = 16, dropout: float = 0.0, target_modules: list[str] | None = None
) -> PreTrainedModel | peft.PeftModel:
    """Freeze the draft and give its linear layers updates B A x * alpha / rank, zero at first; rank 0 gives the draft as it is.

    Raises UserError when `target_modules` are no linear layers of the draft.
    """
    if rank == 0:
        return draft
    modules: str | list[str] = "all-linear" if target_modules is None else target_modules
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=modules, task_type="CAUSAL_LM")
    try:
        return peft.get_peft_model(draft, config)
    except ValueError as error:
        expected = "ends of names of the draft's linear layers, such as q_proj"
        raise UserError("draft.lora.target_modules", got=target_modules, expected=expected) from error


def from_scratch(target: PreTrainedModel, shape: Shape, seed: int = 0) -> PreTrainedModel:
    """Fresh weights in the target's architecture and vocabulary, as transformers initializes them. float32."""
    if shape.num_attention_heads % shape.num_key_value_heads:
        got = f"{shape.num_key_value_heads} for {shape.num_attention_heads} attention heads"
        raise UserError("draft.num_key_value_heads", got=got, expected="a divisor of the attention heads")
    return resized(target, shape, seed=seed)


def propose_shape(target: PreTrainedModel, max_parameters: int) -> Shape:
    """The widest shape of which SHALLOWEST layers fit the budget, then as many layers as fit, up to the target's.

    Widths are sixteenths of the target's, with its proportions. Raises UserError when not even the narrowest fits.
    """
    for sixteenths in range(16, 0, -1):
        shape = _narrowed(_shallowest(target), sixteenths)
        smallest = _count_parameters(target, shape)
        if smallest <= max_parameters:
            return _deepened(target, shape, max_parameters)
    raise UserError("draft.max_parameters", got=f"{max_parameters:,}", expected=f"at least {smallest:,}")


def step_ratio(target: PreTrainedModel, draft: PreTrainedModel) -> float:
    """c, a draft step over a target step at batch 1: the larger of the shares of weights read and of layers (see the module)."""
    weights = weights_read(draft) / weights_read(target)
    layers: float = draft.config.num_hidden_layers / target.config.num_hidden_layers
    return max(weights, layers)


def on_meta(config: Any, shape: Shape) -> PreTrainedModel:
    """A model of a config in another shape, without weights, to be counted."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(reshaped(config, shape))
    return model


def _from_target(
    target: FrozenTarget, init: str, given: dict[str, int], max_parameters: int | None, calibration: Tensor | None, seed: int
) -> PreTrainedModel:
    shallowest = _shallowest(target.model)
    shape = replace(shallowest, num_layers=max(target.num_layers // 4, shallowest.num_layers))
    if init == "layers":
        if wrong := next((name for name in given if name != "num_layers"), None):
            expected = "null: layers are copied whole; draft.init=width cuts them"
            raise UserError(f"draft.{wrong}", got=given[wrong], expected=expected)
        if not given and max_parameters is not None:
            shape = _deepened(target.model, shallowest, max_parameters)
        return from_layers(target.model, given.get("num_layers", shape.num_layers))
    if not given:
        if max_parameters is None:
            expected = "draft.max_parameters, or sizes such as draft.hidden_size"
            raise UserError("draft.init", got=f"{init} without a size", expected=expected)
        shape = propose_shape(target.model, max_parameters)
    shape = replace(shape, **given)
    if init == "scratch":
        return from_scratch(target.model, shape, seed)
    if calibration is None or calibration.numel() == 0:
        raise UserError("draft.init", got="width without calibration rows", expected="training rows to measure activations on")
    return from_width(target.model, calibration, shape)


def _shallowest(target: PreTrainedModel) -> Shape:
    """The target's shape with the fewest layers that a draft is given unasked."""
    whole = shape_of(target.config)
    return replace(whole, num_layers=min(SHALLOWEST, whole.num_layers))


def _deepened(target: PreTrainedModel, shape: Shape, max_parameters: int) -> Shape:
    """A shape with as many layers as fit the budget, none fewer than it has and none more than the target has."""
    smallest = _count_parameters(target, shape)
    per_layer = _count_parameters(target, replace(shape, num_layers=shape.num_layers + 1)) - smallest
    num_layers = shape.num_layers + max(0, max_parameters - smallest) // per_layer
    return replace(shape, num_layers=min(num_layers, shape_of(target.config).num_layers))


def _check_size(draft: PreTrainedModel, target: FrozenTarget, max_parameters: int | None, allow_larger: bool) -> None:
    """Say what a step is expected to cost; refuse a draft over the budget, or larger than the target."""
    parameters, ratio = draft.num_parameters(), step_ratio(target.model, draft)
    logger.info(
        f"draft: {parameters:,} parameters, {draft.config.num_hidden_layers} layers of {draft.config.hidden_size}; "
        f"expected c = {ratio:.2f} (draft step / target step, the larger share of weights read and of layers)"
    )
    if max_parameters is not None and parameters > max_parameters:
        raise UserError("draft.max_parameters", got=f"a draft of {parameters:,}", expected=f"at most {max_parameters:,}")
    if parameters > target.num_parameters:
        # (K + 1) tokens for a cost of at least 1 + c K; with c > 1 that is largest at K = 1.
        bound = f"a predicted speedup of at most {2 / (1 + ratio):.2f}"
        got = f"a draft of {parameters:,} parameters for a target of {target.num_parameters:,}, {bound}"
        if not allow_larger:
            raise UserError("draft.allow_larger", got=got, expected="a smaller draft, or draft.allow_larger=true")
        logger.warning(f"{got}: it cannot pay unless its steps are cheaper than its size says")


def _count_parameters(target: PreTrainedModel, shape: Shape) -> int:
    return int(on_meta(target.config, shape).num_parameters())


def _narrowed(whole: Shape, sixteenths: int) -> Shape:
    """A shape cut to n sixteenths: widths a multiple of 8, as many query heads to a key/value head as before."""
    share = whole.num_attention_heads // whole.num_key_value_heads
    groups = max(1, round(whole.num_key_value_heads * sixteenths / 16))
    return replace(
        whole,
        hidden_size=max(8, whole.hidden_size * sixteenths // 16 // 8 * 8),
        intermediate_size=max(8, whole.intermediate_size * sixteenths // 16 // 8 * 8),
        num_key_value_heads=groups,
        num_attention_heads=groups * share,
    )
