"""The chunked loss equals its plain form and autograd for every divergence, in less memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from specdistill.targets.anatomy import LogitsHead
from specdistill.training.losses.divergence import DIVERGENCES, acceptance, build_divergence
from specdistill.training.losses.head_loss import compute_head_loss, compute_head_loss_at_once

K, R, H, W = 3, 50, 8, 33
Form = Callable[..., tuple[Tensor, Tensor]]


class Case:
    """Rows, a head, and target distributions; the loss of each row, and its expected acceptance as
    a metric."""

    def __init__(
        self,
        divergence: Any = "forward_kl",
        *,
        trains_head: bool = True,
        bias: bool = False,
        cap: float | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.rows = torch.randn(K, R, H, requires_grad=True)
        self.linear = nn.Linear(H, W, bias=bias).requires_grad_(trains_head)
        self.head = LogitsHead(self.linear, cap=cap)
        self.probs_RW = torch.randn(R, W).mul(2).softmax(-1)
        self.weights_KR = torch.rand(K, R) * (torch.rand(K, R) < 0.8)
        self.divergence = build_divergence(divergence)

    def losses(self, logits_rW: Tensor, probs_rW: Tensor, k: int) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            accepted_r = acceptance(logits_rW.float().softmax(-1), probs_rW)
        return (1 + k) * self.divergence(logits_rW, probs_rW), torch.stack(
            (accepted_r, accepted_r + k)
        )

    def run(self, form: Form, **options: Any) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """Return value, metrics and gradients of the loss, which is scaled as in the trainer."""
        for tensor in (self.rows, *self.linear.parameters()):
            tensor.grad = None
        total, metrics = form(
            self.rows,
            self.weights_KR,
            self.head,
            lambda rows: self.probs_RW[rows],
            self.losses,
            **options,
        )
        (total / 7).backward()
        return (
            total.detach(),
            metrics,
            [tensor.grad for tensor in (self.rows, *self.linear.parameters())],
        )


def assert_same_gradients(
    grads: list[Tensor | None], expected: list[Tensor | None], **tolerance: float
) -> None:
    for grad, wanted in zip(grads, expected, strict=True):
        assert (grad is None) == (wanted is None)
        assert (
            grad is None
            or wanted is None
            or torch.allclose(grad, wanted, **{"rtol": 1e-4, "atol": 1e-6, **tolerance})
        )


@pytest.mark.parametrize(
    ("block", "chunk"), [(1, 1), (20, 7), (33, 4), (3 * R, 7), (3 * R, R), (1024, 1024)]
)
@pytest.mark.parametrize(
    "divergence",
    [*DIVERGENCES, [{"name": "lk", "weight": 0.3}, {"name": "jsd", "beta": 0.2, "weight": 2}]],
    ids=str,
)
def test_value_metrics_and_gradients_are_those_of_the_plain_form(
    divergence: Any, block: int, chunk: int
) -> None:
    case = Case(divergence)
    total, metrics, grads = case.run(compute_head_loss, block_rows=block, chunk_bytes=chunk * 4 * W)
    expected_total, expected_metrics, expected = case.run(compute_head_loss_at_once)
    assert float(total) == pytest.approx(float(expected_total), rel=1e-5)
    assert metrics.shape == (2, K, R) and not metrics.requires_grad
    assert torch.allclose(metrics, expected_metrics, atol=1e-6)
    assert all(wanted is not None and float(wanted.abs().max()) > 1e-3 for wanted in expected)
    assert_same_gradients(grads, expected)


@pytest.mark.parametrize(
    "options",
    [{"trains_head": False}, {"bias": True}, {"bias": True, "trains_head": False}, {"cap": 2.0}],
    ids=str,
)
def test_frozen_biased_and_capped_heads_match_the_plain_form(options: dict[str, Any]) -> None:
    case = Case(**options)
    (total, _, grads), (expected_total, _, expected) = (
        case.run(compute_head_loss, block_rows=16),
        case.run(compute_head_loss_at_once),
    )
    assert float(total) == pytest.approx(float(expected_total), rel=1e-5)
    assert_same_gradients(grads, expected)


def test_rows_need_not_take_a_gradient() -> None:
    case = Case()
    case.rows = case.rows.detach()
    _, _, (rows_grad, weight_grad) = case.run(compute_head_loss, block_rows=16)
    assert rows_grad is None and weight_grad is not None
    with torch.no_grad():
        total, _ = compute_head_loss(
            case.rows, case.weights_KR, case.head, lambda rows: case.probs_RW[rows], case.losses
        )
    assert not total.requires_grad and float(total) == pytest.approx(
        float(case.run(compute_head_loss_at_once)[0]), rel=1e-5
    )


def test_under_autocast_matrices_are_multiplied_in_16_bits_and_the_heads_gradient_is_float32() -> (
    None
):
    case = Case()
    with torch.autocast("cpu", torch.bfloat16):
        total, _, grads = case.run(compute_head_loss, block_rows=16)
        expected_total, _, expected = case.run(compute_head_loss_at_once)
    assert (
        float(total)
        == pytest.approx(float(expected_total), rel=1e-5)
        != float(case.run(compute_head_loss_at_once)[0])
    )
    for grad, wanted in zip(grads, expected, strict=True):
        assert grad is not None and wanted is not None and grad.dtype == torch.float32
        assert torch.allclose(grad, wanted, rtol=0, atol=2e-2 * float(wanted.abs().max()))


class LargestTensor(TorchDispatchMode):
    """A mode that records the elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max(
            [
                self.numel,
                *(tensor.numel() for tensor in tree_iter(result) if isinstance(tensor, Tensor)),
            ]
        )
        return result


def test_no_tensor_is_larger_than_a_block_s_logits() -> None:
    block, largest = 30, {}
    for name, form, options in (
        ("blocks", compute_head_loss, {"block_rows": block}),
        ("plain", compute_head_loss_at_once, {}),
    ):
        case = Case()
        case.probs_RW = case.probs_RW[:1]  # all rows share one, which takes no memory
        with LargestTensor() as mode:
            total, _ = form(
                case.rows,
                case.weights_KR,
                case.head,
                lambda _, probs_RW=case.probs_RW: probs_RW,
                case.losses,
                **options,
            )
            total.backward()
        largest[name] = mode.numel
    assert largest["blocks"] <= max(block * W, K * R * H) < largest["plain"] == R * W
