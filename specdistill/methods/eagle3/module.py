"""The EAGLE-3 draft head (arXiv 2503.01840), with the norms of EAGLE-3.1, in the tensors that SGLang, vLLM and SpecForge load.

Shapes: B batch, T positions, H draft hidden size, D target hidden size, A auxiliary layers, N query heads, G key/value heads,
d head size, V target vocabulary, W draft vocabulary.

At position t the draft pairs the embedding of the *next* token x_{t+1} with the fused target features g_t and predicts x_{t+2}:

    h_t = fc(cat(aux_t))                              only where the target has been: later positions feed back the draft's own output
    a   = cat(input_layernorm(embed(x_{t+1})), hidden_norm(h_t))                                     first layer, 2H wide
    o_t = h_t + attention(a);  o_t += mlp(post_attention_layernorm(o_t))
    q_t = softmax(lm_head(norm(o_t)))                 over the draft vocabulary; target id = draft id + d2t
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from specdistill.engines.loader import engine_aux_layers
from specdistill.errors import UserError
from specdistill.methods.chains.head import head_shape, initialized
from specdistill.methods.layers import (
    Attention,
    FeatureDraft,
    FeatureShape,
    KVCache,
    PlainLayer,
    RMSNorm,
)
from specdistill.targets.frozen import Features, FrozenTarget


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(FeatureShape):
    """Shape and switches of a head.

    fc_norm: a norm for each auxiliary state; norm_before_fc: one for all of them side by side (speculators' heads have it).
    own_embedding: the head has another embedding than a target of its width.
    """

    target_hidden_size: int
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    own_embedding: bool = False

    @property
    def owns_embedding(self) -> bool:
        """The target's embedding is shared when it is as wide as the draft; else the head trains and ships its own."""
        return self.own_embedding or self.hidden_size != self.target_hidden_size


class FirstLayer(nn.Module):
    """The layer that reads embedding and hidden state side by side; its q, k and v are 2H wide."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        embedding_BTH: Tensor,
        hidden_BTH: Tensor,
        rotary: tuple[Tensor, Tensor],
        kv_cache: KVCache,
    ) -> Tensor:
        normed = self.hidden_norm(hidden_BTH)
        residual = normed if self.norm_before_residual else hidden_BTH
        both = torch.cat((self.input_layernorm(embedding_BTH), normed), dim=-1)
        hidden = residual + self.self_attn(both, rotary, 0, kv_cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Draft(FeatureDraft):
    """The head. The embedding is a frozen copy of the target's, unless the widths differ (then it is the draft's own and trains)."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        fused_size = len(config.aux_layers) * config.target_hidden_size
        self.fc = nn.Linear(fused_size, config.hidden_size, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(fused_size, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.aux_layers
            )
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_tokens.weight.requires_grad_(config.owns_embedding)
        self.layers = nn.ModuleList(
            [
                FirstLayer(config),
                *(PlainLayer(config, index) for index in range(1, config.num_layers)),
            ]
        )
        self.end_with_head(config)

    @property
    def shared(self) -> frozenset[str]:
        return frozenset() if self.config.owns_embedding else frozenset({"embed_tokens.weight"})

    def fuse(self, features: Features) -> Tensor:
        """A auxiliary features [B, T, D] -> the first hidden state [B, T, H]."""
        aux = features.aux
        if self.config.fc_norm:
            aux = tuple(norm(feature) for norm, feature in zip(self.fc_norm, aux, strict=True))
        read = torch.cat(aux, dim=-1)
        return self.fc(self.input_norm(read) if self.config.norm_before_fc else read)

    def forward(
        self,
        next_ids_BT: Tensor,
        hidden_BTH: Tensor,
        rotary: tuple[Tensor, Tensor],
        kv_cache: KVCache,
    ) -> tuple[Tensor, Tensor]:
        """One draft step over T positions.

        Returns `normed` [B, T, H], which `logits` reads, and `next_hidden` [B, T, H], the hidden state of the next step: before the norm
        in EAGLE-3, after it with `norm_output`.
        """
        hidden = self.layers[0](self.embed_tokens(next_ids_BT), hidden_BTH, rotary, kv_cache)
        for layer in self.layers[1:]:
            hidden = layer(hidden, rotary, kv_cache)
        normed = self.norm(hidden)
        return normed, normed if self.config.norm_output else hidden


def eagle3_config(
    target: FrozenTarget,
    draft_vocab_size: int,
    *,
    aux_layers: Sequence[int] | None = None,
    **options: Any,
) -> Eagle3Config:
    """Of a head with these keys of a recipe. Raises UserError for a layer to read that does not exist, and as `head_shape`."""
    return Eagle3Config(
        **head_shape(target, **options),
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        aux_layers=tuple(check_aux_layers(aux_layers, target.num_layers)),
        target_num_layers=target.num_layers,
    )


def build_eagle3(
    target: FrozenTarget, *, draft_vocabulary: Tensor | None = None, seed: int = 0, **options: Any
) -> Eagle3Draft:
    """A head before training. `draft_vocabulary`: sorted target ids [W], None for the whole vocabulary; options: of `eagle3_config`."""
    config = eagle3_config(
        target, target.vocab_size if draft_vocabulary is None else len(draft_vocabulary), **options
    )
    target.features(
        torch.zeros(1, 1, dtype=torch.long, device=target.device), config.aux_layers
    )  # which may refuse
    draft = initialized(lambda: Eagle3Draft(config), seed)
    draft.begin(target, draft_vocabulary, scale=target.logits.scale)
    return draft.to(target.device)


def check_aux_layers(aux_layers: Sequence[int] | None, num_layers: int) -> list[int]:
    """The layers asked for, or the engines' default; for targets too shallow for that, three different layers spread over the depth.

    Raises UserError for repeated ones and for one outside 0..n.
    """
    layers = engine_aux_layers(num_layers) if aux_layers is None else list(aux_layers)
    if aux_layers is None and layers != sorted(set(layers)):
        layers = sorted({min(1, num_layers), num_layers // 2, max(num_layers - 1, 0)})
    if (
        not layers
        or not all(0 <= layer <= num_layers for layer in layers)
        or len(set(layers)) != len(layers)
    ):
        raise UserError(
            "draft.aux_layers",
            got=layers,
            expected=f"different layers in 0..{num_layers} (the target's depth)",
        )
    return layers
