"""The ledger of a step agrees with a step counted by hand and with torch's own counters."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

from specdistill.advice.plan.accounting import Device, Ledger


def test_the_ledger_of_a_linear_layer_and_gelu_is_that_counted_by_hand():
    with FakeTensorMode():
        linear, x = nn.Linear(4, 16, bias=False), torch.empty(8, 4)
        linear.weight.grad = torch.empty_like(linear.weight)
        with Ledger() as ledger:
            nn.functional.gelu(linear(x)).sum().backward()
    # h and gelu(h) are [8, 16] float32, 512 bytes; the gradient of the weight is [16, 4], 256; sums
    # are 4.
    gelu, total, ones, gelu_backward, accumulate = (
        512 + 512,
        512 + 4,
        4,
        4 + 512 + 512,
        256 + 256 + 256,
    )
    assert ledger.peak == 512 + 4 + 4 + 512  # h, the sum, its gradient, and the gradient of h
    assert ledger.traffic == gelu + total + ones + gelu_backward + accumulate
    assert ledger.flops == 2 * (2 * 8 * 4 * 16)  # h and the gradient of the weight
    assert ledger.live == 0


def test_views_lookups_and_copies_count_only_the_bytes_that_they_move():
    with FakeTensorMode():
        table, ids, x = torch.empty(1000, 8), torch.empty(4, dtype=torch.long), torch.empty(4, 8)
        with Ledger() as ledger:
            x.t().unsqueeze(0).expand(7, -1, -1)
        assert (ledger.peak, ledger.traffic, ledger.flops) == (0, 0, 0)
        with Ledger() as ledger:
            nn.functional.embedding(ids, table)  # 4 of 1000 rows of 32 bytes
        assert ledger.traffic == 32 + 128 + 128
        with Ledger() as ledger:
            torch.empty(4, 8).copy_(x)
        assert (ledger.traffic, ledger.peak) == (128 + 128, 128)


def test_a_shape_that_depends_on_values_is_an_error():
    with FakeTensorMode():
        x, mask = torch.empty(4, 8), torch.empty(4, dtype=torch.bool)
        with Ledger(), pytest.raises(DynamicOutputShapeException):
            x[mask]


def test_the_ledger_counts_as_torch_counts():
    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(x).float().log_softmax(-1).sum()
        loss.backward()

    with FakeTensorMode():
        net: Any = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.LayerNorm(64), nn.Linear(64, 500))
        x = torch.empty(128, 32)
        for parameter in net.parameters():
            parameter.grad = torch.empty_like(parameter)
        with Ledger() as ledger:
            step()
        with FlopCounterMode(display=False) as flops:
            step()
        tracker = MemTracker()
        tracker.track_external(net)
        with tracker:
            step()
    assert ledger.flops == flops.get_total_flops()
    (held,) = tracker.get_tracker_snapshot("peak").values()
    # Parameters stand with their gradients, which the ledger does not count.
    standing = sum(2 * parameter.numel() * parameter.itemsize for parameter in net.parameters())
    assert ledger.peak == held["Total"] - standing


def test_a_step_takes_the_time_of_its_products_and_of_its_traffic():
    device = Device("any", flops=100.0, bandwidth=10.0)
    step = Ledger()
    step.traffic, step.flops = 16, 60
    # (60 + 40) / 50 and 16 / 8 seconds
    assert device.estimate_tokens_per_second(step, 12, other_flops=40) == pytest.approx(
        12 / (2 + 2)
    )
