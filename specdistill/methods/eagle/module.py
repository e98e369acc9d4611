"""The EAGLE draft head (EAGLE-1, arXiv 2401.15077), in the tensors that SafeAILab, vLLM and SGLang load.

Shapes: B batch, T positions, H hidden size (the target's), V vocabulary (the target's).

At position t the head pairs the embedding of the next token x_{t+1} with the target's last hidden state f_t, after its final norm, and
predicts the next one, f_{t+1}; the target's own head makes tokens of it:

    h_t = fc(cat(embed(x_{t+1}), f_t))
    o_t = h_t + attention(h_t);  o_t += mlp(post_attention_layernorm(o_t))           the first layer has no norm before its attention
    q_t = softmax(head(o_t))                                                         o_t stands for f_{t+1} in the next step

head is the target's: lm_head, and the scale or the cap that its class gives to logits (`specdistill.targets.anatomy.LogitsHead`).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from specdistill.methods.chains.head import head_shape, initialized
from specdistill.methods.layers import HeadShape, KVCache, PlainLayer, Rotary
from specdistill.targets.frozen import Features, FrozenTarget


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadShape):
    """Shape of a head. fc_bias: SafeAILab's first heads have one; vLLM loads none. logit_scale: the target's, which vLLM reads here."""

    fc_bias: bool = False
    logit_scale: float = 1.0


class EagleDraft(nn.Module):
    """The head (a `Head`, see specdistill.methods.chains.head). Embedding and lm_head are frozen copies of the target's (`borrow`)."""

    aux_layers = ()
    target_ids_W = None
    shared = frozenset({"embed_tokens.weight", "lm_head.weight"})

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size).requires_grad_(
            False
        )
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            PlainLayer(config, index, input_norm=index > 0) for index in range(config.num_layers)
        )
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False).requires_grad_(
            False
        )
        self.rotary = Rotary(config)

    def borrow(self, target: FrozenTarget) -> None:
        """Take the target's embedding and head."""
        self.load_state_dict({name: target.tensor(name) for name in self.shared}, strict=False)
        self.logits = replace(target.logits, linear=self.lm_head)

    def fuse(self, features: Features) -> Tensor:
        """The target's last hidden state [B, T, H], as it is."""
        return features.last_hidden

    def forward(
        self,
        next_ids_BT: Tensor,
        hidden_BTH: Tensor,
        rotary: tuple[Tensor, Tensor],
        kv_cache: KVCache,
    ) -> tuple[Tensor, Tensor]:
        """One draft step over T positions: the predicted feature [B, T, H], for `logits` and as the next step's hidden state."""
        hidden = self.fc(torch.cat((self.embed_tokens(next_ids_BT), hidden_BTH), dim=-1))
        for layer in self.layers:
            hidden = layer(hidden, rotary, kv_cache)
        return hidden, hidden


def build_eagle(target: FrozenTarget, *, seed: int = 0, **options: Any) -> EagleDraft:
    """A head before training, as wide as its target. options: of `EagleConfig`; raises as `head_shape`."""
    config = EagleConfig(**head_shape(target, **options), logit_scale=target.logits.scale)
    draft = initialized(lambda: EagleDraft(config), seed)
    draft.borrow(target)
    return draft.to(target.device)
