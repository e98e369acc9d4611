"""The parts of drafts that read features: Llama's layers, with the attention left to the caller.

Shapes: B batch, T positions, I input size, H hidden size, N query heads, G key/value heads, d head
size.

A `KVCache` holds keys and values and answers queries. So decoding with a cache and the unrolled
training-time test run the same layers.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from specdistill.common.errors import UserError
from specdistill.methods.sizes import ModelShape
from specdistill.targets.anatomy import LogitsHead
from specdistill.targets.frozen import FrozenTarget

DraftT = TypeVar("DraftT", bound=nn.Module)  # any neural draft, whatever it reads


@dataclass(frozen=True, kw_only=True)
class HeadShape(ModelShape):
    """The shape that heads have in common: layers of Llama's shape over the target's vocabulary.

    Attributes:
        vocab_size: V, of the target.
        sliding_window: a position sees itself and the window - 1 positions before it. None: it sees
            all of them.
        embedding_scale: the factor by which embeddings are multiplied, as Gemma multiplies its own.
    """

    hidden_act: ClassVar = "silu"
    mlp_bias: ClassVar = False

    vocab_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, float | int | str] | None = None
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    sliding_window: int | None = None
    embedding_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class FeatureShape(HeadShape):
    """The shape of a draft that reads several layers of the target.

    Attributes:
        draft_vocab_size: W, the number of tokens that the draft can propose.
        aux_layers: the layers that are read, counted as "after L layers" (see
            specdistill.targets.frozen).
        target_num_layers: the depth of the target.
    """

    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    target_num_layers: int

    @property
    def prunes_vocabulary(self) -> bool:
        """Whether the draft vocabulary is smaller than the target's."""
        return self.draft_vocab_size < self.vocab_size


def check_window(shape: HeadShape, num_steps: int, *, key: str) -> None:
    """Raise UserError if a chain of draft steps is longer than the draft's sliding window.

    A draft step must see all earlier steps of its own chain.

    Args:
        shape: the shape of the draft.
        num_steps: the length of the chain.
        key: the recipe key to name in errors.
    """
    if shape.sliding_window is not None and num_steps > shape.sliding_window:
        raise UserError(
            key,
            got=(
                f"{num_steps} draft steps with a draft whose sliding window is"
                f" {shape.sliding_window} positions"
            ),
            expected=f"at most {shape.sliding_window} draft steps",
        )


class Embedding(nn.Embedding):
    """The target's embedding table, with its embeddings scaled as the target scales them."""

    def __init__(self, config: HeadShape) -> None:
        """Create a random table of the target's vocabulary."""
        super().__init__(config.vocab_size, config.hidden_size)
        self.scale = config.embedding_scale

    def forward(self, ids: Tensor) -> Tensor:
        """Look up embeddings and scale them, as Gemma does by the root of its hidden size."""
        embedded = super().forward(ids)
        return embedded if self.scale == 1 else embedded * self.scale


class RMSNorm(nn.RMSNorm):
    """An RMS norm that is computed in the wider of the input's and the weights' dtype.

    For 16-bit inputs and float32 weights, torch's own norm warns and runs seven kernels instead of
    one.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension, and return the result in the dtype of the input."""
        return super().forward(x.to(torch.promote_types(x.dtype, self.weight.dtype))).to(x.dtype)


@torch.no_grad()
def is_one_plus_weight(norm: nn.Module) -> bool:
    """Return whether a norm multiplies by 1 + weight, as Gemma's norms do.

    For such a norm a weight of zero means a factor of one.
    """
    # Set all parameters of a copy to zero. An ordinary norm then returns zeros, and a norm that
    # multiplies by 1 + weight returns its normalized input.
    probe = copy.deepcopy(norm)
    for parameter in probe.parameters():
        parameter.zero_()
    signs = torch.ones_like(probe.get_parameter("weight"))
    # The input is not constant, because a LayerNorm would subtract the mean and leave nothing.
    signs[::2] = -1
    return bool(probe(signs.view(1, 1, -1)).any())


@torch.no_grad()
def scale_norm(norm: nn.Module, factor: float) -> None:
    """Scale the output of a norm by a factor, by changing its parameters in place."""
    # For a norm that multiplies by 1 + weight, the factor applies to 1 + weight. Other parameters,
    # such as a bias, are multiplied directly.
    offset = float(is_one_plus_weight(norm))
    for name, parameter in norm.named_parameters():
        addend = offset if name == "weight" else 0.0
        parameter.copy_((parameter + addend) * factor - addend)


class KVCache(Protocol):
    """The keys and values of all layers; the cache decides which of them each query may see."""

    def append(self, layer: int, key_BGTd: Tensor, value_BGTd: Tensor) -> None:
        """Store keys and values of positions that have no queries of their own."""

    def attend(
        self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor
    ) -> Tensor:
        """Store the keys and values of this step, and compute the attention of its queries.

        Args:
            layer: the index of the layer.
            query_BNTd: queries [B, N, T, d]: batch, query heads, new positions, head size.
            key_BGTd: new keys [B, G, T, d], for G key/value heads.
            value_BGTd: new values [B, G, T, d].

        Returns:
            The attention output [B, N, T, d].
        """


