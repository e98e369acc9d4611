"""How much each position of a draft counts in the loss. A later one matters only where all before it are accepted.

Shapes: N drafts (blocks or chains), K drafted positions.
"""

import torch
from torch import Tensor


def geometric(decay: float, num_positions: int) -> Tensor:
    """[K]: position k counts decay ** k. The sum is one, so that the learning rate does not depend on K.

    DFlash's exp(-k / gamma) is a decay of exp(-1 / gamma) (arXiv 2602.06036).
    """
    weights = torch.tensor([decay**k for k in range(num_positions)])
    return weights / weights.sum()


def d_pace(chances_NK: Tensor, has_loss_NK: Tensor, alpha: float) -> Tensor:
    """[N, K] D-PACE (arXiv 2605.18810): what position k adds to a smoothed expected length, over K; takes no gradient.

    With s_k = alpha + (1 - alpha) q_k of the draft's chance q_k of the right token, sum_k prod_{j<=k} s_j is that length, and position k
    counts the terms that hold s_k: sum_{j>=k} prod_{i<=j} s_i.
    """
    smoothed_NK = alpha + (1 - alpha) * chances_NK.detach()
    reached_NK = smoothed_NK.masked_fill(~has_loss_NK, 1.0).cumprod(1) * has_loss_NK
    return reached_NK.flip(1).cumsum(1).flip(1) * has_loss_NK / chances_NK.shape[1]
