"""bench/train.py measures speculators 0.9, too: a step of its trainers has our loss."""

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
    monkeypatch.setattr(bench, "uses_bf16", lambda: False)


def test_a_step_of_speculators_has_our_loss() -> None:
    found = bench.measure_step(bench.Options(**TINY, row_lengths=[64, 16]))
    check_losses(found["layouts"])


def test_a_step_of_blocks_has_our_loss() -> None:
    """Every token that may be an anchor is one, so that neither side draws anchors.

    Ours has one anchor more in each document, the token before the first one with loss, so that the
    two means differ a little; test_speculators_blocks.py compares the losses of the anchors that
    both have.
    """
    blocks = {"block_size": 4, "num_anchors": TINY["num_tokens"]}
    check_losses(
        bench.measure_block(bench.Options(**TINY, row_lengths=[64, 16], **blocks))["layouts"],
        rel_of_theirs=0.01,
    )


def check_losses(layouts: list[dict[str, Any]], *, rel_of_theirs: float = 1e-4) -> None:
    for layout in layouts:
        losses = {name: trainer["loss"] for name, trainer in layout["trainers"].items()}
        assert losses.keys() == {"ours", "plain", "sdpa", "eager"}
        assert losses["plain"] == pytest.approx(losses["ours"], rel=1e-4)
        assert losses["eager"] == pytest.approx(losses["sdpa"], rel=1e-4)
        assert losses["sdpa"] == pytest.approx(losses["ours"], rel=rel_of_theirs)
        assert layout["ratios"].keys() == {"plain", "sdpa", "eager"}
