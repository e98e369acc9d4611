"""The layers of heads compute what torch's own layers compute."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from specdistill.methods.layers import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_with_float32_weights_equals_torchs_bit_for_bit_without_warnings(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(33, 96, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(96, generator=generator)

    def compute(kind: type[nn.RMSNorm]) -> tuple[Tensor, ...]:
        norm, leaf = kind(96, 1e-6), x.clone().requires_grad_()
        norm.load_state_dict({"weight": weight})
        with torch.autocast("cpu", torch.bfloat16):
            normed = norm(leaf)
        normed.backward(gradient)
        return normed.detach(), leaf.grad, norm.weight.grad

    torch.set_warn_always(True)  # torch otherwise warns once per process
    try:
        ours = compute(RMSNorm)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = compute(nn.RMSNorm)
    finally:
        torch.set_warn_always(False)
    assert all(
        torch.equal(one, other) and one.dtype == other.dtype
        for one, other in zip(ours, theirs, strict=True)
    )
