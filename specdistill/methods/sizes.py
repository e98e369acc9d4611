"""Sizes of decoders and of drafts, in parameters: what a checkpoint holds, and what one pass reads.

Symbols: H hidden size, I MLP width, N query heads, G key/value heads, d head size.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder. head_dim times num_attention_heads need not be hidden_size."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


def shape_of(config: Any) -> Shape:
    """The sizes in a Hugging Face config of a Llama-like decoder."""
    return Shape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    )


@dataclass(frozen=True)
class Parts:
    """A draft in parameters.

    parameters: in its checkpoint. read: by a step of one token, with what it borrows of the target, without look-up tables.
    copied: tables of the target that training holds beside it, frozen.
    """

    parameters: int
    read: float
    num_layers: int
    copied: int = 0


def weights_read(model: PreTrainedModel, num_tokens: int = 1) -> float:
    """Parameters that one pass over `num_tokens` tokens reads: all but an embedding table that is not the head."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    looked_up = 0 if head.weight is embedding.weight else embedding.weight.numel()
    return parameters_read(model, model.config.get_text_config(), num_tokens) - float(looked_up)


def parameters_read(module: nn.Module, config: Any, num_tokens: int = 1) -> float:
    """A module's parameters, of a mixture's E experts those that the tokens are sent to.

    With k experts for each of n tokens, chosen independently, a share of 1 - (1 - k/E)^n of them; k/E for one token.
    """
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    num_experts = next((size for name in names if (size := getattr(config, name, None))), 1)
    chosen = getattr(config, "num_experts_per_tok", None) or num_experts
    share = 1 - (1 - chosen / num_experts) ** num_tokens
    sizes = (("experts" in name.split("."), parameter.numel()) for name, parameter in module.named_parameters())
    return sum(size * share if of_expert else size for of_expert, size in sizes)


def layer_parameters(shape: Shape, input_size: int) -> int:
    """One Llama layer whose q, k and v read `input_size`: (N + 2G) d inputs, N d H and 3 H I weights, two norms of H."""
    heads = (shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim * input_size
    output = shape.num_attention_heads * shape.head_dim * shape.hidden_size
    return heads + output + 3 * shape.hidden_size * shape.intermediate_size + 2 * shape.hidden_size
