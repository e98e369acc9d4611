"""The loss of rows through a head, block by block: no tensor of [rows, vocabulary] outlives its block.

A block's logits are needed for the loss and for its gradient, so both are taken while they exist: each row of logits gives way to its own
gradient, of which two products make those of the rows and of the head. Forward keeps them, the head's summed in float32, and backward only
scales them. `head_loss_plainly` is the same in one piece and by autograd.

Shapes: K drafted positions, R rows, b rows of a block, r of a chunk of it, H hidden size, W vocabulary, M metrics.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdistill.targets.anatomy import LogitsHead

BLOCK = 4096  # rows, of all K positions, whose logits exist at a time: products of fewer would not fill a GPU
# Float32 logits in a divergence. On a CPU larger ones would not stay in caches, and glibc would map their memory again each time; on a GPU
# smaller ones would be kernels that last less than their launch.
CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}


TargetsOf = Callable[[slice], Any]  # rows -> what their logits are compared with; takes no gradient
LossOf = Callable[[Tensor, Any, int], tuple[Tensor, Tensor]]  # logits [r, W], targets, k -> nats [r] and metrics [M, r]


def head_loss(
    rows_KRH: Tensor,
    weights_KR: Tensor,
    head: LogitsHead,
    targets_of: TargetsOf,
    loss_of: LossOf,
    *,
    block: int = BLOCK,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The weighted sum of the rows' losses, a scalar, and their metrics [M, K, R], which take no gradient.

    The gradient reaches the rows and the head's weight and bias. All K positions of a row share a target, as the steps of an unroll that
    predict one token do; drafted positions that each have their own are rows of K = 1.
    """
    linear = head.linear
    num_positions, vocabulary = len(rows_KRH), len(linear.weight)
    chunk_bytes = CHUNK_BYTES[rows_KRH.device.type] if chunk_bytes is None else chunk_bytes
    chunk = max(1, min(block // num_positions, chunk_bytes // (4 * vocabulary)))
    size = chunk * max(1, block // (num_positions * chunk))
    gives_gradient = torch.is_grad_enabled()
    trains = tuple(
        gives_gradient and tensor is not None and tensor.requires_grad for tensor in (rows_KRH, linear.weight, linear.bias)
    )
    result: tuple[Tensor, Tensor] = _InBlocks.apply(  # type: ignore[no-untyped-call]
        rows_KRH, linear.weight, linear.bias, weights_KR, head.finish, targets_of, loss_of, size, chunk, trains
    )
    return result


def head_loss_plainly(
    rows_KRH: Tensor, weights_KR: Tensor, head: LogitsHead, targets_of: TargetsOf, loss_of: LossOf
) -> tuple[Tensor, Tensor]:
    """What `head_loss` computes, with all logits at once: its oracle."""
    with torch.no_grad():
        targets = targets_of(slice(None))
    found = [loss_of(head.finish(head.linear(rows_RH)), targets, k) for k, rows_RH in enumerate(rows_KRH)]
    losses_KR, metrics_KMR = (torch.stack(part) for part in zip(*found, strict=True))
    return (losses_KR * weights_KR).sum(), metrics_KMR.detach().transpose(0, 1)


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_KRH: Tensor,
        weight_WH: Tensor,
        bias_W: Tensor | None,
        weights_KR: Tensor,
        finish: Callable[[Tensor], Tensor],
        targets_of: TargetsOf,
        loss_of: LossOf,
        size: int,
        chunk: int,
        trains: tuple[bool, bool, bool],
    ) -> tuple[Tensor, Tensor]:
        device = rows_KRH.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_WH.dtype
        weight, bias = weight_WH.to(dtype), None if bias_W is None else bias_W.to(dtype)
        num_positions, num_rows, _ = rows_KRH.shape
        total = torch.zeros((), dtype=torch.float32, device=rows_KRH.device)
        rows_grad = torch.empty_like(rows_KRH) if trains[0] else None
        weight_grad = torch.zeros_like(weight_WH, dtype=torch.float32) if trains[1] else None
        bias_grad = torch.zeros_like(bias_W, dtype=torch.float32) if bias_W is not None and trains[2] else None
        buffer = weight.new_empty(num_positions * min(size, num_rows), len(weight))
        metrics = []
        for start in range(0, num_rows, size):
            stop = min(start + size, num_rows)
            rows_KbH = rows_KRH[:, start:stop].to(dtype)
            rows = rows_KbH.flatten(0, 1)
            logits = torch.mm(rows, weight.t(), out=buffer[: len(rows)])
            if bias is not None:
                logits += bias
            logits_KbW = logits.view(num_positions, stop - start, -1)
            for first in range(start, stop, chunk):
                part = slice(first, min(first + chunk, stop))
                own = slice(part.start - start, part.stop - start)
                with torch.no_grad():
                    targets = targets_of(part)
                found = []
                for k in range(num_positions):
                    logits_rW = logits_KbW[k, own].detach().requires_grad_(any(trains))
                    with torch.set_grad_enabled(any(trains)):
                        losses_r, metrics_Mr = loss_of(finish(logits_rW), targets, k)
                        loss = (losses_r * weights_KR[k, part]).sum()
                    found.append(metrics_Mr.detach())
                    total = total + loss.detach()
                    if any(trains):
                        logits_KbW[k, own] = torch.autograd.grad(loss, logits_rW)[0]
                metrics.append(torch.stack(found, dim=1))
            if rows_grad is not None:
                rows_grad[:, start:stop] = (logits @ weight).view_as(rows_KbH)
            if weight_grad is not None:
                weight_grad += logits.t() @ rows
            if bias_grad is not None:
                bias_grad += logits.sum(0, dtype=torch.float32)
        metrics_MKR = torch.cat(metrics, dim=-1)
        ctx.save_for_backward(rows_grad, weight_grad, bias_grad)
        ctx.dtypes = weight_WH.dtype, None if bias_W is None else bias_W.dtype
        ctx.mark_non_differentiable(metrics_MKR)
        return total, metrics_MKR

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        rows_grad, weight_grad, bias_grad = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            None if rows_grad is None else rows_grad * grad.to(rows_grad.dtype),
            None if weight_grad is None else (weight_grad * grad).to(weight_dtype),
            None if bias_grad is None else (bias_grad * grad).to(bias_dtype),
            *[None] * 7,
        )
