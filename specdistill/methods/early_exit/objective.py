"""The objective of early exits: learn the target's distribution of the next token, at every token.

Shapes: B rows, T positions, R loss tokens (padded), K draft tokens of a round, V target vocabulary.

Training needs no unroll. The state after layer E at a draft token is the target's own, as it is at
the same token of a completion.
"""

from functools import partial

import torch
from torch import Tensor

from specdistill.methods.early_exit.module import ExitDraft
from specdistill.targets.frozen import Features
from specdistill.training.losses.divergence import Divergence
from specdistill.training.losses.head_loss import compute_head_loss
from specdistill.training.objective import (
    Objective,
    SoftTargets,
    StepSums,
    arrange_in_chains,
    gather_before,
    select_loss_rows,
)


class ExitDistillation(Objective):
    """The objective of an early exit: computes its loss from target features.

    Args:
        draft: the exit.
        divergence: the loss of one token.
        num_positions: K of the simulated acceptance length.
        temperature: divides both sets of logits in the loss.
    """

    def __init__(
        self, draft: ExitDraft, divergence: Divergence, num_positions: int, temperature: float = 1.0
    ) -> None:
        """Create the objective, which trains one position with weight 1 at every token."""
        super().__init__(draft, divergence, temperature, step_weights=torch.ones(1))
        self.num_positions = num_positions

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        loss_positions: Tensor,
        features: Features,
        soft_targets: SoftTargets,
        measure: bool = False,
        **_: object,
    ) -> tuple[Tensor, StepSums]:
        """Compute the loss of an exit that predicts each loss token from the token before it.

        Args:
            input_ids: token ids [B, T] of packed rows, which hold several documents each.
            position_ids: [B, T], positions within the documents.
            loss_positions: [R], positions of the loss tokens in the flattened rows.
            features: the target's hidden states after the exit's layer, as the only auxiliary
                layer.
            soft_targets: the target's distributions of the loss tokens.
            measure: whether to also fill the metrics that cost time.
            **_: columns of the batch that are not read.

        Returns:
            The loss, summed over the loss tokens, and the sums of the metrics.
        """
        # Run the exit on the hidden state before each loss token. The first token of a document has
        # no loss, because no hidden state comes before it.
        rows_RH = self.draft(gather_before(features.aux[0], loss_positions, 1))
        weights_1R = select_loss_rows(position_ids, loss_positions, ahead=1).float().unsqueeze(0)
        total, metrics_M1R = compute_head_loss(
            rows_RH.unsqueeze(0),
            weights_1R,
            self.draft.logits,
            partial(soft_targets.at, measure=measure),
            self.compute_row_losses,
        )

        # The acceptance length is simulated: K successive loss tokens count as the draft tokens of
        # a round.
        by_chain = partial(arrange_in_chains, loss_positions, input_ids.shape, self.num_positions)
        return total, StepSums.from_losses(
            weights_1R, *(metrics_M1R * weights_1R), by_chain=by_chain
        )
