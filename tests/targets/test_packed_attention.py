"""The operators of packed attention: the checks of torch, and their FLOPs.

tests/methods/chains tests their values.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from specdistill.targets.packed_attention import (
    attend_cached,
    attend_packed,
    attend_packed_backward,
)

CUMULATIVE = torch.tensor([0, 0, 5, 6, 32, 32], dtype=torch.int32)


def draw_tensors(*shapes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(32, *shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("value_size", [16, 12])
def test_the_operators_pass_torchs_own_checks(window: int | None, value_size: int) -> None:
    query, key, value, grad = draw_tensors((4, 16), (2, 16), (2, value_size), (4, value_size))
    packing: tuple[Any, ...] = (CUMULATIVE, 26, window)
    torch.library.opcheck(attend_packed, (query, key, value, *packing))
    output, lse = attend_packed(query, key, value, *packing)
    torch.library.opcheck(attend_packed_backward, (grad, query, key, value, output, lse, *packing))


@pytest.mark.parametrize("window", [None, 3])
def test_a_scale_acts_on_the_scores_as_on_the_query(window: int | None) -> None:
    query, key, value = draw_tensors((4, 16), (2, 16), (2, 12))
    scaled, lse = attend_packed(query, key, value, CUMULATIVE, 26, window, 0.1)
    plain, plain_lse = attend_packed(query * (0.1 * 4), key, value, CUMULATIVE, 26, window)
    assert torch.allclose(scaled, plain, atol=1e-6) and torch.allclose(lse, plain_lse, atol=1e-5)
    torch.library.opcheck(attend_packed, (query, key, value, CUMULATIVE, 26, window, 0.1))


def test_the_gradient_does_not_depend_on_memory_layout() -> None:
    """torch's CPU kernel reads heads that are not contiguous as if they were."""
    dense = draw_tensors((4, 16), (2, 16), (2, 16), (4, 16))
    results = []
    for query, key, value, grad in (dense, [x.mT.contiguous().mT for x in dense]):
        output, lse = attend_packed(query, key, value, CUMULATIVE, 26, None)
        results.append(
            attend_packed_backward(grad, query, key, value, output, lse, CUMULATIVE, 26, None)
        )
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_flops_are_those_of_the_pairs_that_see_each_other() -> None:
    query, key, value, grad = draw_tensors((4, 16), (2, 16), (2, 12), (4, 12))
    packing: tuple[Any, ...] = (torch.tensor([0, 32], dtype=torch.int32), 32, None)
    pairs = 4 * sum(range(1, 33))  # of 4 heads
    with FlopCounterMode(display=False) as counter:
        output, lse = attend_packed(query, key, value, *packing)
    assert counter.get_total_flops() == 2 * pairs * (16 + 12)
    with FlopCounterMode(display=False) as counter:
        attend_packed_backward(grad, query, key, value, output, lse, *packing)
    assert counter.get_total_flops() == 2 * pairs * (16 + 12 + 16 + 16 + 12)


def attend_with_mask(
    query: Tensor, key: Tensor, value: Tensor, seen_TS: Tensor, scale: float | None = None
) -> Tensor:
    """Return torch's attention over [T, N, d], which has its heads in the second dimension."""
    heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    output = F.scaled_dot_product_attention(
        *heads_first, attn_mask=seen_TS, scale=scale, enable_gqa=True
    )
    return output[0].transpose(0, 1)


@pytest.mark.parametrize(("window", "scale"), [(None, None), (3, None), (None, 0.1)])
def test_the_gradient_is_that_of_torchs_masked_attention(
    window: int | None, scale: float | None
) -> None:
    document = torch.bucketize(torch.arange(32), CUMULATIVE, right=True)
    ago = torch.arange(32)[:, None] - torch.arange(32)
    seen = (document[:, None] == document) & (ago >= 0) & (ago < (window or 32))
    tensors, grad = (
        [x.double().requires_grad_() for x in draw_tensors((4, 16), (2, 16), (2, 12))],
        draw_tensors((4, 12))[0].double(),
    )
    output, _ = attend_packed(*tensors, CUMULATIVE, 26, window, scale)
    ours = torch.autograd.grad(output, tensors, grad)
    theirs = torch.autograd.grad(attend_with_mask(*tensors, seen, scale), tensors, grad)
    assert all(
        torch.allclose(one, other, atol=1e-12) for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("count", [6, 32])
@pytest.mark.parametrize(("window", "scale"), [(None, None), (5, None), (32, None), (None, 0.1)])
def test_the_last_positions_see_those_that_are_cached(
    window: int | None, scale: float | None, count: int
) -> None:
    query, key, value = draw_tensors((4, 16), (2, 16), (2, 12))
    ago = torch.arange(32)[:, None] - torch.arange(32)
    whole = attend_with_mask(query, key, value, (ago >= 0) & (ago < (window or 32)), scale)
    heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (query[-count:], key, value))
    assert torch.allclose(attend_cached(*heads_first, window, scale)[0], whole[-count:], atol=1e-6)
