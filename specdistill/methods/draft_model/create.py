"""Draft models: plain Hugging Face causal language models, their initialization, and what a step of theirs costs.

What a draft step costs against a target step, c, decides how much its acceptance is worth. At batch 1 a step reads every weight once
(memory-bound) and launches every layer in turn (launch-bound), so c is taken as the larger of two shares: of the weights read, and of
the layers. Both are served in the same dtype; the embedding table is a look-up and does not count, unless it is the head too.
Depth is what a small model pays for (arXiv 2402.01528): proposals are wide and shallow.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdistill.errors import UserError, nearest
from specdistill.hub import resolve
from specdistill.methods.checkpoint import check_finite
from specdistill.methods.draft_model.pruning import from_layers, from_width, reshaped
from specdistill.methods.draft_model.vocabulary import match_vocabularies
from specdistill.methods.sizes import Shape, shape_of, weights_read
from specdistill.targets.frozen import FrozenTarget, is_recurrent, read_causal_lm

logger = logging.getLogger(__name__)

INITIALIZATIONS = ("layers", "width", "scratch")
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


def from_scratch(target: PreTrainedModel, shape: Shape, seed: int = 0) -> PreTrainedModel:
    """Fresh weights in the target's architecture and vocabulary, as transformers initializes them. float32."""
    if shape.num_attention_heads % shape.num_key_value_heads:
        got = f"{shape.num_key_value_heads} for {shape.num_attention_heads} attention heads"
        raise UserError("draft.num_key_value_heads", got=got, expected="a divisor of the attention heads")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = type(target)(reshaped(target.config, shape))
    draft: PreTrainedModel = model.to(device=target.device, dtype=torch.float32).eval()
    return draft


def propose_shape(target: PreTrainedModel, max_parameters: int) -> Shape:
    """The widest shape of which SHALLOWEST layers fit the budget, then as many layers as fit, up to the target's.

    Widths are sixteenths of the target's, with its proportions. Raises UserError when not even the narrowest fits.
    """
    whole = shape_of(target.config)
    shallowest = min(SHALLOWEST, whole.num_layers)
    for sixteenths in range(16, 0, -1):
        shape = _narrowed(replace(whole, num_layers=shallowest), sixteenths)
        smallest = _count_parameters(target, shape)
        if smallest <= max_parameters:
            per_layer = _count_parameters(target, replace(shape, num_layers=shallowest + 1)) - smallest
            deeper = (max_parameters - smallest) // per_layer
            return replace(shape, num_layers=min(shallowest + deeper, whole.num_layers))
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


def save_draft_model(draft: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """config.json, safetensors and tokenizer: what AutoModelForCausalLM, vLLM and SGLang load."""
    draft.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_draft_model(
    path: Path | str, *, key: str = "eval.draft", device: str | torch.device = "cpu", dtype: str = "float32"
) -> tuple[PreTrainedModel, Any]:
    """A draft model and its tokenizer from a folder or a Hub id; `key` is the recipe key that errors name.

    Raises UserError when there are no weights or no tokenizer, or when the weights are cut short, incomplete or not finite.
    """
    name = str(path)
    if "/" not in name and not Path(name).is_dir() and name != "pico":
        expected = (
            f"a folder, a Hub id, or one of {', '.join(INITIALIZATIONS)}" if key == "draft.init" else "a folder or a Hub id"
        )
        raise UserError(
            key, got=name, expected=expected, nearest=nearest(name, INITIALIZATIONS) if key == "draft.init" else None
        )
    model, tokenizer = read_causal_lm(resolve(name, key), key=key, dtype=dtype)
    check_attention(model, key, name)
    check_finite(model.state_dict(), name, key)
    return model.to(device).eval(), tokenizer


def check_attention(model: PreTrainedModel, key: str, name: str) -> None:
    """Raises UserError, naming `key`, for a draft with layers that keep a state: it could not take rejected tokens back."""
    if is_recurrent(model.config.get_text_config()):
        got = f"{name}, whose layers carry a state from token to token"
        raise UserError(key, got=got, expected="a draft whose layers are all attention")


def load_alike(path: str, target: FrozenTarget, *, key: str) -> PreTrainedModel:
    """A trained model with the target's own vocabulary, on its device. Raises UserError when the two differ, as `load_draft_model` does."""
    draft, tokenizer = load_draft_model(path, key=key, device=target.device)
    width: int = draft.get_output_embeddings().weight.shape[0]
    if match_vocabularies(target.tokenizer, target.vocab_size, tokenizer, width, key=key):
        raise UserError(key, got=f"logits of {width} tokens", expected=f"{target.vocab_size}, as the target's")
    return draft


def _from_target(
    target: FrozenTarget, init: str, given: dict[str, int], max_parameters: int | None, calibration: Tensor | None, seed: int
) -> PreTrainedModel:
    whole = shape_of(target.config)
    if init == "layers":
        wrong = next((name for name in given if name != "num_layers"), None)
        if wrong:
            raise UserError(
                f"draft.{wrong}", got=given[wrong], expected="null: layers are copied whole; draft.init=width cuts them"
            )
        return from_layers(target.model, given.get("num_layers") or _num_layers(target, max_parameters))
    shape = replace(whole, num_layers=max(whole.num_layers // 4, min(SHALLOWEST, whole.num_layers)))
    if not given and max_parameters is None:
        expected = "draft.max_parameters, or sizes such as draft.hidden_size"
        raise UserError("draft.init", got=f"{init} without a size", expected=expected)
    if not given and max_parameters is not None:
        shape = propose_shape(target.model, max_parameters)
    shape = replace(shape, **given)
    if init == "scratch":
        return from_scratch(target.model, shape, seed)
    if calibration is None or calibration.numel() == 0:
        raise UserError("draft.init", got="width without calibration rows", expected="training rows to measure activations on")
    return from_width(target.model, calibration, shape)


def _num_layers(target: FrozenTarget, max_parameters: int | None) -> int:
    """A quarter of the target's layers, or as many as fit the budget; at least SHALLOWEST."""
    whole = shape_of(target.config)
    least = min(SHALLOWEST, whole.num_layers)
    if max_parameters is None:
        return max(whole.num_layers // 4, least)
    smallest = _count_parameters(target.model, replace(whole, num_layers=least))
    per_layer = _count_parameters(target.model, replace(whole, num_layers=least + 1)) - smallest
    return min(whole.num_layers, least + max(0, max_parameters - smallest) // per_layer)


def _check_size(draft: PreTrainedModel, target: FrozenTarget, max_parameters: int | None, allow_larger: bool) -> None:
    """Say what a step is expected to cost; refuse a draft over the budget, or larger than the target."""
    parameters, ratio = draft.num_parameters(), step_ratio(target.model, draft)
    shape = shape_of(draft.config)
    logger.info(
        f"draft: {parameters:,} parameters, {shape.num_layers} layers of {shape.hidden_size}; "
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
