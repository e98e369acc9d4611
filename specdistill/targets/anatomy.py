"""What a causal language model of transformers is made of, found by how it computes: each class has its own names and its own arithmetic.

Some classes scale or cap the output of their head (Gemma's soft cap, Cohere's logit_scale, Granite's logits_scaling), some scale the
hidden states before it. One pass of the model's own forward, in which the head gives known numbers, shows what it does with either. Passes
over a KV cache then show whether the model continues a sequence, as decoding needs.

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
)

from specdistill.errors import refusing
from specdistill.targets.cache import is_recurrent, new_cache

# What model classes raise for sizes, inputs or devices that they do not take: each has its own way, and their code is not ours.
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
NUM_TOKENS, NUM_CACHED, NUM_REJECTED = 12, 6, 3
ROUNDING = 1e-5  # of float32 arithmetic


def auto_class(config: Any) -> Any:
    """AutoModelForCausalLM; of a class for text and images that it does not know, the one that does. Text alone never reaches the encoder
    of the images.
    """
    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def reads_images(config: Any) -> bool:
    """Whether a config is of a class for text and images that is no causal language model's as well."""
    return (
        type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    )


@dataclass(frozen=True)
class LogitsHead:
    """From hidden states after the final norm to logits, as the model's own forward computes them.

    cap · tanh(scale · linear(h) / cap), or scale · linear(h) without a cap. `float32`: what follows the linear layer is computed in it.
    """

    linear: Any
    scale: float = 1.0
    cap: float | None = None
    float32: bool = False

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.finish(self.linear(hidden.to(self.linear.weight.device)).to(hidden.device))

    def finish(self, raw: Tensor) -> Tensor:
        """Logits from the linear layer's output, each number for itself."""
        logits = raw.float() if self.float32 and raw.dtype != torch.float64 else raw
        logits = logits if self.scale == 1 else logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


@dataclass(frozen=True)
class Anatomy:
    """backbone: token ids -> hidden states after the final norm. layers: its decoder layers in order. norm: the final one, or None."""

    backbone: Any
    layers: nn.ModuleList
    norm: Any
    head: LogitsHead


