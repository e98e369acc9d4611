"""Weights of drafted positions."""

import torch

from specdistill.training.objective import compute_d_pace_weights, compute_geometric_weights


def test_geometric_weights_sum_to_one() -> None:
    weights = compute_geometric_weights(0.5, 3)
    assert torch.allclose(weights, torch.tensor([4.0, 2.0, 1.0]) / 7)


def test_d_pace_is_the_gradient_of_the_smoothed_expected_length() -> None:
    """Autograd computes it: the weight of position k is the derivative of sum_j prod_{i<=j} s_i by
    log s_k, divided by K."""
    torch.manual_seed(0)
    chances, alpha = torch.rand(5, 4), 0.3
    has_loss = torch.tensor([[1, 1, 1, 1]] * 3 + [[1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    logs = (alpha + (1 - alpha) * chances).log().requires_grad_()
    length = (logs.exp().cumprod(1) * has_loss).sum()
    (gradient,) = torch.autograd.grad(length, logs)
    assert torch.allclose(compute_d_pace_weights(chances, has_loss, alpha), gradient / 4, atol=1e-6)
