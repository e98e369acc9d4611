"""The loss of rows through a head, block by block: no tensor of [rows, vocabulary] outlives its block.

A block's logits are needed for the loss and for its gradient, so both are taken while they exist: each row of logits gives way to its own
gradient, of which two products make those of the rows and of the head. Forward keeps them, the head's summed in float32, and backward only
scales them. `head_loss_plainly` is the same in one piece and by autograd.

Shapes: K drafted positions, R rows, b rows of a block, r of a chunk of it, H hidden size, W vocabulary, M metrics, e width of a correction.
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
LossOf = Callable[
    [Tensor, Any, int], tuple[Tensor, Tensor]
]  # logits [r, W], targets, k -> nats [r] and metrics [M, r]


def head_loss(
    rows_KRH: Tensor,
    weights_KR: Tensor,
    head: LogitsHead,
    targets_of: TargetsOf,
    loss_of: LossOf,
    *,
    correction: tuple[Tensor, Tensor] | None = None,
    together: int = 1,
    block: int = BLOCK,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The weighted sum of the rows' losses, a scalar, and their metrics [M, K, R], which take no gradient.

    The gradient reaches the rows and the head's weight and bias. All K positions of a row share a target, as the steps of an unroll that
    predict one token do; drafted positions that each have their own are rows of K = 1.

    Args:
        correction: rows [K, R, e] and a weight [W, e], whose product is added to the head's logits; both get their gradient.
        together: R is a multiple of it, and chunks are: so many rows in a row are in one call of `loss_of`.
    """
    linear = head.linear
    num_positions, vocabulary = len(rows_KRH), len(linear.weight)
    chunk_bytes = CHUNK_BYTES[rows_KRH.device.type] if chunk_bytes is None else chunk_bytes
    chunk = (
        max(1, min(block // num_positions, chunk_bytes // (4 * vocabulary)) // together) * together
    )
    size = chunk * max(1, block // (num_positions * chunk))
    products = (rows_KRH, linear.weight, *(correction or ()))
    trains = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (linear.bias, *products)
    )
    result: tuple[Tensor, Tensor] = _InBlocks.apply(  # type: ignore[no-untyped-call]
        linear.bias, weights_KR, head.finish, targets_of, loss_of, size, chunk, trains, *products
    )
    return result


def head_loss_plainly(
    rows_KRH: Tensor,
    weights_KR: Tensor,
    head: LogitsHead,
    targets_of: TargetsOf,
    loss_of: LossOf,
    correction: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """What `head_loss` computes, with all logits at once: its oracle."""
    with torch.no_grad():
        targets = targets_of(slice(None))
    found = []
    for k, rows_RH in enumerate(rows_KRH):
        logits_RW = head.finish(head.linear(rows_RH))
        if correction is not None:
            logits_RW = logits_RW + correction[0][k] @ correction[1].T
        found.append(loss_of(logits_RW, targets, k))
    losses_KR, metrics_KMR = (torch.stack(part) for part in zip(*found, strict=True))
    return (losses_KR * weights_KR).sum(), metrics_KMR.detach().transpose(0, 1)


class _InBlocks(torch.autograd.Function):
    """Of one or two products of rows and a weight: the head's, whose `finish` follows, and the correction's."""

    @staticmethod
    def forward(
        ctx: Any,
        bias_W: Tensor | None,
        weights_KR: Tensor,
        finish: Callable[[Tensor], Tensor],
        targets_of: TargetsOf,
        loss_of: LossOf,
        size: int,
        chunk: int,
        trains: bool,
        *products: Tensor,
    ) -> tuple[Tensor, Tensor]:
        device = products[0].device
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else products[1].dtype
        bias = None if bias_W is None else bias_W.to(dtype)
        pairs = [
            (rows, weight.to(dtype))
            for rows, weight in zip(products[::2], products[1::2], strict=True)
        ]
        num_positions, num_rows, _ = products[0].shape
        total = torch.zeros((), dtype=torch.float32, device=device)
        grads = [
            (torch.zeros_like(x, dtype=torch.float32) if index % 2 else torch.empty_like(x))
            if trains and x.requires_grad
            else None
            for index, x in enumerate(products)
        ]
        bias_grad = (
            torch.zeros_like(bias_W, dtype=torch.float32)
            if trains and bias_W is not None and bias_W.requires_grad
            else None
        )
        buffers = [
            weight.new_empty(num_positions * min(size, num_rows), len(weight))
            for _, weight in pairs
        ]
        metrics = []
        for start in range(0, num_rows, size):
            stop = min(start + size, num_rows)
            rows_of = [rows_KRH[:, start:stop].to(dtype).flatten(0, 1) for rows_KRH, _ in pairs]
            logits_of = [
                torch.mm(rows, weight.t(), out=buffer[: len(rows)])
                for rows, (_, weight), buffer in zip(rows_of, pairs, buffers, strict=True)
            ]
            if bias is not None:
                logits_of[0] += bias
            logits_KbW = [logits.view(num_positions, stop - start, -1) for logits in logits_of]
            for first in range(start, stop, chunk):
                part = slice(first, min(first + chunk, stop))
                own = slice(part.start - start, part.stop - start)
                with torch.no_grad():
                    targets = targets_of(part)
                found = []
                for k in range(num_positions):
                    parts = [
                        logits[k, own].detach().requires_grad_(trains) for logits in logits_KbW
                    ]
                    with torch.set_grad_enabled(trains):
                        logits_rW = (
                            finish(parts[0]) if len(parts) == 1 else finish(parts[0]) + parts[1]
                        )
                        losses_r, metrics_Mr = loss_of(logits_rW, targets, k)
                        loss = (losses_r * weights_KR[k, part]).sum()
                    found.append(metrics_Mr.detach())
                    total = total + loss.detach()
                    if trains:
                        for logits, grad in zip(
                            logits_KbW, torch.autograd.grad(loss, parts), strict=True
                        ):
                            logits[k, own] = grad
                metrics.append(torch.stack(found, dim=1))
            for rows, logits, (_, weight), of_rows, of_weight in zip(
                rows_of, logits_of, pairs, grads[::2], grads[1::2], strict=True
            ):
                if of_rows is not None:
                    of_rows[:, start:stop] = (logits @ weight).view(num_positions, stop - start, -1)
                if of_weight is not None:
                    of_weight += logits.t() @ rows
            if bias_grad is not None:
                bias_grad += logits_of[0].sum(0, dtype=torch.float32)
        metrics_MKR = torch.cat(metrics, dim=-1)
        ctx.save_for_backward(bias_grad, *grads)
        ctx.dtypes = [None if x is None else x.dtype for x in (bias_W, *products)]
        ctx.mark_non_differentiable(metrics_MKR)
        return total, metrics_MKR

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        of_bias, *of_products = (
            None if own is None else (own * grad.to(own.dtype)).to(dtype)
            for own, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return of_bias, *[None] * 7, *of_products
