"""Draft models before training: plain Hugging Face causal language models, their initialization, LoRA, and what a step of theirs costs.

What a draft step costs against a target step, c, decides how much its acceptance is worth. At batch 1 a step reads every weight once
(memory-bound) and launches every layer in turn (launch-bound), so c is taken as the larger of two shares: of the weights read, and of
the layers. Both are served in the same dtype; the embedding table is looked up in and does not count, unless it is the head too.
Depth is what a small model pays for (arXiv 2402.01528): proposals are wide and shallow.

Out of a larger model's weights a smaller one is made of some of its layers, or of all its axes cut to their most used parts.

Shapes: R rows and T positions of calibration text, H hidden size, I MLP width, N query heads, G key/value heads, d head size.

Cutting the width follows activation norms (Minitron, arXiv 2407.14679): over the calibration tokens,

    channel of the residual stream   L2 norm of the outputs of the layers' norms and of the final norm; one choice for the whole model
    channel of an MLP                L2 norm of its entry of down_proj's input; each layer chooses its own
    head                             L2 norm of its slice of o_proj's input. A key/value head goes with all its query heads, and every one
                                     that stays keeps as many query heads as the others, so that attention's grouping stays right

Kept parts stay in their order. Decoders built like Llama's and Qwen's: RMS norms, rotary attention, a gated MLP.
"""

import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import peft
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdistill.errors import UserError, logger, refusing
from specdistill.methods.models.checkpoint import INITIALIZATIONS, check_attention, load_alike
from specdistill.methods.sizes import ModelShape, shape_of, weights_read
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.sharding import whole

# Fewer cannot copy what followed an earlier occurrence of a token (arXiv 2209.11895).
SHALLOWEST = 2
# Which axis each dimension of a parameter runs along; None is left whole. `query` and `key` count single entries: heads times d.
AXES: dict[str, tuple[str | None, ...]] = {
    "embed_tokens.weight": (None, "hidden"),
    "lm_head.weight": (None, "hidden"),
    "norm.weight": ("hidden",),
    "input_layernorm.weight": ("hidden",),
    "post_attention_layernorm.weight": ("hidden",),
    "q_proj.weight": ("query", "hidden"),
    "k_proj.weight": ("key", "hidden"),
    "v_proj.weight": ("key", "hidden"),
    "o_proj.weight": ("hidden", "query"),
    "q_norm.weight": (None,),
    "k_norm.weight": (None,),
    "gate_proj.weight": ("inner", "hidden"),
    "up_proj.weight": ("inner", "hidden"),
    "down_proj.weight": ("hidden", "inner"),
}
AXES |= {name.replace("weight", "bias"): axes[:1] for name, axes in AXES.items() if name.endswith("proj.weight")}


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
        sizes: the fields of `ModelShape`. None takes the target's (a quarter of its layers), unless `max_parameters` decides.

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
        if target.model.config is not target.config:
            got = f"{init} of {target.name}, a {type(target.model).__name__}, which is more than a language model"
            raise UserError("draft.init", got=got, expected="a trained smaller model")
        draft = _from_target(target, init, given, max_parameters, calibration, seed)
    _check_size(draft, target, max_parameters, allow_larger)
    return draft


def with_lora(
    draft: PreTrainedModel, *, rank: int, alpha: int = 16, dropout: float = 0.0, target_modules: list[str] | None = None
) -> PreTrainedModel | peft.PeftModel:
    """Freeze the draft and give its linear layers updates B A x * alpha / rank, zero at first; rank 0 gives the draft as it is.

    Raises UserError when `target_modules` are no linear layers of the draft, and for a rank beyond that of its matrices.
    """
    if rank == 0:
        return draft
    if rank > (most := draft.config.get_text_config().hidden_size):
        raise UserError("draft.lora.rank", got=rank, expected=f"at most {most}, the rank of the draft's own matrices")
    modules: str | list[str] = "all-linear" if target_modules is None else target_modules
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=modules, task_type="CAUSAL_LM")
    expected = "ends of names of the draft's linear layers, such as q_proj"
    with refusing(ValueError, "draft.lora.target_modules", target_modules, expected):
        return peft.get_peft_model(draft, config)


