"""An early exit: from the state after the target's first E layers to the distribution that all of them will have.

Shapes: T positions, H hidden size (the target's), V vocabulary (the target's).

At position t the exit reads the state h_t that the target's layer E passes on, and predicts what the target's last layer would say:

    g_t = exit_norm(h_t)                           so that the MLP's output is of its size
    o_t = norm(g_t + mlp(g_t))                     norm is the target's final one
    q_t = softmax(head(o_t))                       head is the target's; the distribution of x_{t+1}

With mlp = 0, from which training starts, q_t is what the target's own head makes of h_t. Positions do not see each other: what came before
is in h_t, by the target's own layers (self-speculation: arXiv 2309.08168, with exits 2404.16710, with an exit trained for it 2404.18911).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from specdistill.errors import UserError
from specdistill.methods.chains.head import initialized
from specdistill.methods.early_exit.reader import SplitTarget
from specdistill.methods.layers import RMSNorm
from specdistill.targets.frozen import FrozenTarget


@dataclass(frozen=True, kw_only=True)
class ExitConfig:
    """exit_layer: E, of `num_target_layers`."""

    hidden_act: ClassVar = "silu"
    mlp_bias: ClassVar = False

    vocab_size: int
    hidden_size: int
    num_target_layers: int
    exit_layer: int
    intermediate_size: int


class ExitLayer(nn.Module):
    def __init__(self, config: ExitConfig) -> None:
        super().__init__()
        self.exit_norm = RMSNorm(config.hidden_size, 1e-6)
        self.mlp = LlamaMLP(config)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        normed = self.exit_norm(hidden_TH)
        output: Tensor = normed + self.mlp(normed)
        return output


class ExitDraft(nn.Module):
    """The exit. Final norm and head are the target's own modules, and no part of its state."""

    target_ids_W = None
    layers: Any
    norm: Any
    logits: Any

    def __init__(self, config: ExitConfig, target: FrozenTarget) -> None:
        super().__init__()
        self.config, self.aux_layers = config, (config.exit_layer,)
        self.layers = nn.ModuleList([ExitLayer(config)])
        vars(self).update(
            norm=target.norm, logits=target.logits
        )  # past nn.Module's own, which would take the norm in

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """From states after layer E to what `logits` reads."""
        normed: Tensor = self.norm(
            self.layers[0](hidden_TH.to(self.layers[0].exit_norm.weight.dtype))
        )
        return normed


def exit_config(
    text: Any, *, exit_layer: int | None = None, intermediate_size: int | None = None
) -> ExitConfig:
    """What a fresh exit has, of a target with this config. Raises UserError for layers that the target lacks."""
    depth, exit_layer = text.num_hidden_layers, exit_layer or max(1, text.num_hidden_layers // 8)
    if exit_layer >= depth:
        raise UserError(
            "draft.exit_layer", got=exit_layer, expected=f"fewer than the target's {depth} layers"
        )
    return ExitConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_target_layers=depth,
        exit_layer=exit_layer,
        intermediate_size=intermediate_size or 2 * text.hidden_size,
    )


def build_exit(target: FrozenTarget, *, seed: int = 0, **options: Any) -> ExitDraft:
    """An exit before training. options: of `ExitDraftConfig.shape`. Raises UserError as `exit_config` and `SplitTarget` do."""
    config = exit_config(target.config, **options)
    SplitTarget(target, config.exit_layer)
    draft = initialized(lambda: ExitDraft(config, target), seed)
    nn.init.zeros_(draft.layers[0].mlp.down_proj.weight)
    return draft.to(target.device)
