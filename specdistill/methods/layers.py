"""What drafts that read features are built of: Llama's parts, with the attention itself left to the caller.

Shapes: B batch, T positions, I input size, H hidden size, N query heads, G key/value heads, d head size.

A `KVCache` holds keys and values and answers queries, so that cached decoding and the unrolled training-time test run the same layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from specdistill.errors import UserError
from specdistill.methods.sizes import ModelShape
from specdistill.targets.anatomy import LogitsHead
from specdistill.targets.frozen import FrozenTarget


@dataclass(frozen=True, kw_only=True)
class HeadShape(ModelShape):
    """What heads have in common: layers of Llama's shape over the target's vocabulary.

    sliding_window: a position sees itself and the window - 1 before it; None sees all of them.
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


@dataclass(frozen=True, kw_only=True)
class FeatureShape(HeadShape):
    """Of a draft that reads several layers of the target. `aux_layers` counts "after L layers" (see specdistill.targets.frozen)."""

    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    target_num_layers: int

    @property
    def prunes_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.vocab_size


def check_window(shape: HeadShape, num_steps: int, *, key: str) -> None:
    """Raises UserError, naming `key`, when a chain of `num_steps` is longer than the window that must hold it."""
    if shape.sliding_window is not None and num_steps > shape.sliding_window:
        got = f"{num_steps} steps with a draft that sees {shape.sliding_window} positions"
        raise UserError(key, got=got, expected=f"at most {shape.sliding_window}")


class RMSNorm(nn.RMSNorm):
    """torch's over inputs in the weights' precision: of 16-bit inputs and float32 weights torch warns, and takes seven kernels for one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.promote_types(x.dtype, self.weight.dtype))).to(x.dtype)


class KVCache(Protocol):
    """Where a layer's keys and values live, and what each query may see."""

    def append(self, layer: int, key_BGTd: Tensor, value_BGTd: Tensor) -> None:
        """Take in this step's keys and values; a context that nothing is asked of has no queries."""

    def attend(
        self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor
    ) -> Tensor:
        """Take in this step's keys and values and return the attention output [B, N, T, d of the values]."""


class Attention(nn.Module):
    """head_norms: of each query and key head; only block drafters have them."""

    def __init__(self, config: HeadShape, input_size: int, *, head_norms: bool = False) -> None:
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
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_dim, config.rms_norm_eps) if head_norms else None for _ in range(2)
        )

    def forward(
        self, x_BTI: Tensor, rotary: tuple[Tensor, Tensor], layer: int, kv_cache: KVCache
    ) -> Tensor:
        query, key = (
            self.heads(self.q_proj, self.q_norm, x_BTI),
            self.heads(self.k_proj, self.k_norm, x_BTI),
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        context_BNTd = kv_cache.attend(layer, query, key, self.heads(self.v_proj, None, x_BTI))
        return self.o_proj(context_BNTd.transpose(1, 2).flatten(2))

    def remember(
        self, context_BTI: Tensor, rotary: tuple[Tensor, Tensor], layer: int, kv_cache: KVCache
    ) -> None:
        """Make keys and values of a context that nothing is asked of."""
        key = self.heads(self.k_proj, self.k_norm, context_BTI)
        kv_cache.append(
            layer,
            apply_rotary_pos_emb(key, key, *rotary)[0],
            self.heads(self.v_proj, None, context_BTI),
        )

    def heads(self, project: nn.Linear, norm: nn.Module | None, x_BTI: Tensor) -> Tensor:
        """[B, N or G, T, d]."""
        x = project(x_BTI).unflatten(-1, (-1, self.head_dim))
        heads: Tensor = (x if norm is None else norm(x)).transpose(1, 2)
        return heads


class PlainLayer(nn.Module):
    """An ordinary Llama layer: what every layer after a head's first one is. Without `input_norm`, the first of an EAGLE-1 head."""

    def __init__(
        self, config: HeadShape, index: int, *, input_norm: bool = True, head_norms: bool = False
    ) -> None:
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
        hidden = hidden_BTH + self.self_attn(
            self.input_layernorm(hidden_BTH), rotary, self.index, kv_cache
        )
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class FeatureDraft(nn.Module):
    """A draft of a `FeatureShape`. d2t [W] int64: offset from draft id to target id."""

    config: Any
    embed_tokens: nn.Embedding
    d2t: Tensor

    def end_with_head(self, config: FeatureShape) -> None:
        """What stands behind the layers."""
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))

    @torch.no_grad()
    def begin(
        self, target: FrozenTarget, draft_vocabulary: Tensor | None, scale: float = 1.0
    ) -> None:
        """With the target's tables and final norm, where it is as wide. draft_vocabulary: sorted target ids [W], None for all."""
        if draft_vocabulary is not None:
            self.d2t.copy_(
                draft_vocabulary
                - torch.arange(len(draft_vocabulary), device=draft_vocabulary.device)
            )
        if self.config.hidden_size == target.hidden_size:
            self.embed_tokens.weight.copy_(target.tensor("embed_tokens.weight"))
            self.lm_head.weight.copy_(target.tensor("lm_head.weight")[self.target_ids_W] * scale)
            if (final := getattr(target.norm, "weight", None)) is not None:  # some norms have none
                self.norm.weight.copy_(final)

    @property
    def logits(self) -> LogitsHead:
        return LogitsHead(self.lm_head)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    @property
    def target_ids_W(self) -> Tensor:
        """The target's id of each draft token."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t


class Rotary(LlamaRotaryEmbedding):
    """(cos, sin) [B, T, d] of positions [B, T], as a Llama with this shape has them, in the dtype of the first argument.

    `.to(bfloat16)` of a draft leaves its frequencies in float32: rounded, they are off by a tenth at position 512.
    """

    def __init__(self, shape: HeadShape) -> None:
        config = LlamaConfig(
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
        super().__init__(config)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        exact = dict(self.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, moved in list(self.named_buffers()):
            setattr(self, name, exact[name].to(moved.device))
        return self