def propose_shape(target: PreTrainedModel, max_parameters: int) -> ModelShape:
    """The widest shape of which SHALLOWEST layers fit the budget, then as many layers as fit, up to the target's.

    Widths are sixteenths of the target's, in multiples of 8, with as many query heads to a key/value head. Raises UserError when not even
    the narrowest fits.
    """
    shallowest = _shallowest(target)
    heads_per_group = shallowest.num_attention_heads // shallowest.num_key_value_heads
    for sixteenths in range(16, 0, -1):
        groups = max(1, round(shallowest.num_key_value_heads * sixteenths / 16))
        shape = replace(
            shallowest,
            hidden_size=max(8, shallowest.hidden_size * sixteenths // 16 // 8 * 8),
            intermediate_size=max(8, shallowest.intermediate_size * sixteenths // 16 // 8 * 8),
            num_key_value_heads=groups,
            num_attention_heads=groups * heads_per_group,
        )
        smallest = _count_parameters(target, shape)
        if smallest <= max_parameters:
            return _deepened(target, shape, max_parameters)
    raise UserError("draft.max_parameters", got=f"{max_parameters:,}", expected=f"at least {smallest:,}")


def step_ratio(target: PreTrainedModel, draft: PreTrainedModel) -> float:
    """c, a draft step over a target step at batch 1: the larger of the shares of weights read and of layers (see the module)."""
    weights = weights_read(draft) / weights_read(target)
    layers: float = draft.config.get_text_config().num_hidden_layers / target.config.get_text_config().num_hidden_layers
    return max(weights, layers)


def on_meta(config: Any, shape: ModelShape) -> PreTrainedModel:
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
        return resized(target.model, shape, seed=seed)
    if calibration is None or calibration.numel() == 0:
        raise UserError("draft.init", got="width without calibration rows", expected="training rows to measure activations on")
    if target.one_batch:
        got = "width with target.shard=tensor, whose processes see a part of each activation"
        raise UserError("draft.init", got=got, expected="width with target.shard=layers, or another initialization")
    return from_width(target.model, calibration, shape)


def _shallowest(target: PreTrainedModel) -> ModelShape:
    """The target's shape with the fewest layers that a draft is given unasked."""
    whole = shape_of(target.config)
    return replace(whole, num_layers=min(SHALLOWEST, whole.num_layers))


def _deepened(target: PreTrainedModel, shape: ModelShape, max_parameters: int) -> ModelShape:
    """A shape with as many layers as fit the budget, none fewer than it has and none more than the target has."""
    smallest = _count_parameters(target, shape)
    per_layer = _count_parameters(target, replace(shape, num_layers=shape.num_layers + 1)) - smallest
    num_layers = shape.num_layers + max(0, max_parameters - smallest) // per_layer
    return replace(shape, num_layers=min(num_layers, shape_of(target.config).num_layers))


def _check_size(draft: PreTrainedModel, target: FrozenTarget, max_parameters: int | None, allow_larger: bool) -> None:
    """Say what a step is expected to cost; refuse a draft over the budget, or larger than the target."""
    parameters, ratio, text = draft.num_parameters(), step_ratio(target.model, draft), draft.config.get_text_config()
    logger.info(
        f"draft: {parameters:,} parameters, {text.num_hidden_layers} layers of {text.hidden_size}; "
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


def _count_parameters(target: PreTrainedModel, shape: ModelShape) -> int:
    return int(on_meta(target.config, shape).num_parameters())


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
    target: PreTrainedModel, shape: ModelShape, weights: dict[str, Tensor] | None = None, *, seed: int = 0
) -> PreTrainedModel:
    """A model of the target's class in another shape, with these weights (all of them, and no other) or fresh ones. float32.

    Raises UserError for sizes that do not fit each other.
    """
    if shape.num_attention_heads % shape.num_key_value_heads:
        got = f"{shape.num_key_value_heads} for {shape.num_attention_heads} attention heads"
        raise UserError("draft.num_key_value_heads", got=got, expected="a divisor of the attention heads")
    config = reshaped(target.config, shape)
    try:
        config.validate()
    except StrictDataclassError as error:
        raise UserError("draft", got=f"sizes of which {error.__cause__}", expected="sizes that fit each other") from error
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = type(target)(config)
    if weights is not None:
        model.load_state_dict(weights)
        model.generation_config = copy.deepcopy(target.generation_config)
    draft: PreTrainedModel = model.to(device=target.device, dtype=torch.float32).eval()
    return draft


def from_layers(target: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """A copy of `num_layers` of the target's layers, evenly spaced with both ends, between its embedding and its head. float32.

    With all of them it is the target. Raises UserError for more layers than the target has.
    """
    check_decoder(target)
    whole = shape_of(target.config)
    shape = replace(whole, num_layers=num_layers)
    _check_narrower(shape, whole)
    return resized(target, shape, _layers_of(target, evenly_spaced(whole.num_layers, num_layers)))


def from_width(target: PreTrainedModel, calibration_ids_RT: Tensor, shape: ModelShape) -> PreTrainedModel:
    """The target cut to `shape` by activation norms over the calibration rows (see the module). float32; with nothing cut, the target.

    Raises UserError for a size above the target's, another head_dim, or heads that cannot be shared out evenly.
    """
    check_decoder(target)
    whole = shape_of(target.config)
    _check_narrower(shape, whole)
    kept = evenly_spaced(whole.num_layers, shape.num_layers)
    norms = activation_norms(target, calibration_ids_RT, kept)
    hidden = _largest(norms.hidden_H, shape.hidden_size)
    weights = {}
    for name, tensor in _layers_of(target, kept).items():
        layer = int(name.split("layers.")[1].split(".")[0]) if "layers." in name else -1
        for dimension, axis in enumerate(AXES[_suffix(name)]):
            if axis is not None:
                entries = hidden if axis == "hidden" else norms.kept_entries(axis, layer, shape, whole)
                tensor = tensor.index_select(dimension, entries)
        weights[name] = tensor
    return resized(target, shape, weights)


@dataclass(frozen=True)
class ActivationNorms:
    """Squared L2 norms over the calibration tokens: hidden_H [H]; for each kept layer inner_LI [L, I] and heads_LN [L, N]."""

    hidden_H: Tensor
    inner_LI: Tensor
    heads_LN: Tensor

    def kept_entries(self, axis: str, layer: int, shape: ModelShape, whole: ModelShape) -> Tensor:
        """Which entries of a layer's `inner`, `query` or `key` axis stay, in order."""
        if axis == "inner":
            return _largest(self.inner_LI[layer], shape.intermediate_size)
        heads_GN = self.heads_LN[layer].view(whole.num_key_value_heads, -1)
        groups = _largest(heads_GN.sum(1), shape.num_key_value_heads)
        if axis == "key":
            return _entries(groups, whole.head_dim)
        share = shape.num_attention_heads // shape.num_key_value_heads
        heads = [int(group) * heads_GN.shape[1] + _largest(heads_GN[group], share) for group in groups]
        return _entries(torch.cat(heads), whole.head_dim)


@torch.no_grad()
def activation_norms(target: PreTrainedModel, ids_RT: Tensor, layers: list[int]) -> ActivationNorms:
    """Run the calibration rows through the target and add up the squares of what its layers hand on. float32."""
    decoder: Any = target.get_decoder()
    shape = shape_of(target.config)
    device = target.device
    hidden_H = torch.zeros(shape.hidden_size, device=device)
    inner_LI = torch.zeros(len(layers), shape.intermediate_size, device=device)
    heads_LN = torch.zeros(len(layers), shape.num_attention_heads, device=device)

    def add(total: Tensor, width: int, _module: nn.Module, args: tuple[Tensor, ...], output: Tensor | None = None) -> None:
        x = args[0] if output is None else output
        total.add_(x.float().square().flatten(0, -2).sum(0).view(-1, width).sum(1))

    add_hidden = partial(add, hidden_H, 1)
    handles = [decoder.norm.register_forward_hook(add_hidden)]
    for row, index in enumerate(layers):
        layer = decoder.layers[index]
        handles += [norm.register_forward_hook(add_hidden) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        handles.append(layer.mlp.down_proj.register_forward_pre_hook(partial(add, inner_LI[row], 1)))
        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(partial(add, heads_LN[row], shape.head_dim)))
    try:
        for ids_T in ids_RT:
            decoder(input_ids=ids_T[None].to(device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return ActivationNorms(hidden_H, inner_LI, heads_LN)


def check_decoder(target: PreTrainedModel) -> None:
    """Raises UserError when the target holds a parameter whose axes are not known: it is then no decoder like Llama's."""
    unknown = sorted({_suffix(name) for name, _ in target.named_parameters()} - AXES.keys())
    if unknown:
        got = f"a {target.config.model_type} target with {', '.join(unknown[:3])}"
        raise UserError("draft.init", got=got, expected="a decoder built like Llama's or Qwen's, or a trained smaller model")


def _suffix(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _layers_of(target: PreTrainedModel, kept: list[int]) -> dict[str, Tensor]:
    """The target's tensors with just the kept layers, renumbered; whole ones, also of a target that processes share."""
    number = {str(old): str(new) for new, old in enumerate(kept)}
    weights = {}
    for name, tensor in target.state_dict().items():
        before, found, after = name.partition("layers.")
        old, _, rest = after.partition(".")
        if not found:
            weights[name] = whole(tensor)
        elif old in number:
            weights[f"{before}layers.{number[old]}.{rest}"] = whole(tensor)
    return weights


def _check_narrower(shape: ModelShape, whole: ModelShape) -> None:
    """Every size at most the target's, heads shared out evenly, head_dim the target's."""
    for name, size in vars(shape).items():
        if not 1 <= size <= getattr(whole, name):
            raise UserError(f"draft.{name}", got=size, expected=f"1 to {getattr(whole, name)}, the target's")
    if shape.head_dim != whole.head_dim:
        raise UserError("draft.head_dim", got=shape.head_dim, expected=f"{whole.head_dim}, the target's: heads go whole or not")
    most = whole.num_attention_heads // whole.num_key_value_heads
    share, left = divmod(shape.num_attention_heads, shape.num_key_value_heads)
    if left or not 1 <= share <= most:
        got = f"{shape.num_attention_heads} for {shape.num_key_value_heads} key/value heads"
        raise UserError("draft.num_attention_heads", got=got, expected=f"1 to {most} for each key/value head, the same for all")


def _largest(norms: Tensor, keep: int) -> Tensor:
    """Indices of the `keep` largest, in ascending order."""
    return norms.topk(keep).indices.sort().values


def _entries(heads: Tensor, head_dim: int) -> Tensor:
    """The entries of whole heads."""
    return (heads[:, None] * head_dim + torch.arange(head_dim, device=heads.device)).flatten()