class Attention(nn.Module):
    """Llama's attention, whose keys and values are held by a `KVCache`."""

    def __init__(self, config: HeadShape, input_size: int, *, head_norms: bool = False) -> None:
        """Create the projections.

        Args:
            config: the shape of the draft.
            input_size: I.
            head_norms: whether each query and key head is normalized. Only block drafters do this.
        """
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(
            input_size, config.num_attention_heads * config.head_dim, bias=False
        )
        self.k_proj = nn.Linear(
            input_size, config.num_key_value_heads * config.head_dim, bias=False
        )
        self.v_proj = nn.Linear(
            input_size, config.num_key_value_heads * config.head_dim, bias=False
        )
        self.o_proj = nn.Linear(
            config.num_attention_heads * config.head_dim, config.hidden_size, bias=False
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if head_norms else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if head_norms else None

    def forward(
        self, x_BTI: Tensor, rotary: tuple[Tensor, Tensor], layer: int, kv_cache: KVCache
    ) -> Tensor:
        """Compute the attention of T new positions, whose keys and values enter the cache.

        Args:
            x_BTI: the input of the projections [B, T, I]: batch, new positions, input size.
            rotary: cos and sin [B, T, d] of the positions, for head size d.
            layer: the index of the layer, under which the cache stores keys and values.
            kv_cache: the cache, which also decides what each query may see.

        Returns:
            The attention output after the output projection, [B, T, H], for hidden size H.
        """
        # Queries [B, N, T, d] and keys [B, G, T, d], rotated to their positions.
        query = self.project_heads(self.q_proj, self.q_norm, x_BTI)
        key = self.project_heads(self.k_proj, self.k_norm, x_BTI)
        query, key = apply_rotary_pos_emb(query, key, *rotary)

        # The cache computes the attention. Put the heads side by side and project them to H.
        value = self.project_heads(self.v_proj, None, x_BTI)
        context_BNTd = kv_cache.attend(layer, query, key, value)
        output: Tensor = self.o_proj(context_BNTd.transpose(1, 2).flatten(2))
        return output

    def remember(
        self, context_BTI: Tensor, rotary: tuple[Tensor, Tensor], layer: int, kv_cache: KVCache
    ) -> None:
        """Compute the keys and values of context positions, and store them in the cache.

        Later queries attend to the context. The context has no queries of its own, so no output is
        computed.

        Args:
            context_BTI: hidden states of the context [B, T, I]: batch, positions, input size.
            rotary: cos and sin [B, T, d] of the positions, for head size d.
            layer: the index of the layer, under which the cache stores keys and values.
            kv_cache: the cache.
        """
        key = self.project_heads(self.k_proj, self.k_norm, context_BTI)
        # transformers' function rotates queries and keys together. There are no queries, so the
        # keys take both places.
        key, _ = apply_rotary_pos_emb(key, key, *rotary)
        kv_cache.append(layer, key, self.project_heads(self.v_proj, None, context_BTI))

    def project_heads(self, project: nn.Linear, norm: nn.Module | None, x_BTI: Tensor) -> Tensor:
        """Compute queries, keys or values: project the input, and split the result into heads.

        Args:
            project: the projection of queries, keys or values.
            norm: a norm for each head; None for no norm.
            x_BTI: the input [B, T, I]: batch, positions, input size.

        Returns:
            [B, heads, T, d], for head size d.
        """
        x = project(x_BTI).unflatten(-1, (-1, self.head_dim))
        output: Tensor = (x if norm is None else norm(x)).transpose(1, 2)
        return output


class PlainLayer(nn.Module):
    """An ordinary Llama layer, such as each layer of a head after its first.

    Without `input_norm` it is the first layer of an EAGLE-1 head.
    """

    def __init__(
        self, config: HeadShape, index: int, *, input_norm: bool = True, head_norms: bool = False
    ) -> None:
        """Create the layer.

        Args:
            config: the shape of the draft.
            index: the place of the layer in the draft, from 0.
            input_norm: whether there is a norm before the attention.
            head_norms: whether each query and key head is normalized.
        """
        super().__init__()
        self.index = index
        self.input_layernorm = (
            RMSNorm(config.hidden_size, config.rms_norm_eps) if input_norm else nn.Identity()
        )
        self.self_attn = Attention(config, config.hidden_size, head_norms=head_norms)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self, hidden_BTH: Tensor, rotary: tuple[Tensor, Tensor], kv_cache: KVCache
    ) -> Tensor:
        """Add the outputs of attention and MLP to the hidden states, each after its norm."""
        hidden = hidden_BTH + self.self_attn(
            self.input_layernorm(hidden_BTH), rotary, self.index, kv_cache
        )
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class DraftModule(nn.Module):
    """A draft that reads the target's features: what training, decoding and the doctor use of it.

    Attributes:
        config: the shape of the draft. `vocab_size` (V), `num_layers` and `sliding_window` (in
            positions; None for all of them) are read.
        layers: the decoder layers.
        fc: the projection of the target's features to one hidden state of the draft.
        rotary: (tensor, positions [B, T]) -> (cos, sin) [B, T, d] in the dtype of the tensor.
    """

    config: Any
    layers: nn.ModuleList
    fc: nn.Linear
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    @property
    @abstractmethod
    def aux_layers(self) -> tuple[int, ...]:
        """The target's layers that the draft reads in addition to the last."""

    @property
    @abstractmethod
    def shared(self) -> frozenset[str]:
        """The names of tensors that are the target's own: neither trained nor saved."""

    @property
    @abstractmethod
    def logits(self) -> LogitsHead:
        """The map [..., H] -> [..., W] to logits over the draft vocabulary.

        If the LM head is the target's own, it scales and caps the logits as the target does.
        """

    @property
    @abstractmethod
    def target_ids_W(self) -> Tensor | None:
        """The target's token id of each draft token, ascending; None if the ids are the same."""


