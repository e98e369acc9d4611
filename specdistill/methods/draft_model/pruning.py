"""A smaller model out of a larger one's weights: some of its layers, or all of its axes cut to their most used parts.

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

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdistill.errors import UserError
from specdistill.methods.sizes import Shape, shape_of

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


def evenly_spaced(num_layers: int, keep: int) -> list[int]:
    """`keep` indices in 0..num_layers - 1 at even distances, both ends among them; one index is the first."""
    return [round(index * (num_layers - 1) / max(keep - 1, 1)) for index in range(keep)]


def reshaped(config: Any, shape: Shape) -> Any:
    """A copy of a config with other sizes. Where layers differ in kind, each keeps the kind found at its relative depth."""
    config = copy.deepcopy(config)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = [kinds[index] for index in evenly_spaced(len(kinds), shape.num_layers)]
    sizes = dict(vars(shape))
    config.update({"num_hidden_layers": sizes.pop("num_layers"), **sizes})
    return config


def resized(
    target: PreTrainedModel, shape: Shape, weights: dict[str, Tensor] | None = None, *, seed: int = 0
) -> PreTrainedModel:
    """A model of the target's class in another shape, with these weights (all of them, and no other) or fresh ones. float32."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = type(target)(reshaped(target.config, shape))
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
    shape = shape_of(target.config)
    kept = _kept_layers(shape, num_layers)
    return resized(target, replace(shape, num_layers=num_layers), _layers_of(target, kept))


def from_width(target: PreTrainedModel, calibration_ids_RT: Tensor, shape: Shape) -> PreTrainedModel:
    """The target cut to `shape` by activation norms over the calibration rows (see the module). float32; with nothing cut, the target.

    Raises UserError for a size above the target's, another head_dim, or heads that cannot be shared out evenly.
    """
    check_decoder(target)
    whole = shape_of(target.config)
    _check_narrower(shape, whole)
    kept = _kept_layers(whole, shape.num_layers)
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

    def kept_entries(self, axis: str, layer: int, shape: Shape, whole: Shape) -> Tensor:
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
    if unknown or not hasattr(target.get_decoder(), "layers"):
        got = f"a {target.config.model_type} target with {', '.join(unknown[:3]) or 'no layers'}"
        raise UserError("draft.init", got=got, expected="a decoder built like Llama's or Qwen's, or a trained smaller model")


def _suffix(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _kept_layers(whole: Shape, num_layers: int) -> list[int]:
    if not 1 <= num_layers <= whole.num_layers:
        raise UserError("draft.num_layers", got=num_layers, expected=f"1 to {whole.num_layers}, as many as the target has")
    return evenly_spaced(whole.num_layers, num_layers)


def _layers_of(target: PreTrainedModel, kept: list[int]) -> dict[str, Tensor]:
    """The target's tensors with just the kept layers, numbered anew."""
    number = {str(old): str(new) for new, old in enumerate(kept)}
    weights = {}
    for name, tensor in target.state_dict().items():
        before, found, after = name.partition("layers.")
        old, _, rest = after.partition(".")
        if not found:
            weights[name] = tensor
        elif old in number:
            weights[f"{before}layers.{number[old]}.{rest}"] = tensor
    return weights


def _check_narrower(shape: Shape, whole: Shape) -> None:
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
