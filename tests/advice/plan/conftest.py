"""Fixtures of the tests of `specdistill plan`."""

from types import SimpleNamespace

import pytest

from specdistill.advice.plan import estimates


@pytest.fixture
def given_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give `specdistill plan` the costs of a training step, which it computes for seconds."""
    step = SimpleNamespace(peak=1, traffic=1, flops=1)
    monkeypatch.setattr(estimates, "count_training_step", lambda *arguments, **shape: step)


@pytest.fixture
def no_shipped_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `specdistill plan` find no recipe that is made for the sizes of its target."""
    monkeypatch.setattr(estimates, "list_own_recipes", lambda target: [])
