"""What tests of `specdistill plan` share."""

from types import SimpleNamespace

import pytest

from specdistill.advice.plan import estimates


@pytest.fixture
def given_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give `specdistill plan` the costs of a training step, which it computes for seconds."""
    step = SimpleNamespace(peak=1, traffic=1, flops=1)
    monkeypatch.setattr(estimates, "count_training_step", lambda *arguments, **shape: step)
