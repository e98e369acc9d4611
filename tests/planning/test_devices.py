"""Rates and room by hand."""

import pytest

from specdistill.planning.accounting import Account
from specdistill.planning.devices import Device


def test_a_step_takes_the_time_of_its_products_and_of_its_traffic():
    device = Device("any", memory=1000, flops=100.0, bandwidth=10.0)
    step = Account(peak_bytes=0, traffic_bytes=16, flops=60, data_dependent_ops=0)
    # (60 + 40) / 50 and 16 / 8 seconds
    assert device.tokens_per_second(step, 12, other_flops=40) == pytest.approx(12 / (2 + 2))
    assert device.holds(920) and not device.holds(921)
