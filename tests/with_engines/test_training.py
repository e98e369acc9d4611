"""speculators 0.9 beside us in bench/train.py: a step of its trainers has our loss."""

from typing import Any

import pytest

from tests.scripts import load_script
from tests.with_engines.environments import environment

pytestmark = [pytest.mark.long, pytest.mark.engines]  # speculators in its own environment

bench: Any = load_script("bench/train.py")
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "vocab_size": 200,
    "num_tokens": 64,
    "num_steps": 3,
    "rounds": 2,
    "threads": 1,
}


@pytest.fixture(autouse=True)
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    environment("speculators")
    monkeypatch.setattr(bench, "bf16", lambda: False)


@pytest.mark.parametrize("trains_head", [False, True])
def test_a_step_of_speculators_has_our_loss(trains_head: bool) -> None:
    found = bench.step(bench.Options(**TINY, row_lengths=[64, 16], trains_head=trains_head))
    check(found["layouts"])


def test_a_step_of_blocks_has_our_loss() -> None:
    """Of all tokens that may be anchors: neither side draws some."""
    blocks = {"block_size": 4, "num_anchors": TINY["num_tokens"]}
    check(bench.block(bench.Options(**TINY, row_lengths=[64, 16], **blocks))["layouts"])


def check(layouts: list[dict[str, Any]]) -> None:
    for each in layouts:
        losses = {name: own["loss"] for name, own in each["trainers"].items()}
        assert losses == pytest.approx(
            dict.fromkeys(("ours", "plain", "sdpa", "eager"), losses["ours"]), rel=1e-4
        )
        assert each["ratios"].keys() == {"plain", "sdpa", "eager"}
