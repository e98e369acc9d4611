"""The training-time test (EAGLE-3, arXiv 2503.01840, section 3.2; HASS, arXiv 2408.15766): training on its own states, K steps deep.

Shapes: B rows, T positions, H draft hidden, R loss tokens (padded), N query heads, G key/value
heads, S = B T chains.

Every position t of a packed row is the root of a chain. With g_t the target's features, y_t its distribution after x_t:

    step 0   pair (x_{t+1}, g_t)      predicts x_{t+2}      target y_{t+1}
    step k   pair (x_{t+1+k}, h_t)    predicts x_{t+2+k}    target y_{t+1+k},   h_t = the draft's own output at step k - 1

which is what happens in decoding when the first k draft tokens are accepted. So step k stands at position t + k and sees what it will
see there: the pairs of step 0 at positions <= t of its document, and its own chain's steps 1..k. A prediction of x_s has a loss when the
loss mask is 1 at x_s and x_s is in the document of the root.

A head whose output is meant to be the target's own next feature, as EAGLE's is (arXiv 2401.15077), is also held to it: step k's h_{t+1+k}
to the target's last hidden state at t + 1 + k, by SmoothL1.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdistill.losses.chunked import head_loss
from specdistill.losses.divergence import Divergence, build_divergence
from specdistill.losses.position_weights import geometric
from specdistill.methods.chains.attention import UnrollKVCache
from specdistill.methods.chains.head import Head
from specdistill.methods.chains.recipe import HeadRecipe
from specdistill.targets.frozen import Features, FrozenTarget
from specdistill.training.objective import (
    Objective,
    SoftTargets,
    StepSums,
    before,
    loss_rows,
    shift_left,
)


class TrainingTimeTest(Objective):
    """A head as the trainer sees it: target features in, per-step loss sums out.

    Args:
        num_steps: K.
        step_decay: step k counts step_decay ** k.
        feature_weight: how much SmoothL1 to the target's next feature counts, a mean over its elements, in addition to the divergence.
        noise: at most this much is added to each element of the first hidden state, uniformly, in training.
    """

    ahead = 2

    def __init__(
        self,
        draft: Head,
        divergence: Divergence,
        num_steps: int,
        step_decay: float = 1.0,
        temperature: float = 1.0,
        feature_weight: float = 0.0,
        noise: float = 0.0,
    ) -> None:
        super().__init__(draft, divergence, temperature, geometric(step_decay, num_steps))
        self.num_steps = num_steps
        self.feature_weight = feature_weight
        self.noise = noise

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        loss_positions: Tensor,
        cumulative_lengths: Tensor,
        longest: int,
        features: Features,
        soft_targets: SoftTargets,
        measure: bool = False,
        **unread: Any,  # the batch's other columns
    ) -> tuple[Tensor, StepSums]:
        """Unroll `num_steps` steps over packed rows [B, T] (see specdistill.rows.packing). No operation depends on data.

        measure: also fill the metrics that cost time (what is correct, acceptance and chains).

        Returns the weighted sum of the steps' losses over all loss tokens (not yet divided), and the per-step sums.
        """
        shape = self.draft.config
        kv_cache = UnrollKVCache(
            cumulative_lengths, longest, shape.num_layers, shape.sliding_window
        )
        hidden = self.draft.fuse(features)
        if self.training and self.noise:
            hidden = hidden + (2 * torch.rand_like(hidden) - 1) * self.noise
        rows, has_loss = [], []
        errors = hidden.new_zeros((), dtype=torch.float32)
        for k in range(self.num_steps):
            rotary = self.draft.rotary(hidden, position_ids + k)
            normed, hidden = self.draft(shift_left(input_ids, 1 + k, 0), hidden, rotary, kv_cache)
            rows.append(before(normed, loss_positions, 2 + k))
            has_loss.append(loss_rows(position_ids, loss_positions, ahead=2 + k))
            if self.feature_weight:
                # What the head gave back, against the target's feature 1 + k positions on: a mean over H, summed over the loss tokens
                pair_RH = (
                    before(hidden, loss_positions, 2 + k).float(),
                    soft_targets.hidden_RD.float(),
                )
                error_R = F.smooth_l1_loss(*pair_RH, reduction="none").mean(-1)
                errors = errors + self.step_weights[k] * (error_R * has_loss[k]).sum()
        rows_KRH, has_loss_KR = torch.stack(rows), torch.stack(has_loss).float()
        total, metrics_MKR = head_loss(
            rows_KRH,
            has_loss_KR * self.step_weights.unsqueeze(1),
            self.draft.logits,
            partial(soft_targets.at, measure=measure),
            self.row_losses,
        )

        def by_chain(values_KR: Tensor) -> Tensor:
            """A row's value at the root of its chain, 2 + k before the token that it predicts, where it has a loss; elsewhere 0."""
            roots_KR = torch.stack(
                [loss_positions - 2 - k for k in range(self.num_steps)]
            ).clamp_min(0)
            return values_KR.new_zeros(self.num_steps, position_ids.numel()).scatter_add(
                1, roots_KR, values_KR
            )

        sums = StepSums.of(has_loss_KR, *(metrics_MKR * has_loss_KR), by_chain=by_chain)
        return total + self.feature_weight * errors, sums


def objective(draft: Head, recipe: HeadRecipe, target: FrozenTarget) -> TrainingTimeTest:
    """The training-time test that a recipe describes. EAGLE-1 recipes also hold the head to the target's features."""
    options = recipe.loss.model_dump(exclude={"divergence"})
    return TrainingTimeTest(
        draft, build_divergence(recipe.loss.divergence), recipe.draft.ttt_steps, **options
    )