ModuleT = TypeVar("ModuleT", bound=DraftModule)  # a draft that reads features


class FeatureDraft(DraftModule):
    """A draft that reads several layers of the target: an EAGLE-3 head or a block drafter.

    Attributes:
        embed_tokens: the embedding table.
        d2t: [W] int64, the offset from each draft id to the target id.
    """

    embed_tokens: nn.Embedding
    d2t: Tensor

    def create_output_modules(self, config: FeatureShape) -> None:
        """Create the modules that EAGLE-3 heads and block drafters have besides layers and `fc`.

        These are the final norm, the LM head, the rotary embedding and `d2t`, the map from draft
        ids to target ids.
        """
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))

    @torch.no_grad()
    def initialize_from_target(
        self, target: FrozenTarget, draft_vocabulary: Tensor | None, scale: float = 1.0
    ) -> None:
        """Initialize draft vocabulary, embedding, LM head and final norm from the target.

        Embedding, LM head and norm are only copied if the draft is as wide as the target.

        Args:
            target: the target.
            draft_vocabulary: the target's ids of the W tokens that the draft can propose, sorted;
                None for all tokens.
            scale: a factor for the weights of the LM head.
        """
        # `d2t` holds offsets: target id minus draft id. They stay 0 if the draft has all tokens.
        if draft_vocabulary is not None:
            self.d2t.copy_(
                draft_vocabulary
                - torch.arange(len(draft_vocabulary), device=draft_vocabulary.device)
            )

        # Copy the tables. Of the target's LM head, take the rows of the draft vocabulary.
        if self.config.hidden_size == target.hidden_size:
            self.embed_tokens.weight.copy_(target.tensor("embed_tokens.weight"))
            self.lm_head.weight.copy_(target.tensor("lm_head.weight")[self.target_ids_W] * scale)
            norm_weight = getattr(target.norm, "weight", None)
            if norm_weight is not None:  # some norms have none
                self.norm.weight.copy_(norm_weight)

    def scale_output(self, factor: float) -> None:
        """Multiply the logits by a factor, through the final norm before the LM head."""
        scale_norm(self.norm, factor)

    @property
    def logits(self) -> LogitsHead:
        """The map [..., H] -> [..., W] to logits: the draft's own LM head, not scaled."""
        return LogitsHead(self.lm_head)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's layers that the draft reads, as its config states them."""
        aux_layers: tuple[int, ...] = self.config.aux_layers
        return aux_layers

    @property
    def target_ids_W(self) -> Tensor:
        """The target's token id of each draft token [W]: draft id plus the offset in `d2t`."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t


class Rotary(LlamaRotaryEmbedding):
    """Llama's rotary embedding for the shape of a draft.

    The module is called with a tensor and positions [B, T], and returns (cos, sin) [B, T, d] in the
    dtype of the tensor.

    `.to(bfloat16)` of a draft leaves the frequencies in float32. If they were rounded, angles would
    be off by a tenth at position 512.
    """

    def __init__(self, shape: HeadShape) -> None:
        """Compute the frequencies for the head size and the rotary settings of a shape."""
        # transformers computes the frequencies from a config. Only these keys matter for them.
        super().__init__(
            LlamaConfig(
                hidden_size=shape.hidden_size,
                num_attention_heads=1,  # only the head's size counts
                head_dim=shape.head_dim,
                max_position_embeddings=shape.max_position_embeddings,
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": shape.rope_theta,
                    **(shape.rope_scaling or {}),
                },
            )
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        """Move or convert the module, but keep the dtype of its frequencies.

        torch calls this for `.to()`, `.float()`, `.cuda()` and so on.
        """
        # Convert everything, then put the original frequencies back, moved to the new device.
        original_buffers = dict(self.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in list(self.named_buffers()):
            setattr(self, name, original_buffers[name].to(buffer.device))
        return self
