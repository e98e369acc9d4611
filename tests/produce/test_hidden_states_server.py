"""Features that vLLM writes, in its format: the same as our own pass makes, and one line for a server of something else."""

from pathlib import Path

import pytest
import torch

from specdistill.errors import ResourceError, UserError
from specdistill.produce.features import by_target
from specdistill.produce.hidden_states_server import by_servers
from specdistill.targets.frozen import FrozenTarget
from tests.produce.hidden_states_server import running
from tests.rows.stores import packed
from tests.tiny import tiny_target_model, tiny_tokenizer

ROWS = list(packed(4))
TIMEOUT = 300.0  # seconds for an answer: on a machine whose cores are all busy a pass takes many times as long


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(tiny_target_model(), tiny_tokenizer(), name="tiny")


@pytest.mark.parametrize("aux_layers", [(1, 3), (3, 1), (), (2, 4)])
def test_servers_make_what_the_target_does(target: FrozenTarget, tmp_path: Path, aux_layers: tuple[int, ...]) -> None:
    layers = sorted({*aux_layers, 4})
    with running(target, layers, tmp_path) as address:
        found = by_servers(target, aux_layers, [address], TIMEOUT)(ROWS)
    expected = by_target(target, aux_layers, None)(ROWS)
    assert [tuple(features.shape) for features in found] == [tuple(features.shape) for features in expected]
    for features, own in zip(found, expected, strict=True):
        assert torch.allclose(features, own, atol=1e-5)
    assert not list(tmp_path.iterdir())


def test_servers_share_the_documents(target: FrozenTarget, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    with running(target, [4], folders[0]) as one, running(target, [4], folders[1]) as other:
        found = by_servers(target, (), [one, other], TIMEOUT)(ROWS)
    for features, own in zip(found, by_target(target, (), None)(ROWS), strict=True):
        assert torch.allclose(features, own, atol=1e-5)


def test_a_server_of_something_else_is_one_line(target: FrozenTarget, tmp_path: Path) -> None:
    with running(target, [1, 2, 4], tmp_path) as more, running(target, [1, 4], tmp_path, dtype=torch.bfloat16) as other:
        for address, what in ((more, r"\[3, 64\] torch.float32"), (other, r"\[2, 64\] torch.bfloat16")):
            said = rf"^hidden_states\.server: got {address}, which writes {what} .*expected layers \[1, 4\] of 64 in float32$"
            with pytest.raises(UserError, match=said):
                by_servers(target, (1,), [address], TIMEOUT)(ROWS[:1])
    with running(target, [4], None) as plain, pytest.raises(ResourceError, match="start it with ExampleHiddenStatesConnector"):
        by_servers(target, (), [plain], TIMEOUT)(ROWS[:1])
    with pytest.raises(ResourceError, match="does not answer"):
        by_servers(target, (), [plain], TIMEOUT)
