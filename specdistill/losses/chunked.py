"""The loss of rows through a head, chunk by chunk: no tensor of [rows, vocabulary] outlives its chunk.

A chunk's logits are needed for the loss and for its gradient, so both are taken while they exist: forward keeps the gradient of the rows
and, summed in float32, that of the head, and backward only scales them. `head_loss_plainly` is the same in one piece and by autograd.

Shapes: K drafted positions, R rows, r rows of a chunk, H hidden size, W vocabulary, M metrics.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 2048  # rows; 250 MiB of float32 logits over 32k tokens


class Head(Protocol):
    """linear: with weight [W, H], and a bias [W] or None. finish: the linear layer's output -> logits, each number for itself."""

    @property
    def linear(self) -> Any: ...

    def finish(self, raw: Tensor) -> Tensor: ...


TargetsOf = Callable[[slice], Any]  # rows -> what their logits are compared with; takes no gradient
LossOf = Callable[[Tensor, Any, int], tuple[Tensor, Tensor]]  # logits [r, W], targets, k -> nats [r] and metrics [M, r]


def head_loss(
    rows_KRH: Tensor, weights_KR: Tensor, head: Head, targets_of: TargetsOf, loss_of: LossOf, *, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """The weighted sum of the rows' losses, a scalar, and their metrics [M, K, R], which take no gradient.

    The gradient reaches the rows and the head's weight and bias. All K positions of a row are compared with the same targets.
    """
    linear = head.linear
    gives_gradient = torch.is_grad_enabled()
    trains = tuple(
        gives_gradient and tensor is not None and tensor.requires_grad for tensor in (rows_KRH, linear.weight, linear.bias)
    )
    result: tuple[Tensor, Tensor] = _InChunks.apply(  # type: ignore[no-untyped-call]
        rows_KRH, linear.weight, linear.bias, weights_KR, head.finish, targets_of, loss_of, chunk, trains
    )
    return result


def head_loss_plainly(
    rows_KRH: Tensor, weights_KR: Tensor, head: Head, targets_of: TargetsOf, loss_of: LossOf
) -> tuple[Tensor, Tensor]:
    """What `head_loss` computes, with all logits at once: its oracle."""
    with torch.no_grad():
        targets = targets_of(slice(None))
    found = [loss_of(head.finish(head.linear(rows_RH)), targets, k) for k, rows_RH in enumerate(rows_KRH)]
    losses_KR, metrics_KMR = (torch.stack(part) for part in zip(*found, strict=True))
    return (losses_KR * weights_KR).sum(), metrics_KMR.detach().transpose(0, 1)


class _InChunks(torch.autograd.Function):
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
        chunk: int,
        trains: tuple[bool, bool, bool],
    ) -> tuple[Tensor, Tensor]:
        device = rows_KRH.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_WH.dtype
        weight = weight_WH.detach().to(dtype).requires_grad_(trains[1])
        bias = None if bias_W is None else bias_W.detach().to(dtype).requires_grad_(trains[2])
        total = torch.zeros((), dtype=torch.float32, device=rows_KRH.device)
        rows_grad = torch.zeros_like(rows_KRH) if trains[0] else None
        weight_grad = torch.zeros_like(weight_WH, dtype=torch.float32) if trains[1] else None
        bias_grad = torch.zeros_like(bias_W, dtype=torch.float32) if bias_W is not None and trains[2] else None
        metrics = []
        for start in range(0, rows_KRH.shape[1], chunk):
            part = slice(start, start + chunk)
            with torch.no_grad():
                targets = targets_of(part)
            found = []
            for k in range(rows_KRH.shape[0]):
                rows = rows_KRH[k, part].detach().requires_grad_(trains[0])
                with torch.set_grad_enabled(any(trains)):
                    losses_r, metrics_Mr = loss_of(finish(F.linear(rows.to(dtype), weight, bias)), targets, k)
                    loss = (losses_r * weights_KR[k, part]).sum()
                found.append(metrics_Mr.detach())
                total = total + loss.detach()
                wanted = [tensor for tensor in (rows, weight, bias) if tensor is not None and tensor.requires_grad]
                grads = iter(torch.autograd.grad(loss, wanted) if wanted else ())
                if rows_grad is not None:
                    rows_grad[k, part] = next(grads)
                if weight_grad is not None:
                    weight_grad += next(grads)
                if bias_grad is not None:
                    bias_grad += next(grads)
            metrics.append(torch.stack(found, dim=1))
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
            *[None] * 6,
        )
