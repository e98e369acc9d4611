"""How far a draft's law q is from the target's p, per kept row. Plain versions, computed in float32.

Shapes: R kept rows, W draft vocabulary. `target_probs_RW` is p restricted to the draft vocabulary and renormalised there.

A loss is a sum and a count. Exactly one place divides, by the count of the whole global batch (specdistill.training.trainer): a mean
taken here would make the gradient depend on how the batch was cut.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossSum:
    """total: scalar, nats summed over the rows. count: how many rows."""

    total: Tensor
    count: int


Divergence = Callable[[Tensor, Tensor], LossSum]


def forward_kl(draft_logits_RW: Tensor, target_probs_RW: Tensor) -> LossSum:
    """KL(p || q) = sum_w p_w (log p_w - log q_w); zero iff q = p; its gradient with respect to the draft's logits is q - p."""
    log_q = draft_logits_RW.float().log_softmax(-1)
    # Not xlogy, which takes twice the time on a CPU; 0 log 0 = 0 here too.
    negative_entropy = (target_probs_RW * target_probs_RW.clamp_min(torch.finfo(torch.float32).tiny).log()).sum()
    return LossSum(negative_entropy - (target_probs_RW * log_q).sum(), len(draft_logits_RW))


DIVERGENCES: dict[str, Divergence] = {"forward_kl": forward_kl}


def acceptance(draft_probs_RW: Tensor, target_probs_RW: Tensor) -> Tensor:
    """alpha = sum_w min(p_w, q_w) per row: the probability that exact rejection sampling accepts (arXiv 2211.17192, theorem 3.5).

    Here p is *not* renormalised: what the target would say outside the draft vocabulary is lost, in decoding too.
    """
    return torch.minimum(draft_probs_RW, target_probs_RW).sum(-1)
