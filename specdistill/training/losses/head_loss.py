"""Compute the loss of rows through an output head, block by block.

The logits [rows, vocabulary] of a large vocabulary would fill the memory, so they never exist all
at once. The forward pass computes the logits of one block, then the loss and its gradient with
respect to these logits, which overwrites them. Two matrix products turn that gradient into the
gradients of the rows and of the head's weight. Then the next block uses the same memory. The
forward pass keeps the gradients of rows and weight (that of the weight is summed in float32), and
the backward pass only scales them. The tests compare the result with the same loss in one piece,
differentiated by autograd.

Shapes: K drafted positions, R rows, b rows of a block, r rows of a chunk of it, H hidden size, W
vocabulary, M metrics, e width of a correction.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdistill.targets.anatomy import LogitsHead

# Rows, over all K positions, whose logits exist at a time. Products of fewer rows would not fill a
# GPU.
BLOCK_ROWS = 4096
# The most bytes of a block's logits, in the dtype of the product. A CPU is busy with a few hundred
# rows, and 4,096 rows of a vocabulary of 262,144 would take 2 GB of main memory. A GPU holds those
# of the largest vocabularies.
BLOCK_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
# The most bytes of float32 logits in a divergence. On a CPU larger ones would not stay in caches,
# and glibc would map their memory again each time. On a GPU smaller ones would be kernels that last
# less than their launch.
CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}

# A function that returns what the logits of some rows are compared with: rows -> targets. Targets
# take no gradient.
TargetsOf = Callable[[slice], Any]
# A function that compares logits with targets: logits [r, W], targets, and the drafted position k
# -> losses in nats [r], and metrics [M, r].
LossOf = Callable[[Tensor, Any, int], tuple[Tensor, Tensor]]


def compute_head_loss(
    rows_KRH: Tensor,
    weights_KR: Tensor,
    head: LogitsHead,
    targets_of: TargetsOf,
    loss_of: LossOf,
    *,
    correction: tuple[Tensor, Tensor] | None = None,
    group_size: int = 1,
    block_rows: int = BLOCK_ROWS,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the weighted sum of the losses of R rows through an output head, block by block.

    The logits of all rows never exist at once. The gradient reaches the rows and the head's weight
    and bias.

    Each row has K hidden states, one for each drafted position. All K predict the same token, so
    their logits are compared with the same target. For example, training unrolls an EAGLE-3 head
    for K steps, and each step predicts the same R tokens. If the drafted positions predict
    different tokens, pass K = 1, and make each hidden state a separate row.

    Args:
        rows_KRH: [K, R, H], hidden states before the head.
        weights_KR: [K, R], the weight of each loss in the sum.
        head: the output head, with W tokens.
        targets_of: returns the targets of a slice of rows, in the form that `loss_of` takes.
        loss_of: compares logits [r, W] of r rows with their targets at a drafted position k, and
            returns the losses [r] in nats and M metrics [M, r].
        correction: rows [K, R, e] and a weight [W, e], whose product is added to the head's logits.
            Rows and weight get their gradient.
        group_size: for losses that depend on several rows. Rows 0 to group_size - 1 are a group,
            and so on. Each call of `loss_of` gets whole groups. R must be a multiple of it.
        block_rows: the most hidden states, over all K positions, whose logits exist at a time.
        chunk_bytes: the most bytes of float32 logits in one call of `loss_of`. None: CHUNK_BYTES.

    Returns:
        The sum, a scalar, and the metrics [M, K, R], which take no gradient.
    """
    linear = head.linear
    num_positions = len(rows_KRH)
    vocab_size = len(linear.weight)
    device = rows_KRH.device.type

    # Compute how many rows fit into a block and into a chunk: a chunk is a whole number of groups,
    # and a block a whole number of chunks. Logits have the product's dtype in a block, and float32
    # (4 bytes) in a chunk.
    itemsize = _get_product_dtype(linear.weight).itemsize
    block_rows = min(block_rows, BLOCK_BYTES[device] // (itemsize * vocab_size))
    if chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES[device]
    chunk_size = min(block_rows // num_positions, chunk_bytes // (4 * vocab_size))
    chunk_size = max(1, chunk_size // group_size) * group_size
    block_size = chunk_size * max(1, block_rows // (num_positions * chunk_size))

    # The gradients are computed in the forward pass, so it must know whether they are needed.
    factors = (rows_KRH, linear.weight, *(correction or ()))
    trains = False
    if torch.is_grad_enabled():
        trains = any(factor.requires_grad for factor in factors)
        trains = trains or (linear.bias is not None and linear.bias.requires_grad)
    output: tuple[Tensor, Tensor] = _BlockwiseHeadLoss.apply(  # type: ignore[no-untyped-call]
        linear.bias,
        weights_KR,
        head.finish,
        targets_of,
        loss_of,
        block_size,
        chunk_size,
        trains,
        *factors,
    )
    return output


def _get_product_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of logits: under autocast its dtype, otherwise the dtype of the weight."""
    device = weight.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return weight.dtype


@dataclass
class _Product:
    """A product of rows and a weight, computed block by block, with its gradients.

    Attributes:
        rows_KRH: the rows.
        weight_WH: the weight, in the dtype of the product.
        rows_grad_KRH: None if the rows take no gradient.
        weight_grad_WH: float32; None if the weight takes no gradient.
        buffer: holds the logits of a block.
    """

    rows_KRH: Tensor
    weight_WH: Tensor
    rows_grad_KRH: Tensor | None
    weight_grad_WH: Tensor | None
    buffer: Tensor

    @classmethod
    def allocate(
        cls,
        rows_KRH: Tensor,
        weight_WH: Tensor,
        dtype: torch.dtype,
        buffer_rows: int,
        trains: bool,
    ) -> "_Product":
        """Allocate the gradients of the product rows · weightᵀ, and the buffer for its logits.

        Args:
            rows_KRH: the rows: R hidden states of size H for each of K drafted positions.
            weight_WH: the weight of W tokens.
            dtype: the dtype of the product.
            buffer_rows: the most rows of logits that exist at a time.
            trains: whether gradients are needed.
        """
        # A gradient is only kept if it is needed. That of the weight is a sum over all rows, so it
        # is float32.
        rows_grad_KRH = None
        if trains and rows_KRH.requires_grad:
            rows_grad_KRH = torch.empty_like(rows_KRH)
        weight_grad_WH = None
        if trains and weight_WH.requires_grad:
            weight_grad_WH = torch.zeros_like(weight_WH, dtype=torch.float32)
        buffer = weight_WH.new_empty(buffer_rows, len(weight_WH), dtype=dtype)
        return cls(rows_KRH, weight_WH.to(dtype), rows_grad_KRH, weight_grad_WH, buffer)

    def compute_logits(self, start: int, stop: int) -> Tensor:
        """Compute the logits [K, b, W] of the b rows from start to stop, and return them.

        They are a view of the buffer, so the next call overwrites them. K is the number of drafted
        positions, and W the number of tokens.
        """
        rows_KbH = self.rows_KRH[:, start:stop].to(self.weight_WH.dtype)
        self._block_rows = rows_KbH.flatten(0, 1)  # kept, because `add_gradients` needs it
        block_buffer = self.buffer[: len(self._block_rows)]
        logits = torch.mm(self._block_rows, self.weight_WH.t(), out=block_buffer)
        return logits.view(len(rows_KbH), stop - start, -1)

    def add_gradients(self, logits_grad_KbW: Tensor, start: int, stop: int) -> None:
        """Compute the gradients of rows and weight from the gradient of a block's logits.

        The rows' gradient is stored at the place of the block. The weight's gradient is added to
        the sum over all blocks so far.

        Args:
            logits_grad_KbW: the gradient of the logits that `compute_logits` returned last, for K
                drafted positions, b rows of the block and W tokens.
            start: the first row of the block.
            stop: the row after the block.
        """
        # As logits = rows · weightᵀ, the gradient of rows is logits_grad · weight, and the gradient
        # of weight is logits_gradᵀ · rows.
        logits_grad = logits_grad_KbW.flatten(0, 1)
        if self.rows_grad_KRH is not None:
            shape = (len(logits_grad_KbW), stop - start, -1)
            self.rows_grad_KRH[:, start:stop] = (logits_grad @ self.weight_WH).view(shape)
        if self.weight_grad_WH is not None:
            self.weight_grad_WH += logits_grad.t() @ self._block_rows


def _compute_loss_and_gradient(
    logits: list[Tensor],
    weights_r: Tensor,
    finish: Callable[[Tensor], Tensor],
    loss_of: LossOf,
    loss_arguments: tuple[Any, int],
    trains: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the loss of r rows; in training, overwrite their logits by the loss's gradient.

    Args:
        logits: the logits [r, W] of the head, and those of a correction if there is one. The loss
            is computed from their sum.
        weights_r: the weight of each row's loss.
        finish: the head's function that scales and caps its logits.
        loss_of: computes the losses in nats [r] and M metrics [M, r] from logits and
            `loss_arguments`.
        loss_arguments: the targets of the rows, and the drafted position k.
        trains: whether the gradient is needed.

    Returns:
        The weighted sum of the losses, and the metrics [M, r]; neither takes a gradient.
    """
    # Detached logits are leaves, at which autograd stops. They share the memory of the logits.
    inputs = [logits_rW.detach().requires_grad_(trains) for logits_rW in logits]
    with torch.set_grad_enabled(trains):
        logits_rW = finish(inputs[0])
        if len(inputs) > 1:
            logits_rW = logits_rW + inputs[1]
        losses_r, metrics_Mr = loss_of(logits_rW, *loss_arguments)
        loss = (losses_r * weights_r).sum()

    # Nobody needs the logits after this, so their memory holds their gradient.
    if trains:
        for logits_rW, grad_rW in zip(logits, torch.autograd.grad(loss, inputs), strict=True):
            logits_rW.copy_(grad_rW)
    return loss.detach(), metrics_Mr.detach()


class _BlockwiseHeadLoss(torch.autograd.Function):
    """An autograd function that sums the losses of rows, whose logits come from matrix products.

    The first product is rows times the head's weight, and `finish` scales and caps its logits. A
    draft may have a correction: a second product, which is added to these logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        bias_W: Tensor | None,
        weights_KR: Tensor,
        finish: Callable[[Tensor], Tensor],
        targets_of: TargetsOf,
        loss_of: LossOf,
        block_size: int,
        chunk_size: int,
        trains: bool,
        *factors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute the weighted sum of the losses, the metrics, and all gradients, block by block.

        There are R rows at each of K drafted positions. The head computes their logits as

            finish(rows · weightᵀ + bias)

        A draft may have a correction, which is added to these logits. It is the product of a second
        kind of rows and a second weight:

            logits = finish(rows · weightᵀ + bias) + correction_rows · correction_weightᵀ

        Gradients are computed here and not in `backward`, because each block's logits are
        overwritten by those of the next block.

        Args:
            ctx: the context, which keeps the gradients for `backward`.
            bias_W: the head's bias for W tokens; None without one.
            weights_KR: the weight of each loss in the sum.
            finish: scales and caps the head's logits.
            targets_of: returns the targets of a slice of rows.
            loss_of: returns losses [r] and M metrics [M, r] for logits of r rows, their targets,
                and the drafted position.
            block_size: the most rows of a block, whose logits exist together.
            chunk_size: the most rows of a chunk. A block is divided into chunks, and each call of
                `loss_of` gets one chunk.
            trains: whether gradients are needed.
            *factors: rows [K, R, H] and weight [W, H] of the head. With a correction, there are two
                more: correction_rows [K, R, e] and correction_weight [W, e].

        Returns:
            The sum, a scalar, and the metrics [M, K, R].
        """
        # Allocate, for each product, the gradients of its rows and of its weight, and a buffer for
        # the logits of a block.
        num_positions, num_rows, _ = factors[0].shape
        dtype = _get_product_dtype(factors[1])
        buffer_rows = num_positions * min(block_size, num_rows)
        products = [
            _Product.allocate(rows_KRH, weight_WH, dtype, buffer_rows, trains)
            for rows_KRH, weight_WH in zip(factors[::2], factors[1::2], strict=True)
        ]
        bias_grad_W = None
        if trains and bias_W is not None and bias_W.requires_grad:
            bias_grad_W = torch.zeros_like(bias_W, dtype=torch.float32)

        # Go through the rows block by block: compute the logits, then the loss and its gradients.
        total = torch.zeros((), dtype=torch.float32, device=factors[0].device)
        metrics = []
        for start in range(0, num_rows, block_size):
            stop = min(start + block_size, num_rows)
            block_logits = [product.compute_logits(start, stop) for product in products]
            if bias_W is not None:
                block_logits[0] += bias_W.to(dtype)

            # Compute the loss chunk by chunk. Each row of logits is overwritten by its gradient.
            for first in range(start, stop, chunk_size):
                chunk = slice(first, min(first + chunk_size, stop))
                chunk_in_block = slice(chunk.start - start, chunk.stop - start)
                with torch.no_grad():
                    targets = targets_of(chunk)
                # All K positions of a row share a target, so its distribution is computed once.
                chunk_metrics = []
                for k in range(num_positions):
                    loss, metrics_Mr = _compute_loss_and_gradient(
                        [logits_KbW[k, chunk_in_block] for logits_KbW in block_logits],
                        weights_KR[k, chunk],
                        finish,
                        loss_of,
                        (targets, k),
                        trains,
                    )
                    total = total + loss
                    chunk_metrics.append(metrics_Mr)
                metrics.append(torch.stack(chunk_metrics, dim=1))

            # The memory of the block's logits now holds their gradient.
            block_logits_grad = block_logits
            for product, logits_grad_KbW in zip(products, block_logits_grad, strict=True):
                product.add_gradients(logits_grad_KbW, start, stop)
            if bias_grad_W is not None:
                bias_grad_W += block_logits_grad[0].flatten(0, 1).sum(0, dtype=torch.float32)

        # Keep the gradients for the backward pass, which scales them and converts each of them to
        # the dtype of its argument.
        grads = []
        for product in products:
            grads += [product.rows_grad_KRH, product.weight_grad_WH]
        metrics_MKR = torch.cat(metrics, dim=-1)
        ctx.save_for_backward(bias_grad_W, *grads)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (bias_W, *factors)]
        ctx.mark_non_differentiable(metrics_MKR)
        return total, metrics_MKR

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients that the forward pass computed, and return one per argument.

        Args:
            ctx: the context, in which `forward` saved the gradients of `bias_W` and `factors`.
            grad: the gradient of the summed loss, a scalar.
            _: the gradient of the metrics, which have none.
        """
        scaled_grads: list[Tensor | None] = []
        for saved_grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            if saved_grad is None:
                scaled_grads.append(None)
            else:
                # In place, because the head's gradient of a large vocabulary must not exist twice.
                scaled_grads.append(saved_grad.mul_(grad.to(saved_grad.dtype)).to(dtype))
        # Return one value for each argument of `forward`, in its order: `bias_W`, then seven
        # arguments without a gradient (`weights_KR` to `trains`), then `factors`.
        bias_grad, *factor_grads = scaled_grads
        return bias_grad, *[None] * 7, *factor_grads


def compute_head_loss_at_once(
    rows_KRH: Tensor,
    weights_KR: Tensor,
    head: LogitsHead,
    targets_of: TargetsOf,
    loss_of: LossOf,
    correction: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the same as `compute_head_loss` with all logits at once, as a reference for tests.

    The arguments and the results are those of `compute_head_loss`.
    """
    with torch.no_grad():
        targets = targets_of(slice(None))
    losses = []
    metrics = []
    for k, rows_RH in enumerate(rows_KRH):
        logits_RW = head.finish(head.linear(rows_RH))
        if correction is not None:
            logits_RW = logits_RW + correction[0][k] @ correction[1].T
        losses_R, metrics_MR = loss_of(logits_RW, targets, k)
        losses.append(losses_R)
        metrics.append(metrics_MR)
    total = (torch.stack(losses) * weights_KR).sum()
    return total, torch.stack(metrics, dim=1).detach()