@torch.no_grad()
def examine(model: Any, name: str, *, key: str = "target.model") -> Anatomy:
    """The parts of a model. Raises UserError, naming its class and why, when its logits or its cache follow no rule that is known here."""
    training = model.training
    try:
        model.eval()  # no dropout
        with refusing(
            CLASS_ERRORS,
            key,
            f"{name}, a {type(model).__name__}",
            "a causal language model that continues its KV cache",
        ):
            linear, config = (
                model.get_output_embeddings(),
                model.config.get_text_config(decoder=True),
            )
            backbone = backbone_of(model)
            size = linear.weight.shape[0]
            ids_1T = (
                torch.arange(size // 2, size // 2 + NUM_TOKENS, device=model.device).unsqueeze(0)
                % size
            )  # no special tokens
            anatomy, hidden_1TD = _parts(model, backbone, linear, ids_1T)
            _check_continues(backbone, config, ids_1T, hidden_1TD)
            return anatomy
    finally:
        model.train(training)


def reads_alike(together_TD: Tensor, alone_TD: Tensor) -> bool:
    """Whether hidden states are the same up to rounding."""
    return bool(
        (together_TD - alone_TD).norm() / alone_TD.norm() < torch.finfo(alone_TD.dtype).eps ** 0.5
    )


def backbone_of(model: Any) -> Any:
    """Token ids -> hidden states after the final norm: what the class calls its decoder, or else its first part with as many layers.

    Raises LookupError when there is none.
    """
    for part in (model.get_decoder(), *model.children()):
        if part is not model and layer_lists(model, part):
            return part
    raise LookupError("it holds no list of its layers")


def layer_lists(model: Any, part: nn.Module) -> list[nn.ModuleList]:
    """A part's lists that are as long as the model has layers, none within another."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [
        module
        for module in part.modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    inner = {module for each in lists for module in each.modules() if module is not each}
    return [each for each in lists if each not in inner]


def _parts(
    model: Any, backbone: nn.Module, linear: nn.Module, ids_1T: Tensor
) -> tuple[Anatomy, Tensor]:
    """(the model's parts, hidden states [1, T, D] of its own forward, in which its head is given another output).

    Raises LookupError for logits of another formula than a `LogitsHead`'s.
    """
    lists = layer_lists(model, backbone)
    outputs: dict[
        nn.Module, Any
    ] = {}  # of the backbone's parts, and of the first module of each list
    hidden: list[Tensor] = []
    given: list[Tensor] = []  # to the head
    raw: list[Tensor] = []  # by the head

    def replace(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        given.append(args[0])
        raw.append(_powers_of_two(output))
        return raw[0]

    def keep(part: nn.Module, _args: Any, output: Any) -> None:
        outputs[part] = output

    with ExitStack() as hooks:
        for part in {*backbone.children(), *(layers[0] for layers in lists)}:
            hooks.enter_context(part.register_forward_hook(keep))
        hooks.enter_context(
            backbone.register_forward_hook(
                lambda _module, _args, output: hidden.append(output.last_hidden_state)
            )
        )
        hooks.enter_context(linear.register_forward_hook(replace))
        logits = model(input_ids=ids_1T, use_cache=False).logits
    if not len(hidden) == len(given) == 1:
        raise LookupError("its head is not given its decoder's hidden states")
    before, after = _factor(hidden[0], given[0]), _scale_and_cap(raw[0], logits)
    if (
        before is None
        or after is None
        or (before != 1 and getattr(linear, "bias", None) is not None)
    ):
        raise LookupError("its logits are not its head's output, scaled or capped")
    head = LogitsHead(linear, before * after[0], after[1], logits.dtype == torch.float32)
    layers = next(
        layers for layers in lists if layers[0] in outputs
    )  # others may be those of an image encoder
    norm = next((part for part in backbone.children() if outputs.get(part) is hidden[0]), None)
    return Anatomy(backbone, layers, norm, head), hidden[0]


def _factor(x: Tensor, y: Tensor) -> float | None:
    """c of y = c · x, by least squares, since 16 bits round each number; None if there is none."""
    if x.shape != y.shape:
        return None
    x, y, rounding = x.double(), y.double(), torch.finfo(x.dtype).eps
    factor = float((x * y).sum() / x.square().sum())
    return _exact(factor) if (y - factor * x).norm() <= rounding * y.norm() else None


def _scale_and_cap(x: Tensor, y: Tensor) -> tuple[float, float | None] | None:
    """(scale, cap) of y = cap · tanh(scale · x / cap), the cap None where y = scale · x; None for another function."""
    if x.shape != y.shape:
        return None
    x, y = x.flatten(), y.flatten().double()
    scale, most = (
        _exact(float(y[0] / x[0])),
        float(y.abs().max()),
    )  # x[0] is so small that a cap does not show
    for cap in (None, most):
        if torch.allclose(y, LogitsHead(None, scale, cap).finish(x), rtol=ROUNDING, atol=0):
            return scale, cap
    return None


def _exact(factor: float) -> float:
    return 1.0 if abs(factor - 1) < ROUNDING else factor


def _powers_of_two(like: Tensor) -> Tensor:
    """Numbers from 2^-12 to 2^24 of both signs; float64, to see the exact arithmetic of a class."""
    index = torch.arange(like.numel(), device=like.device, dtype=torch.float64)
    return (2 ** (index % 37 - 12) * (1 - index % 2 * 2)).view(like.shape)


def _check_continues(backbone: Any, text_config: Any, ids_1T: Tensor, hidden_1TD: Tensor) -> None:
    """Raises LookupError unless passes over a KV cache, with tokens taken back where it can, give the hidden states of one pass."""
    cache, parts = new_cache(text_config), []
    fed = 0
    for end in (NUM_CACHED, NUM_CACHED + 1, NUM_TOKENS):  # a prompt, a token, a round's tokens
        parts.append(
            backbone(
                input_ids=ids_1T[:, fed:end], past_key_values=cache, use_cache=True
            ).last_hidden_state
        )
        if not is_recurrent(text_config):
            backbone(input_ids=ids_1T[:, :NUM_REJECTED], past_key_values=cache, use_cache=True)
            cache.crop(-NUM_REJECTED)
        fed = end
    if not reads_alike(torch.cat(parts, dim=1)[0], hidden_1TD[0]):
        raise LookupError("passes over a KV cache give other hidden states than one pass")
