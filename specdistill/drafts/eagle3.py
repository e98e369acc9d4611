"""The EAGLE-3 draft head (arXiv 2503.01840), with the norms of EAGLE-3.1, in the tensors that SGLang, vLLM and SpecForge load.

Shapes: B batch, T positions, H draft hidden size, D target hidden size, A auxiliary layers, N query heads, G key/value heads,
d head size, V target vocabulary, W draft vocabulary.

At position t the draft pairs the embedding of the *next* token x_{t+1} with the fused target features g_t and predicts x_{t+2}:

    h_t = fc(cat(aux_t))                              only where the target has been: later positions feed back the draft's own output
    a   = cat(input_layernorm(embed(x_{t+1})), hidden_norm(h_t))                                     first layer, 2H wide
    o_t = h_t + attention(a);  o_t += mlp(post_attention_layernorm(o_t))
    q_t = softmax(lm_head(norm(o_t)))                 over the draft vocabulary; target id = draft id + d2t

Attention is the caller's: a `Memory` holds keys and values and answers queries, so that cached decoding and the unrolled training-time
test run the very same layers.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


@dataclass(frozen=True)
class Eagle3Config:
    """Shape and switches of a head. `aux_layers` counts "after L layers" (see specdistill.targets.frozen)."""

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    aux_layers: tuple[int, ...]
    target_num_layers: int
    num_layers: int = 1
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, float | int | str] | None = None
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False

    @property
    def prunes_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.vocab_size

    @property
    def owns_embedding(self) -> bool:
        """The target's embedding is shared when it is as wide as the draft; else the head trains and ships its own."""
        return self.hidden_size != self.target_hidden_size


class Memory(Protocol):
    """Where a layer's keys and values live, and what each query may see."""

    def attend(self, layer: int, query_BNTd: Tensor, key_BGTd: Tensor, value_BGTd: Tensor) -> Tensor:
        """Take in this step's keys and values and return the attention output [B, N, T, d]."""
        ...


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: Eagle3Config, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(input_size, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x_BTI: Tensor, rotary: tuple[Tensor, Tensor], layer: int, memory: Memory) -> Tensor:
        split = (*x_BTI.shape[:2], -1, self.head_dim)
        query = rotate(self.q_proj(x_BTI).view(split).transpose(1, 2), rotary)
        key = rotate(self.k_proj(x_BTI).view(split).transpose(1, 2), rotary)
        value = self.v_proj(x_BTI).view(split).transpose(1, 2)
        context_BNTd = memory.attend(layer, query, key, value)
        output: Tensor = self.o_proj(context_BNTd.transpose(1, 2).flatten(2))
        return output


class MLP(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class FirstLayer(nn.Module):
    """The layer that reads embedding and hidden state side by side; its q, k and v are 2H wide."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, embedding_BTH: Tensor, hidden_BTH: Tensor, rotary: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        normed = self.hidden_norm(hidden_BTH)
        residual = normed if self.norm_before_residual else hidden_BTH
        both = torch.cat((self.input_layernorm(embedding_BTH), normed), dim=-1)
        hidden = residual + self.self_attn(both, rotary, 0, memory)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class LaterLayer(nn.Module):
    """An ordinary Llama layer, as vLLM builds layers after the first."""

    def __init__(self, config: Eagle3Config, index: int) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden_BTH: Tensor, rotary: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        hidden = hidden_BTH + self.self_attn(self.input_layernorm(hidden_BTH), rotary, self.index, memory)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Eagle3Draft(nn.Module):
    """The head. The embedding is a frozen copy of the target's, unless the widths differ (then it is the draft's own and trains)."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.aux_layers) * config.target_hidden_size, config.hidden_size, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.aux_layers)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_tokens.weight.requires_grad_(config.owns_embedding)
        layers: list[nn.Module] = [FirstLayer(config)]
        layers += [LaterLayer(config, index) for index in range(1, config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(rotary_config(config))
        # d2t [W] int64: offset from draft id to target id. t2d [V] bool: target tokens the draft can propose.
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    @property
    def target_ids_W(self) -> Tensor:
        """The target's id of each draft token."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Choose the draft vocabulary: sorted target ids [W] int64."""
        assert target_ids.shape == self.d2t.shape and bool((target_ids.diff() > 0).all()), target_ids
        self.d2t.copy_(target_ids - torch.arange(len(target_ids), device=target_ids.device))
        self.t2d.zero_()[target_ids] = True

    def fuse(self, aux: tuple[Tensor, ...]) -> Tensor:
        """A target features [B, T, D] -> the first hidden state [B, T, H]."""
        if self.config.fc_norm:
            aux = tuple(norm(feature) for norm, feature in zip(self.fc_norm, aux, strict=True))
        fused: Tensor = self.fc(torch.cat(aux, dim=-1))
        return fused

    def forward(self, next_ids_BT: Tensor, hidden_BTH: Tensor, positions_BT: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """One draft step over T positions.

        Returns `normed` [B, T, H], which `lm_head` turns into logits over the draft vocabulary, and `recycled` [B, T, H], the hidden
        state of the next step: before the norm in EAGLE-3, after it with `norm_output`.
        """
        rotary = self.rotary(hidden_BTH, positions_BT)
        hidden = self.layers[0](self.embed_tokens(next_ids_BT), hidden_BTH, rotary, memory)
        for layer in self.layers[1:]:
            hidden = layer(hidden, rotary, memory)
        normed = self.norm(hidden)
        return normed, normed if self.config.norm_output else hidden


def rotate(x_BNTd: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding, Llama's half-split form; cos and sin are [B, T, d]."""
    cos, sin = (table.unsqueeze(1) for table in rotary)
    first, second = x_BNTd.chunk(2, dim=-1)
    return x_BNTd * cos + torch.cat((-second, first), dim=-1) * sin


def rotary_config(config: Eagle3Config) -> LlamaConfig:
    """The part of a Llama config that transformers' rotary embedding reads."""
    return LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta, **(config.rope_scaling or {})},
    )
