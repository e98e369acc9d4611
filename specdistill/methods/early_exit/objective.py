"""What an early exit learns: at every token, the target's distribution of the next one.

Shapes: B rows, T positions, R loss tokens (padded), r of a chunk of them, V vocabulary, K draft tokens of a simulated round.

Drafted positions need no unroll: the state after layer E at a draft token is the target's own, the same that it has in a completion.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specdistill.losses.chunked import head_loss
from specdistill.losses.divergence import Divergence
from specdistill.methods.early_exit.module import ExitDraft
from specdistill.targets.frozen import Features, FrozenTarget
from specdistill.training.objective import (
    SoftTargets,
    StepSums,
    TargetDistributions,
    before,
    checkpoint_mlps,
    features_of,
    loss_rows,
    with_metrics,
)


class ExitDistillation(nn.Module):
    """The exit as the trainer sees it: target features in, loss sums out.

    Args:
        num_positions: K of the simulated acceptance length.
        temperature: divides both sets of logits.
    """

    def __init__(self, draft: ExitDraft, divergence: Divergence, num_positions: int, temperature: float = 1.0) -> None:
        super().__init__()
        self.draft = draft
        self.divergence = divergence
        self.num_positions = num_positions
        self.temperature = temperature

    @property
    def layers(self) -> nn.ModuleList:
        layers: nn.ModuleList = self.draft.layers
        return layers

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """Called by transformers' Trainer for `train.activation_checkpointing`."""
        checkpoint_mlps(self.layers)

    def prepare(self, batch: dict[str, Any], number: int | None) -> dict[str, Any]:
        """The batch as it is."""
        return batch

    def num_loss_tokens(self, batch: dict[str, Any]) -> Tensor:
        return loss_rows(batch["position_ids"], batch["loss_positions"], ahead=1).sum()

    def read_target(self, target: FrozenTarget, inputs: dict[str, Any]) -> dict[str, Any]:
        """The target's features [B, T, D], which a batch from a store has, and soft targets."""
        features, all_ids = features_of(target, inputs, self.draft.aux_layers), torch.arange(target.vocab_size)
        positions = inputs["loss_positions"]
        soft_targets = SoftTargets.of(target.logits, features.last_hidden, positions, all_ids, self.temperature)
        return {"features": features, "soft_targets": soft_targets}

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        loss_positions: Tensor,
        features: Features,
        soft_targets: SoftTargets,
        measure: bool = False,
        **_: Any,
    ) -> tuple[Tensor, StepSums]:
        """The loss summed over the loss tokens of packed rows [B, T] (see specdistill.rows.packing), and the sums of the metrics."""
        rows_RH = self.draft(before(features.aux[0], loss_positions, 1))
        weights_R = loss_rows(position_ids, loss_positions, ahead=1).float()
        total, metrics_M1R = head_loss(
            rows_RH.unsqueeze(0),
            weights_R.unsqueeze(0),
            self.draft.logits,
            partial(soft_targets.at, measure=measure),
            self.row_losses,
        )
        losses_R, *measured = metrics_M1R.squeeze(1) * weights_R
        sums = StepSums(loss=[losses_R.sum()], loss_tokens=[weights_R.sum()])
        if measured:
            sums.add_consecutive(self.num_positions, input_ids.shape, loss_positions, weights_R, *measured)
        return total, sums

    def row_losses(self, logits_rV: Tensor, soft: TargetDistributions, k: int) -> tuple[Tensor, Tensor]:
        """Nats [r], and the metrics of each row [M, r]; see `head_loss`."""
        logits_rV = logits_rV / self.temperature
        return with_metrics(self.divergence(logits_rV, soft.probs_rW), logits_rV, soft, None)
