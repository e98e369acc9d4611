"""The EAGLE draft head (EAGLE-1, arXiv 2401.15077).

Its tensors have the names and shapes that SafeAILab, vLLM and SGLang load.

Shapes: B batch, T positions, H hidden size (the target's), V vocabulary (the target's).

At position t the head pairs the embedding of the next token x_{t+1} with f_t, the target's last
hidden state after its final norm. It predicts the next such state, f_{t+1}, and the target's own
head turns the prediction o_t into the draft's distribution q_t:

    h_t = fc(cat(embed(x_{t+1}), f_t))
    o_t = h_t + attention(h_t)
    o_t += mlp(post_attention_layernorm(o_t))
    q_t = softmax(head(o_t))

The first layer has no norm before its attention. In the next step o_t takes the place of f_{t+1}.
`head` is the target's lm_head, with the scale or the cap that the target's class applies to logits
(`specdistill.targets.anatomy.LogitsHead`).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from specdistill.methods.chains.head import Head, build_initialized, plan_head_shape
from specdistill.methods.layers import Embedding, HeadShape, KVCache, PlainLayer, Rotary
from specdistill.targets.anatomy import LogitsHead
from specdistill.targets.frozen import Features, FrozenTarget


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadShape):
    """The shape of an EAGLE-1 head.

    Attributes:
        fc_bias: whether fc has a bias. SafeAILab's first heads have one; vLLM loads none.
        logit_scale: the scale of the target's logits, which vLLM reads from the head's config.
    """

    fc_bias: bool = False
    logit_scale: float = 1.0


class EagleDraft(Head):
    """An EAGLE-1 head (see `Head` in specdistill.methods.chains.head).

    Its embedding and its lm_head are frozen copies of the target's (`copy_from_target`).
    """

    config: EagleConfig
    aux_layers: tuple[int, ...] = ()
    target_ids_W = None
    shared = frozenset({"embed_tokens.weight", "lm_head.weight"})

    def __init__(self, config: EagleConfig) -> None:
        """Create the modules of the head; embedding and LM head are not trained."""
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config).requires_grad_(False)
        # fc reads embedding and hidden state side by side. The first layer has no norm before its
        # attention.
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            PlainLayer(config, index, input_norm=index > 0) for index in range(config.num_layers)
        )
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False).requires_grad_(
            False
        )
        self.rotary = Rotary(config)

    def copy_from_target(self, target: FrozenTarget) -> None:
        """Copy the target's embedding table and LM head into the head; they are not trained."""
        # `strict` is off, because only these two tables are loaded.
        self.load_state_dict({name: target.tensor(name) for name in self.shared}, strict=False)
        # The copied weights are used with the target's own scale and cap of logits.
        self._logits = replace(target.logits, linear=self.lm_head)

    @property
    def logits(self) -> LogitsHead:
        """The map [..., H] -> [..., V] to logits, scaled and capped as the target's."""
        return self._logits

    @torch.no_grad()
    def scale_output(self, factor: float) -> None:
        """Multiply the predicted hidden state, and so the logits, by a factor.

        The head has no norm before its LM head that could be scaled. Its hidden state is the sum of
        the outputs of fc, attention and MLP, so the last weights of these three are scaled.
        """
        for name, parameter in self.named_parameters():
            if name.startswith("fc.") or name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(factor)

    def fuse(self, features: Features) -> Tensor:
        """Return the target's last hidden state [B, T, H], unchanged."""
        return features.last_hidden

    def forward(
        self,
        next_ids_BT: Tensor,
        hidden_BTH: Tensor,
        rotary: tuple[Tensor, Tensor],
        kv_cache: KVCache,
    ) -> tuple[Tensor, Tensor]:
        """Run one draft step at T positions of B sequences.

        Args:
            next_ids_BT: the token after each position.
            hidden_BTH: hidden states [B, T, H]: the target's, or what the step before returned.
            rotary: cos and sin [B, T, d] of the positions, for head size d.
            kv_cache: keys and values of earlier positions and steps.

        Returns:
            The predicted next hidden state of the target [B, T, H], twice: `logits` computes the
            logits from it, and the next step reads it.
        """
        # Put each token's embedding and hidden state side by side, [B, T, 2 H]; fc returns
        # [B, T, H].
        hidden = self.fc(torch.cat((self.embed_tokens(next_ids_BT), hidden_BTH), dim=-1))
        for layer in self.layers:
            hidden = layer(hidden, rotary, kv_cache)
        return hidden, hidden


def build_eagle(target: FrozenTarget, *, seed: int = 0, **options: object) -> EagleDraft:
    """Build a fresh head that is as wide as its target.

    Args:
        target: the target.
        seed: the seed of the initial weights.
        **options: sizes from the recipe's `draft:`; others are the target's.

    Raises:
        UserError: for a target without RMS norms and a rotary embedding.
    """
    config = EagleConfig(**plan_head_shape(target, **options), logit_scale=target.logits.scale)
    draft = build_initialized(lambda: EagleDraft(config), seed)
    draft.copy_from_target(target)
    return draft.to(target.device)
