"""A measured run; a tiny target and an EAGLE-3 head for it, in folders and on a Hub, and `specdistill acquire` in this process."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from huggingface_hub import constants

from specdistill.cli import main
from specdistill.methods.load import implementation
from specdistill.methods.target_record import save_draft
from specdistill.targets.frozen import FrozenTarget
from tests.finished_runs import finished_run
from tests.heads import build_head
from tests.loopback_hub import Hub, loopback_hub
from tests.refusals import refused_key
from tests.tiny import tiny_target_model, tiny_tokenizer

TARGET, DRAFT = "someone/Tiny-4L", "someone/Tiny-4L-EAGLE3"


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        return self.err.splitlines()[-1].removeprefix("error: ")

    @property
    def key(self) -> str:
        return refused_key(self.err)


class Acquire:
    """`specdistill acquire key=value …` against the Hub, in a cache of the test's own."""

    def __init__(self, hub: Hub, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.hub, self.home, self._capsys = hub, home, capsys

    def __call__(self, *keys: str, token: str | None = Hub.token, home: Path | None = None, cache: Path | None = None) -> Said:
        """cache: another one than the home's, read without the Hub."""
        here = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": True} if cache else {}
        with self.hub.client(home or self.home, token=token), mock.patch.dict(vars(constants), here):
            code = main(["acquire", *keys])
        return Said(code, *self._capsys.readouterr())

    def head(self, *keys: str, **options: object) -> Said:
        """The EAGLE-3 head for its target."""
        return self("method=eagle3", f"target={TARGET}", f"draft={DRAFT}", *keys, **options)  # type: ignore[arg-type]

    def cached(self, home: Path | None = None) -> set[str]:
        """Names of files in the cache's snapshots."""
        return {path.name for path in (home or self.home).rglob("snapshots/*/**/*") if path.is_file()}


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a report that passes its gate; tests that change it copy it."""
    return finished_run(tmp_path_factory.mktemp("measured"))


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of a target in shards, and of a head that records it."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_target_model().save_pretrained(folder / "target", max_shard_size="200KB")
    tiny_tokenizer().save_pretrained(folder / "target")
    target = FrozenTarget.load(str(folder / "target"))
    save_draft(
        implementation("eagle3"),
        target,
        build_head("eagle3", target, draft_vocabulary=torch.arange(0, 200, 2)),
        folder / "draft",
    )
    return {"target": folder / "target", "draft": folder / "draft"}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


@pytest.fixture
def hub(saved: dict[str, Path], tmp_path: Path) -> Iterator[Hub]:
    """Both repositories, with what nobody needs beside the files."""
    ballast = {
        "pytorch_model.bin": b"pickled",
        "optimizer.pt": b"moments",
        "model-f16.gguf": b"GGUF",
        "training_args.bin": b"pickled",
        "vllm/model.safetensors": b"another layout",
        "report/report.json": b"{}",
    }
    with loopback_hub(tmp_path / "loopback") as made:
        made.create(TARGET, {**files_of(saved["target"]), "pytorch_model.bin": b"pickled"})
        made.create(DRAFT, {**files_of(saved["draft"]), **ballast}, card=f"---\nbase_model: {TARGET}\n---\n", tags=("eagle3",))
        made.tag(DRAFT, "v1")
        yield made


@pytest.fixture
def acquire(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Acquire:
    return Acquire(hub, tmp_path / "home", capsys)
