"""Find the decoder layers, the final norm and the head of any causal language model.

Each class of transformers has its own names and its own arithmetic. Some scale or cap the output of
their head (Gemma's soft cap, Cohere's logit_scale, Granite's logits_scaling), some scale the hidden
states before it. One pass of the model's own forward shows both, because in this pass known numbers
replace the output of the head. Passes over a KV cache then show whether the model continues a
sequence, as decoding needs.

Shapes: T positions, D hidden size, V vocabulary.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from specdistill.common.errors import convert_errors
from specdistill.targets.cache import create_empty_cache, is_recurrent

# Errors of model classes for sizes, inputs or devices that they do not support. Each class raises
# its own kind, and their code is not ours.
CLASS_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
# Tokens of the sequence that `examine_model` runs, tokens of its prompt, and tokens that it crops
# from the KV cache as a round would crop rejected ones.
NUM_TOKENS = 12
NUM_CACHED = 6
NUM_REJECTED = 3
# The relative rounding error of float32 arithmetic, with a margin.
ROUNDING = 1e-5


def find_auto_class(
    config: PreTrainedConfig,
) -> Any:
    """Return the auto class of transformers that loads a model of this config.

    This is AutoModelForCausalLM, unless only AutoModelForImageTextToText knows the class of the
    config. A model of text and images is only given text, so its image encoder never runs.
    """
    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def reads_images(config: PreTrainedConfig) -> bool:
    """Return whether only AutoModelForImageTextToText, not AutoModelForCausalLM, loads a config."""
    return (
        type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    )


@dataclass(frozen=True)
class LogitsHead:
    """The head of a model, which computes logits as the model's own forward does.

    From hidden states h after the final norm it computes cap · tanh(scale · linear(h) / cap), or
    scale · linear(h) without a cap.

    Attributes:
        linear: the linear layer.
        scale: factor of the linear layer's output.
        cap: bound of the soft cap; None without one.
        float32: whether everything after the linear layer is computed in float32.
    """

    linear: Any
    scale: float = 1.0
    cap: float | None = None
    float32: bool = False

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] from hidden states [..., D] after the final norm."""
        # The rows are flattened to two dimensions, because torch would multiply a three-dimensional
        # view with gaps, such as the last position of each prompt, by a copy of the weight for each
        # row.
        rows = hidden.reshape(-1, hidden.shape[-1])
        raw = self.linear(rows.to(self.linear.weight.device)).to(hidden.device)
        return self.finish(raw.view(*hidden.shape[:-1], raw.shape[-1]))

    def finish(self, raw: Tensor) -> Tensor:
        """Compute logits from the linear layer's output: scale it, and cap it softly.

        The result is cap · tanh(scale · raw / cap), or scale · raw without a cap.
        """
        # float64 is kept: `_find_parts` uses it to examine the arithmetic of a class.
        logits = raw.float() if self.float32 and raw.dtype != torch.float64 else raw
        logits = logits if self.scale == 1 else logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


@dataclass(frozen=True)
class Anatomy:
    """The parts of a causal language model.

    Attributes:
        backbone: the module that computes hidden states after the final norm from token ids.
        layers: its decoder layers, in order.
        norm: the final norm; None if there is none.
        head: the head that computes logits.
    """

    backbone: Any
    layers: nn.ModuleList
    norm: Any
    head: LogitsHead


@torch.no_grad()
def examine_model(model: PreTrainedModel, name: str, *, key: str = "target.model") -> Anatomy:
    """Find the layers, the final norm and the head of a model, and check that they can be used.

    Args:
        model: a model with weights.
        name: the name of the model in errors.
        key: the recipe key to name in errors.

    Raises:
        UserError: if the model computes logits by an unknown formula, or if a pass over a KV cache
            gives other hidden states than one pass over the whole sequence. The error names the
            model's class and the reason.
    """
    training = model.training
    try:
        model.eval()  # Dropout would change the hidden states from pass to pass.
        with convert_errors(
            CLASS_ERRORS,
            key,
            f"{name}, a {type(model).__name__}",
            "a causal language model that continues a sequence from its KV cache",
        ):
            # Take tokens from the middle of the vocabulary, away from special tokens at its ends.
            linear = model.get_output_embeddings()
            config = model.config.get_text_config(decoder=True)
            backbone = find_backbone(model)
            vocab_size = linear.weight.shape[0]
            first_id = vocab_size // 2
            ids_T = torch.arange(first_id, first_id + NUM_TOKENS, device=model.device) % vocab_size
            ids_1T = ids_T.unsqueeze(0)

            # Find the parts by one pass, and check further passes over a KV cache.
            anatomy, hidden_1TD = _find_parts(model, backbone, linear, ids_1T)
            _check_continues(backbone, config, ids_1T, hidden_1TD)
            return anatomy
    finally:
        model.train(training)


