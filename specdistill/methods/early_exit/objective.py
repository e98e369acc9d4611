"""What an early exit learns: at every token, the target's distribution of the next one.

Shapes: B rows, T positions, R loss tokens (padded), K draft tokens of a simulated round.

Drafted positions need no unroll: the state after layer E at a draft token is the target's own, the same that it has in a completion.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdistill.losses.chunked import head_loss
from specdistill.losses.divergence import Divergence
from specdistill.methods.early_exit.module import ExitDraft
from specdistill.targets.frozen import Features
from specdistill.training.objective import (
    Objective,
    SoftTargets,
    StepSums,
    before,
    in_a_row,
    loss_rows,
)


class ExitDistillation(Objective):
    """The exit as the trainer sees it: target features in, loss sums out.

    Args:
        num_positions: K of the simulated acceptance length.
    """

    def __init__(
        self, draft: ExitDraft, divergence: Divergence, num_positions: int, temperature: float = 1.0
    ) -> None:
        super().__init__(draft, divergence, temperature, torch.ones(1))
        self.num_positions = num_positions

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
        weights_1R = loss_rows(position_ids, loss_positions, ahead=1).float().unsqueeze(0)
        total, metrics_M1R = head_loss(
            rows_RH.unsqueeze(0),
            weights_1R,
            self.draft.logits,
            partial(soft_targets.at, measure=measure),
            self.row_losses,
        )
        by_chain = partial(in_a_row, loss_positions, input_ids.shape, self.num_positions)
        return total, StepSums.of(weights_1R, *(metrics_M1R * weights_1R), by_chain=by_chain)
