"""`specdistill data features` and training from its store as a user runs them: killed, in two
processes, offline."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specdistill.data.produce import features as filling
from tests.launches import environment
from tests.processes import fork
from tests.scripts import specdistill
from tests.tiny import SMALL, write_inputs

TRAINED = (
    "draft.ttt_steps=2",
    *SMALL,
    "train.max_steps=4",
    "train.per_device_eval_batch_size=2",
    "train.logging_steps=1",
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [
        *write_inputs(tmp_path_factory.mktemp("inputs"), num_rows=120),
        "method=eagle3",
        *TRAINED,
    ]


@pytest.fixture(scope="module")
def whole(keys: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that was made at once."""
    folder = tmp_path_factory.mktemp("whole")
    done = specdistill(*features(keys, folder))
    assert done.returncode == 0, done.stderr
    assert len(shards(folder)) > 10
    return folder


def features(keys: Sequence[str], folder: Path, *more: str) -> list[str]:
    own = [
        "hidden_states.mode=hybrid",
        f"hidden_states.path={folder}",
        "hidden_states.shard_tokens=256",
    ]
    return ["data", "features", *keys, *own, "hidden_states.dtype=float32", *more]


def run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A process of its own: for launches, and for files that nothing may hold open afterwards."""
    line = [sys.executable, "-m", "specdistill", *words]
    return subprocess.run(
        line, env=environment(), capture_output=True, text=True, check=False, timeout=300
    )


def killed(place: Any, name: str, number: int, words: Sequence[str]) -> None:
    """A process of this command that is killed at the call of a function that has this number."""
    calls, called = itertools.count(1), getattr(place, name)

    def call(*arguments: Any, **more: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return called(*arguments, **more)

    def work() -> None:
        setattr(place, name, call)
        specdistill(*words)

    process = fork(work)
    process.join()
    assert process.exitcode == -signal.SIGKILL


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.long  # three processes, each with a target of its own
def test_a_killed_store_goes_on_to_the_same_bytes(
    keys: list[str], whole: Path, tmp_path: Path
) -> None:
    """A file that is there when the process is killed stays as it is: the next one makes only those
    that are missing."""
    for number in (2, 3):
        before = len(shards(tmp_path))
        killed(filling, "write_shard", number, features(keys, tmp_path))
        there = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
        assert len(there) == before + number - 1
    ended = specdistill(*features(keys, tmp_path))
    assert ended.returncode == 0 and "made again" not in ended.stderr
    assert shards(tmp_path) == shards(whole)
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in there} == there
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["lock", *shards(whole)])


@pytest.mark.long  # launches
@pytest.mark.distributed
def test_two_processes_fill_a_store_and_train_from_it(
    keys: list[str], whole: Path, tmp_path: Path
) -> None:
    two = ["launch=ddp", "num_processes=2"]
    filled = run(features(keys, tmp_path / "store", *two))
    assert filled.returncode == 0, filled.stderr[-3000:]
    assert shards(tmp_path / "store") == shards(whole)
    assert history(tmp_path, "offline", keys, whole, *two) == history(
        tmp_path, "online", keys, None, *two
    )


def training(keys: Sequence[str], folder: Path, store: Path | None, *more: str) -> list[str]:
    line = ["train", *keys, f"train.output_dir={folder}", *more]
    kept = [
        "hidden_states.mode=offline",
        f"hidden_states.path={store}",
        "hidden_states.dtype=float32",
    ]
    return [*line, *(kept if store else [])]


def history(
    folder: Path, name: str, keys: Sequence[str], store: Path | None, *more: str
) -> list[dict[str, float]]:
    """Losses, norms of gradients and metrics of a training's steps."""
    words = training(keys, folder / name, store, *more)
    ended = run(words) if more else specdistill(*words)
    assert ended.returncode == 0, ended.stderr[-3000:]
    state = json.loads(
        (folder / name / "checkpoint-4" / "trainer_state.json").read_text(encoding="utf-8")
    )
    of_the_machine = ("runtime", "per_second", "memory_gib")
    return [
        {key: value for key, value in entry.items() if not key.endswith(of_the_machine)}
        for entry in state["log_history"]
    ]