def reads_alike(together_TD: Tensor, alone_TD: Tensor) -> bool:
    """Return whether two tensors of hidden states [..., T, D] are equal up to rounding.

    The tolerance for the relative difference is the square root of the dtype's rounding error,
    because rounding adds up over layers.

    Args:
        together_TD: hidden states that were computed in one way, such as several documents at once.
        alone_TD: hidden states of the same tokens that were computed in another way.
    """
    difference = (together_TD - alone_TD).norm() / alone_TD.norm()
    return bool(difference < torch.finfo(alone_TD.dtype).eps ** 0.5)


def find_backbone(model: PreTrainedModel) -> nn.Module:
    """Return the module of a model that computes hidden states (after the final norm) from ids.

    This is the module that the class returns from `get_decoder`. If that is the model itself or
    holds no layers, the backbone is the model's first child with a list of as many layers as the
    model has.

    Raises:
        LookupError: if no module has such a list.
    """
    # The model itself, which some classes return from `get_decoder`, is more than the backbone.
    for part in (model.get_decoder(), *model.children()):
        if part is not model and find_layer_lists(model, part):
            module: nn.Module = part
            return module
    raise LookupError("it holds no list of its layers")


def find_layer_lists(model: PreTrainedModel, part: nn.Module) -> list[nn.ModuleList]:
    """Return the module lists in a part that have as many entries as the model has layers.

    Lists within another such list are left out: a layer may hold a list of, say, experts that is as
    long by chance.
    """
    # Find the lists with as many entries as the model has layers.
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [
        module
        for module in part.modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]

    # Leave out lists that are inside another one.
    inner_modules = set()
    for layer_list in lists:
        for module in layer_list.modules():
            if module is not layer_list:
                inner_modules.add(module)
    return [layer_list for layer_list in lists if layer_list not in inner_modules]


