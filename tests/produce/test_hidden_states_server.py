"""Features that vLLM writes, in its format: the same as our own pass makes, and one line for a server of something else."""

from pathlib import Path

import pytest
import torch

from specdistill.errors import ResourceError
from specdistill.produce.features import by_target
from specdistill.produce.hidden_states_server import by_servers
from specdistill.targets.frozen import FrozenTarget
from tests.produce.hidden_states_server import running
from tests.refusals import refused
from tests.rows.stores import packed
from tests.tiny import tiny_target_model, tiny_tokenizer

ROWS = list(packed(4))
TIMEOUT = 300.0  # seconds for an answer: on a machine whose cores are all busy a pass takes many times as long


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(tiny_target_model(), tiny_tokenizer(), name="tiny")


@pytest.mark.parametrize("aux_layers", [(3, 1), (), (2, 4)])
def test_servers_make_what_the_target_does(target: FrozenTarget, tmp_path: Path, aux_layers: tuple[int, ...]) -> None:
    """Which share the documents."""
    layers, folders = sorted({*aux_layers, 4}), [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    with running(target, layers, folders[0]) as one, running(target, layers, folders[1]) as other:
        found = by_servers(target, aux_layers, [one, other], TIMEOUT)(ROWS)
    expected = by_target(target, aux_layers, None)(ROWS)
    for features, own in zip(found, expected, strict=True):
        assert features.shape == own.shape and torch.allclose(features, own, atol=1e-5)
    assert not list(tmp_path.rglob("*.*"))


def test_a_server_of_something_else_is_one_line(target: FrozenTarget, tmp_path: Path) -> None:
    with running(target, [1, 2, 4], tmp_path) as more, running(target, [1, 4], tmp_path, dtype=torch.bfloat16) as other:
        for address, what in ((more, "[3, 64] torch.float32"), (other, "[2, 64] torch.bfloat16")):
            with refused("hidden_states.server", f"{address}, which writes {what} "):
                by_servers(target, (1,), [address], TIMEOUT)(ROWS[:1])
    with running(target, [4], None) as plain, pytest.raises(ResourceError, match="start it with ExampleHiddenStatesConnector"):
        by_servers(target, (), [plain], TIMEOUT)(ROWS[:1])
    with pytest.raises(ResourceError, match="does not answer"):
        by_servers(target, (), [plain], TIMEOUT)
