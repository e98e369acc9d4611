"""Soft targets: the frozen target's distribution at every position that a draft learns from, computed once a batch.

Shapes: B rows, T positions, D target hidden, R positions with loss, V target vocabulary, W draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class SoftTargets:
    """The target's distributions at the positions with loss.

    row_BT: index of a position's distribution, or -1. probs_RW: renormalised over the draft vocabulary. mass_R: the target's probability
    of the draft vocabulary as a whole. top1_R: the target's top-1 among all its tokens.
    """

    row_BT: Tensor
    probs_RW: Tensor
    mass_R: Tensor
    top1_R: Tensor


@torch.no_grad()
def compute_soft_targets(
    logits_of: Callable[[Tensor], Tensor],
    last_hidden_BTD: Tensor,
    has_loss_BT: Tensor,
    target_ids_W: Tensor,
    temperature: float,
) -> SoftTargets:
    """The target's head where `has_loss_BT` alone, softmax over the draft's tokens `target_ids_W` (sorted target ids). float32."""
    row_BT = torch.where(has_loss_BT, has_loss_BT.flatten().cumsum(0).view_as(has_loss_BT) - 1, -1)
    logits_RV = logits_of(last_hidden_BTD[has_loss_BT]).float()
    top1_R = logits_RV.argmax(-1)
    if len(target_ids_W) == logits_RV.shape[-1]:
        return SoftTargets(row_BT, (logits_RV / temperature).softmax(-1), torch.ones_like(top1_R, dtype=torch.float32), top1_R)
    log_total_R = (logits_RV / temperature).logsumexp(-1)
    logits_RW = logits_RV[:, target_ids_W] / temperature
    return SoftTargets(row_BT, logits_RW.softmax(-1), (logits_RW.logsumexp(-1) - log_total_R).exp(), top1_R)


def has_loss(document_ids: Tensor, loss_mask: Tensor, *, ahead: int) -> Tensor:
    """Where the prediction of the token `ahead` positions later carries loss: by the mask, and within the document. [B, T] bool."""
    same_document = (shift_left(document_ids, ahead, -1) == document_ids) & (document_ids >= 0)
    return same_document & shift_left(loss_mask, ahead, 0).bool()


def shift_left(x_BT: Tensor, by: int, fill: int) -> Tensor:
    """x[t + by] at position t, `fill` past the end."""
    return F.pad(x_BT[:, by:], (0, min(by, x_BT.shape[1])), value=fill)
