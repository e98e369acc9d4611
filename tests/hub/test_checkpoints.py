"""train.push_to_hub on a Hub that the real client is told of: what is on the branch, who may see it, what an upload that fails costs."""

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from specdistill.training.resumable import ResumableTrainer
from tests.loopback_hub import Fault, Hub, loopback_hub
from tests.refusals import refused_key
from tests.tiny import write_inputs
from tests.train.runs import train

PUSH = (
    "train.push_to_hub=true",
    "train.hub_model_id=org/name",
    "train.max_steps=4",
    "train.save_steps=2",
    "train.eval_steps=2",
)
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    write_inputs(tmp_path)
    with loopback_hub(tmp_path / "hub") as hub, hub.client(tmp_path / "home"):
        yield hub


def test_checkpoints_are_on_a_private_branch_and_one_is_trained_further(hub: Hub, tmp_path: Path) -> None:
    release = {"config.json": b"{}", "report/report.json": b"{}"}
    hub.create("org/name", release, private=True)
    assert train(tmp_path, tmp_path / "run", *PUSH).returncode == 0
    assert hub.files("org/name").keys() == release.keys()
    assert hub.files("org/name", "checkpoints").keys() == {"config.json", WEIGHTS, "README.md"}  # nothing of the release
    last, first = hub.commits("org/name", "checkpoints")[:2]
    for step, commit in ((2, first), (4, last)):
        files = hub.files("org/name", commit)
        assert files[WEIGHTS].read_bytes() == (tmp_path / "run" / f"checkpoint-{step}" / "draft" / WEIGHTS).read_bytes()
        card = ModelCard(files["README.md"].read_text())
        assert f"Ungated: step {step} of" in card.text and "ungated" in (card.data.tags or [])
    again = ("draft.init=org/name@checkpoints", "train.learning_rate=0.0")
    assert train(tmp_path, tmp_path / "again", *again).returncode == 0
    assert (tmp_path / "again" / "draft" / WEIGHTS).read_bytes() == hub.files("org/name", last)[WEIGHTS].read_bytes()


def test_a_stopped_run_has_pushed_what_it_saved(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, training_step = itertools.count(1), ResumableTrainer.training_step

    def interrupt(self: ResumableTrainer, *args: Any, **kwargs: Any) -> Any:
        if next(steps) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return training_step(self, *args, **kwargs)

    monkeypatch.setattr(ResumableTrainer, "training_step", interrupt)
    stopped = train(tmp_path, tmp_path / "run", *PUSH)
    assert stopped.returncode == 143, stopped.stderr
    assert hub.repositories["org/name"].private and hub.files("org/name").keys() == {".gitattributes"}
    (saved,) = (tmp_path / "run").glob("checkpoint-*")
    assert hub.files("org/name", "checkpoints")[WEIGHTS].read_bytes() == (saved / "draft" / WEIGHTS).read_bytes()
    assert train(tmp_path, tmp_path / "run", *PUSH[2:]).returncode == 0  # resumed, without the Hub


def test_a_hub_that_fails_on_the_way_costs_an_upload_and_not_the_run(hub: Hub, tmp_path: Path) -> None:
    hub.inject(Fault("status", "commit", status=403, times=1))
    trained = train(tmp_path, tmp_path / "run", *PUSH)
    assert trained.returncode == 0 and (tmp_path / "run" / "draft").is_dir()
    assert "checkpoint-2 was not pushed (train.hub_model_id: org/name" in trained.stderr
    assert len(hub.commits("org/name", "checkpoints")) == 2  # that of the new repository, and checkpoint-4


@pytest.mark.parametrize("why", ["public", "no token", "no name"])
def test_what_cannot_be_pushed_is_said_before_anything_is_made(hub: Hub, tmp_path: Path, monkeypatch: Any, why: str) -> None:
    hub.create("org/name", {"README.md": b""})
    if why == "no token":
        monkeypatch.delenv("HF_TOKEN")
    refused = train(tmp_path, tmp_path / "run", *(PUSH[:1] if why == "no name" else PUSH))
    assert refused_key(refused.stderr) == "train.hub_model_id" if why != "no token" else "train.hub_model_id" in refused.stderr
    assert refused.returncode in (2, 3) and not (tmp_path / "run").exists()