def _find_parts(
    model: PreTrainedModel, backbone: nn.Module, linear: nn.Module, ids_1T: Tensor
) -> tuple[Anatomy, Tensor]:
    """Find the parts of a model by one pass of its own forward.

    In that pass, hooks record the outputs of the model's parts. One hook replaces the output of the
    head's linear layer by known numbers. The logits then show how the class scales and caps them.

    Args:
        model: the model.
        backbone: the module of the model that computes hidden states.
        linear: the linear layer of the head.
        ids_1T: the token ids that the pass reads.

    Returns:
        The parts, and the hidden states [1, T, D] of the backbone in that pass.

    Raises:
        LookupError: for logits that follow another formula than that of `LogitsHead`.
    """
    lists = find_layer_lists(model, backbone)

    # Record, in one pass, the outputs of the backbone's parts and of the first module of each list.
    outputs: dict[nn.Module, object] = {}
    hidden: list[Tensor] = []  # last hidden states of the backbone
    head_inputs: list[Tensor] = []
    head_outputs: list[Tensor] = []

    def replace_output(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Record the LM head's input, and return powers of two in place of its output.

        The model class may scale or cap what its head returns. With known powers of two as the
        head's output, the logits show what the class did to them.
        """
        head_inputs.append(args[0])
        head_outputs.append(_build_powers_of_two(output))
        return head_outputs[0]

    def record_output(part: nn.Module, _args: object, output: object) -> None:
        """Record the output of a part of the backbone."""
        outputs[part] = output

    with ExitStack() as hooks:
        for part in {*backbone.children(), *(layers[0] for layers in lists)}:
            hooks.enter_context(part.register_forward_hook(record_output))
        hooks.enter_context(
            backbone.register_forward_hook(
                lambda _module, _args, output: hidden.append(output.last_hidden_state)
            )
        )
        hooks.enter_context(linear.register_forward_hook(replace_output))
        logits = model(input_ids=ids_1T, use_cache=False).logits
    if not len(hidden) == len(head_inputs) == 1:
        raise LookupError("its head is not given its decoder's hidden states")

    # Compare the hidden states with the input of the head, and the known numbers with the logits.
    # A factor before the head becomes part of the head's scale. With a bias it cannot, because the
    # bias is added after the factor and before the scale.
    hidden_factor = _find_factor(hidden[0], head_inputs[0])
    scale_and_cap = _scale_and_cap(head_outputs[0], logits)
    has_bias = getattr(linear, "bias", None) is not None
    if hidden_factor is None or scale_and_cap is None or (hidden_factor != 1 and has_bias):
        raise LookupError("its logits are not its head's output, scaled or capped")

    # Take the list of layers that ran; a list that did not run may belong to an image encoder. The
    # final norm is the part whose output is the backbone's output.
    layers = next(layers for layers in lists if layers[0] in outputs)
    norm = next((part for part in backbone.children() if outputs.get(part) is hidden[0]), None)
    scale, cap = scale_and_cap
    head = LogitsHead(linear, hidden_factor * scale, cap, logits.dtype == torch.float32)
    return Anatomy(backbone, layers, norm, head), hidden[0]


def _find_factor(x: Tensor, y: Tensor) -> float | None:
    """Return the factor c with which y = c · x; None if y is not proportional to x.

    The factor is fitted by least squares, because 16-bit dtypes round each number. A factor that
    differs from 1 only by rounding is returned as 1.
    """
    if x.shape != y.shape:
        return None
    # The error of the fit may be as large as the rounding of the tensors' own dtype.
    rounding = torch.finfo(x.dtype).eps
    x = x.double()
    y = y.double()
    factor = float((x * y).sum() / x.square().sum())
    return _snap_to_one(factor) if (y - factor * x).norm() <= rounding * y.norm() else None


def _scale_and_cap(x: Tensor, y: Tensor) -> tuple[float, float | None] | None:
    """Find the scale and the cap in a model's formula for logits, cap · tanh(scale · x / cap).

    In this formula, x is the output of the head's linear layer. A model without a cap computes
    scale · x.

    Args:
        x: known numbers in place of that output, from `_build_powers_of_two`.
        y: the logits that the model computed from x.

    Returns:
        The scale and the cap; the cap is None if y = scale · x. Instead of this pair, None is
        returned if the model computes any other function of x.
    """
    if x.shape != y.shape:
        return None
    x = x.flatten()
    y = y.flatten().double()
    # x[0] = 2^-12 is so small that a cap does not change its logit. So y[0] = scale · x[0].
    scale = _snap_to_one(float(y[0] / x[0]))
    # The largest numbers are so large that their logits are equal to the cap, if there is one.
    largest_logit = float(y.abs().max())
    for cap in (None, largest_logit):
        # `finish` computes the formula. It does not use the linear layer, so this is None here.
        if torch.allclose(y, LogitsHead(None, scale, cap).finish(x), rtol=ROUNDING, atol=0):
            return scale, cap
    return None


def _snap_to_one(factor: float) -> float:
    """Return a factor as it is, or exactly 1 if it differs from 1 only by rounding."""
    return 1.0 if abs(factor - 1) < ROUNDING else factor


def _build_powers_of_two(like: Tensor) -> Tensor:
    """Return numbers from 2^-12 to 2^24 of both signs, in the shape of a tensor.

    In place of a head's output, the small numbers show the factor by which a class scales its
    logits, and the large ones show its cap. They are float64, so that rounding does not hide the
    exact arithmetic of the class.
    """
    # The exponent goes from -12 to 24 again and again, and the sign alternates.
    index = torch.arange(like.numel(), device=like.device, dtype=torch.float64)
    return (2 ** (index % 37 - 12) * (1 - index % 2 * 2)).view(like.shape)


def _check_continues(
    backbone: nn.Module, text_config: PreTrainedConfig, ids_1T: Tensor, hidden_1TD: Tensor
) -> None:
    """Check that several passes over a KV cache give the same hidden states as one pass.

    After each pass, further tokens are read and then cropped from the cache, as decoding drops
    rejected tokens. A recurrent model cannot drop tokens, so it is checked without them.

    Args:
        backbone: the module of the model that computes hidden states.
        text_config: the config of the language model.
        ids_1T: the token ids that are read.
        hidden_1TD: their hidden states in one pass.

    Raises:
        LookupError: if the hidden states differ.
    """
    # Read a prompt, then one token, then the tokens of a round, as decoding does.
    cache = create_empty_cache(text_config)
    parts = []
    num_read = 0
    for end in (NUM_CACHED, NUM_CACHED + 1, NUM_TOKENS):
        output = backbone(input_ids=ids_1T[:, num_read:end], past_key_values=cache, use_cache=True)
        parts.append(output.last_hidden_state)
        # Read tokens that are rejected, and drop them. They must leave no trace.
        if not is_recurrent(text_config):
            backbone(input_ids=ids_1T[:, :NUM_REJECTED], past_key_values=cache, use_cache=True)
            cache.crop(-NUM_REJECTED)
        num_read = end
    if not reads_alike(torch.cat(parts, dim=1)[0], hidden_1TD[0]):
        raise LookupError("passes over a KV cache give other hidden states than one pass")
