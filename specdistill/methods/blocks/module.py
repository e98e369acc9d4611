"""A block drafter (DFlash, arXiv 2602.06036): one pass over a block of masks proposes all its tokens.

Shapes: B rows, T positions, N blocks of P slots, K = P - 1 or P of which predict, A layers that are read, D target hidden size = H draft
hidden size, V target vocabulary, W draft vocabulary, G key/value heads, d head size.

The context is what the target knows: c_j = hidden_norm(fc(cat(features_j))), of which each layer makes its own keys and values. A block is
the embeddings of (x_a, MASK, …, MASK) at the positions a, a + 1, …, which attend to the context before a and to one another:

    h = input_layernorm(y);  Q = rope(q_norm(q_proj h));  K = rope(k_norm(k_proj [c ; h]));  V = v_proj [c ; h]
    y += o_proj(attention);  y += mlp(post_attention_layernorm(y));  q_k = softmax(lm_head(norm(y_k)))

Slot k predicts x_{a+k}, the anchor's own slot nothing; or, with `sample_from_anchor`, x_{a+k+1}, and all slots predict.
Embedding and head are the target's, the head cut to a pruned vocabulary's rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdistill.errors import UserError
from specdistill.methods.chains.head import head_shape
from specdistill.methods.layers import FeatureDraft, FeatureShape, KVCache, PlainLayer, RMSNorm
from specdistill.methods.mask_token import mask_token
from specdistill.targets.frozen import Features, FrozenTarget

Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class BlockConfig(FeatureShape):
    """Shape and switches of a block drafter."""

    block_size: int
    mask_token_id: int
    is_causal: bool = False
    sample_from_anchor: bool = False

    @property
    def first_slot(self) -> int:
        """The first that predicts."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_drafted(self) -> int:
        """K at most."""
        return self.block_size - self.first_slot


class BlockLayer(PlainLayer):
    def __init__(self, config: BlockConfig, index: int) -> None:
        super().__init__(config, index, head_norms=True)

    def forward(
        self,
        hidden_NPH: Tensor,
        rotary: Rotation,
        kv_cache: KVCache,
        context: tuple[Tensor, Rotation] | None = None,
    ) -> Tensor:
        """context: [B, T, H] and its rotary tables, where it is not remembered yet: forward alone has a sharded layer's whole weights."""
        if context is not None:
            self.self_attn.remember(*context, self.index, kv_cache)
        return super().forward(hidden_NPH, rotary, kv_cache)


class BlockDraft(FeatureDraft):
    """The drafter. What a subclass may have: `markov_head`, a correction of its logits once the tokens before a slot are known (see
    specdistill.methods.dspark), and `confidence_head`, from hidden states [..., H] and embeddings [..., E] of the tokens before them to
    logits [...] of the chance that a draft token is accepted.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(
            len(config.aux_layers) * config.hidden_size, config.hidden_size, bias=False
        )
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size).requires_grad_(
            False
        )
        self.layers = nn.ModuleList(
            [BlockLayer(config, index) for index in range(config.num_layers)]
        )
        self.end_with_head(config)
        self.lm_head.requires_grad_(False)
        self.markov_head: Any = None
        self.confidence_head: Any = None

    @property
    def shared(self) -> frozenset[str]:
        return frozenset(
            {"embed_tokens.weight"}
            | (set() if self.config.prunes_vocabulary else {"lm_head.weight"})
        )

    def context(self, features: Features) -> Tensor:
        """[B, T, H] of which every layer makes keys and values."""
        context: Tensor = self.hidden_norm(self.fc(torch.cat(features.aux, dim=-1)))
        return context

    def remember(self, features: Features, rotary: Rotation, kv_cache: KVCache) -> None:
        """In decoding, the keys and values of positions that were committed."""
        context_BTH = self.context(features)
        for index, layer in enumerate(self.layers):
            attention: Any = layer.self_attn
            attention.remember(context_BTH, rotary, index, kv_cache)

    def forward(
        self,
        anchor_ids_N: Tensor,
        rotary: Rotation,
        kv_cache: KVCache,
        context: tuple[Tensor, Rotation] | None = None,
    ) -> Tensor:
        """[N, P, H], which `logits` reads, of blocks as long as the rotary tables [N, P, d]. context: see `BlockLayer`."""
        ids_NP = anchor_ids_N.new_full(rotary[0].shape[:2], self.config.mask_token_id)
        ids_NP[:, 0] = anchor_ids_N
        hidden = self.embed_tokens(ids_NP)
        for layer in self.layers:
            hidden = layer(hidden, rotary, kv_cache, context)
        normed: Tensor = self.norm(hidden)
        return normed


def block_config(
    target: FrozenTarget,
    draft_vocab_size: int,
    *,
    aux_layers: Sequence[int] | None = None,
    mask_token_id: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The fields of `BlockConfig` from the keys of a recipe. Raises UserError for layers and for a mask that the target does not have, and
    as `head_shape`.
    """
    layers = default_layers(target.num_layers) if aux_layers is None else list(aux_layers)
    if (
        not layers
        or sorted(set(layers)) != layers
        or not 0 < layers[0] <= layers[-1] <= target.num_layers
    ):
        expected = (
            f"different layers in ascending order from 1 to {target.num_layers}, the target's depth"
        )
        raise UserError("draft.aux_layers", got=layers, expected=expected)
    return {
        **head_shape(target, **options),
        "draft_vocab_size": draft_vocab_size,
        "aux_layers": tuple(layers),
        "target_num_layers": target.num_layers,
        "mask_token_id": mask_token(target, mask_token_id),
    }


def default_layers(num_layers: int, count: int = 5) -> list[int]:
    """Spread from the second layer to the third last, as DFlash's; fewer where there are not as many."""
    last = max(num_layers - 2, 1)
    spread = (round(2 + index * (last - 2) / (count - 1)) for index in range(count))
    return sorted({min(max(layer, 1), num_layers) for layer in spread})
