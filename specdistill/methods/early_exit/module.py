"""An early exit: it predicts the target's distribution from the state after its first E layers.

Shapes: T positions, H hidden size (the target's), V vocabulary (the target's).

At position t the exit reads the state h_t that the target's layer E passes on, and predicts what
the target's last layer would say:

    g_t = exit_norm(h_t)
    o_t = norm(g_t + mlp(g_t))
    q_t = softmax(head(o_t))

`norm` and `head` are the target's final norm and its head, and q_t is the distribution of x_{t+1}.
`exit_norm` is there so that the MLP's output has the size of g_t, to which it is added. Training
starts with mlp = 0, where q_t is what the target's own head makes of h_t. If the target is so sure
that q_t starts worse than an even guess, o_t is multiplied by a learned gain that starts small.

Positions do not see each other. What came before is in h_t already, by the target's own layers.
This is self-speculation: arXiv 2309.08168, with exits 2404.16710, with an exit trained for it
2404.18911.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from specdistill.common.errors import UserError
from specdistill.methods.chains.head import build_initialized
from specdistill.methods.early_exit.reader import SplitTarget
from specdistill.methods.layers import RMSNorm
from specdistill.targets.anatomy import LogitsHead
from specdistill.targets.frozen import FrozenTarget


@dataclass(frozen=True, kw_only=True)
class ExitConfig:
    """The shape of an early exit.

    Attributes:
        vocab_size: V.
        hidden_size: H.
        num_target_layers: the number of the target's layers.
        exit_layer: E, how many of the target's layers draft; below `num_target_layers`.
        intermediate_size: the width of the MLP.
        has_gain: whether the hidden states that the LM head reads are multiplied by a learned
            `output_gain` [H].
    """

    hidden_act: ClassVar = "silu"
    mlp_bias: ClassVar = False

    vocab_size: int
    hidden_size: int
    num_target_layers: int
    exit_layer: int
    intermediate_size: int
    has_gain: bool = False


class ExitLayer(nn.Module):
    """The trained part of an exit: a norm, an MLP and, if the config says so, a gain."""

    def __init__(self, config: ExitConfig) -> None:
        """Create norm and MLP, and a gain of ones if the config says so."""
        super().__init__()
        # 1e-6 is the default epsilon of transformers' LlamaConfig.
        self.exit_norm = RMSNorm(config.hidden_size, 1e-6)
        self.mlp = LlamaMLP(config)
        self.output_gain = nn.Parameter(torch.ones(config.hidden_size)) if config.has_gain else None

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """Normalize hidden states and add the output of the MLP to them.

        Args:
            hidden_TH: the target's hidden states [T, H] after the exit's layer.

        Returns:
            [T, H], before the target's final norm.
        """
        normed = self.exit_norm(hidden_TH)
        output: Tensor = normed + self.mlp(normed)
        return output


class ExitDraft(nn.Module):
    """An early exit.

    Its final norm and its head are the target's own modules, and no part of its state.
    """

    target_ids_W = None
    layers: Any
    norm: nn.Module
    logits: LogitsHead

    def __init__(self, config: ExitConfig, target: FrozenTarget) -> None:
        """Create the trained layer, and refer to the target's final norm and LM head."""
        super().__init__()
        self.config = config
        self.aux_layers = (config.exit_layer,)
        self.layers = nn.ModuleList([ExitLayer(config)])
        # Bypass nn.Module's `__setattr__`, which would make the norm a submodule.
        vars(self).update(norm=target.norm, logits=target.logits)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """Turn early hidden states of the target into the hidden states that `logits` reads.

        Args:
            hidden_TH: the target's hidden states [T, H] after its first layers.

        Returns:
            [T, H], after the trained layer and the target's final norm.
        """
        # The target may run in another dtype than the exit trains in.
        layer = self.layers[0]
        normed: Tensor = self.norm(layer(hidden_TH.to(layer.exit_norm.weight.dtype)))
        return normed if layer.output_gain is None else normed * layer.output_gain

    @torch.no_grad()
    def scale_output(self, factor: float) -> None:
        """Multiply the logits by a factor.

        Final norm and LM head are the target's and must not change. So the exit gets a trainable
        gain between the two, if it has none yet, and the gain is multiplied by the factor.
        """
        layer = self.layers[0]
        if layer.output_gain is None:
            layer.output_gain = nn.Parameter(torch.ones_like(layer.exit_norm.weight))
            self.config = replace(self.config, has_gain=True)
        layer.output_gain.mul_(factor)


def exit_config(
    text: PreTrainedConfig, *, exit_layer: int | None = None, intermediate_size: int | None = None
) -> ExitConfig:
    """Return the config of a new exit.

    Args:
        text: the target's text config.
        exit_layer: how many of the target's first layers draft; None for an eighth of them.
        intermediate_size: the width of the MLP; None for twice the target's hidden size.

    Raises:
        UserError: for layers that the target does not have.
    """
    # By default an eighth of the layers draft. More layers draft more slowly; fewer predict worse.
    depth = text.num_hidden_layers
    exit_layer = exit_layer or max(1, depth // 8)
    if exit_layer >= depth:
        raise UserError(
            "draft.exit_layer",
            got=exit_layer,
            expected=f"less than {depth}, the number of the target's layers",
        )
    return ExitConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_target_layers=depth,
        exit_layer=exit_layer,
        intermediate_size=intermediate_size or 2 * text.hidden_size,
    )


def build_exit(target: FrozenTarget, *, seed: int = 0, **options: int | None) -> ExitDraft:
    """Build an exit with new weights, whose MLP adds nothing at first.

    Args:
        target: the target.
        seed: the seed of the initial weights.
        **options: `exit_layer` and `intermediate_size`; see `exit_config`.

    Raises:
        UserError: for layers that the target does not have, and for a target whose layers cannot be
            run in two parts.
    """
    # `SplitTarget` raises an error if the target's layers cannot be run in two parts. It needs real
    # weights; on the meta device there are none.
    config = exit_config(target.config, **options)
    if not target.lm_head.weight.is_meta:
        SplitTarget(target, config.exit_layer)

    # A last matrix of zeros makes the MLP's output zero.
    draft = build_initialized(lambda: ExitDraft(config, target), seed)
    nn.init.zeros_(draft.layers[0].mlp.down_proj.weight)
    return draft.to(target.device)
