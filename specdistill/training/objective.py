"""What the methods' objectives share: soft targets, the positions with loss, and the training-time metrics of each drafted position.

Soft targets are the frozen target's distribution at every position that a draft learns from, computed once a batch. Metrics are sums and
counts: divided after batches and processes are added up.

Shapes: B rows, T positions, D target hidden, R positions with loss, V target vocabulary, W draft vocabulary, K drafted positions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import EvalPrediction


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


@dataclass
class StepSums:
    """Sums over the loss tokens of one batch, an entry for each drafted position; divide by `loss_tokens`, `chain_correct` by `chains`.

    loss: nats; correct: the draft's top-1 is the target's; accepted: expected acceptance (losses.divergence.acceptance);
    chain_correct: correct at this and every earlier position of the chain.
    """

    loss: list[Tensor] = field(default_factory=list)
    loss_tokens: list[Tensor] = field(default_factory=list)
    correct: list[Tensor] = field(default_factory=list)
    accepted: list[Tensor] = field(default_factory=list)
    chain_correct: list[Tensor] = field(default_factory=list)
    chains: list[Tensor] = field(default_factory=list)

    def table(self) -> Tensor:
        """[6, K] float32 in the order above; what was not measured is NaN."""
        rows = list(vars(self).values())
        table = torch.full((len(rows), max(map(len, rows))), torch.nan, device=self.loss[0].device)
        for index, row in enumerate(rows):
            if row:
                table[index, : len(row)] = torch.stack(row).float()
        return table


def step_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """The loss; loss_k, accuracy_k, acceptance_k for every drafted position that was measured; the simulated acceptance length.

    acceptance_length = 1 + sum_k P(the first k + 1 draft tokens are all correct), counted chain by chain and not as a product of
    marginals. The 1 is the bonus token, so that it compares with the acceptance length of greedy decoding.
    """
    table = torch.as_tensor(prediction.predictions).double().sum(0)
    loss, loss_tokens, correct, accepted, chain_correct, chains = table
    total, count = torch.as_tensor(prediction.label_ids).double().sum(0)
    metrics = {"loss": float(total / count)}
    for k in loss_tokens.isfinite().nonzero().flatten().tolist():
        metrics[f"loss_{k}"] = float(loss[k] / loss_tokens[k])
        metrics[f"accuracy_{k}"] = float(correct[k] / loss_tokens[k])
        metrics[f"acceptance_{k}"] = float(accepted[k] / loss_tokens[k])
    metrics["acceptance_length"] = 1.0 + float((chain_correct / chains).sum())
    return metrics
