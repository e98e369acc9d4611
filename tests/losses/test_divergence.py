import math

import pytest
import torch

from specdistill.losses.divergence import acceptance, forward_kl


def logits(seed: int, rows: int = 4, width: int = 6) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def test_forward_kl_is_zero_at_equality() -> None:
    x = logits(0)
    assert float(forward_kl(x, x.softmax(-1)).total) == pytest.approx(0, abs=1e-6)


def test_forward_kl_by_hand() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0]])
    q_logits = torch.tensor([[math.log(0.25), math.log(0.5), math.log(0.25)]])
    loss = forward_kl(q_logits, p)
    assert float(loss.total) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(1), rel=1e-6)
    assert loss.count == 1


def test_forward_kl_gradient_is_q_minus_p() -> None:
    x = logits(1).requires_grad_()
    p = logits(2).softmax(-1)
    forward_kl(x, p).total.backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, x.detach().softmax(-1) - p, atol=1e-6)


def test_forward_kl_does_not_depend_on_how_rows_are_split() -> None:
    x = logits(3).requires_grad_()
    p = logits(4).softmax(-1)
    forward_kl(x, p).total.backward()
    whole = x.grad
    x.grad = None
    for rows in (slice(0, 1), slice(1, 4)):
        forward_kl(x[rows], p[rows]).total.backward()
    assert whole is not None and x.grad is not None
    assert torch.allclose(whole, x.grad, atol=1e-6)


def test_forward_kl_of_no_rows_is_zero_and_differentiable() -> None:
    x = logits(5, rows=0).requires_grad_()
    loss = forward_kl(x, x.detach().softmax(-1))
    loss.total.backward()
    assert (float(loss.total.detach()), loss.count) == (0.0, 0)


def test_acceptance_is_one_minus_total_variation() -> None:
    p, q = logits(6).softmax(-1), logits(7).softmax(-1)
    assert torch.allclose(acceptance(q, p), 1 - 0.5 * (p - q).abs().sum(-1), atol=1e-6)
    assert torch.allclose(acceptance(p, p), torch.ones(4), atol=1e-6)
