"""Fixtures: a measured run, a tiny target with an EAGLE-3 head, and loopback Hubs."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specdistill.methods.load import load_method
from specdistill.methods.target_record import save_draft
from specdistill.targets.frozen import FrozenTarget
from tests.finished_runs import finished_run
from tests.heads import build_head
from tests.loopback_hub import Hub, loopback_hub
from tests.tiny import tiny_target_model, tiny_tokenizer

NAME = "someone/half-right"


@pytest.fixture(scope="session")
def measured_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a report that passes its gate; tests that change it copy it."""
    return finished_run(tmp_path_factory.mktemp("measured"))


@pytest.fixture
def run(measured_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(measured_run, tmp_path / "run")


@pytest.fixture(scope="session")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of a target in shards and of a head that records it as its target."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_target_model().save_pretrained(folder / "target", max_shard_size="200KB")
    tiny_tokenizer().save_pretrained(folder / "target")
    target = FrozenTarget.load(str(folder / "target"))
    save_draft(
        load_method("eagle3"),
        target,
        build_head("eagle3", target, draft_vocabulary=torch.arange(0, 200, 2)),
        folder / "draft",
    )
    return {"target": folder / "target", "draft": folder / "draft"}


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


@pytest.fixture(params=["lfs", "xet"])
def hub(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    """A Hub that this process asks as the owner, without a pause between its tries."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with loopback_hub(tmp_path / "hub", request.param) as hub, hub.client(tmp_path / "home"):
        yield hub


@pytest.fixture
def lfs_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with loopback_hub(tmp_path / "hub") as hub, hub.client(tmp_path / "home"):
        yield hub


def read_contents(hub: Hub, revision: str) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in hub.files(NAME, revision).items()}
