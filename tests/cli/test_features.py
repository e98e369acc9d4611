"""`specdistill data features` and training from its store, killed, in two processes and offline."""

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
def whole_store(keys: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a store that was made without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    done = specdistill(*build_features_arguments(keys, folder))
    assert done.returncode == 0, done.stderr
    assert len(read_shards(folder)) > 10
    return folder


def build_features_arguments(keys: Sequence[str], folder: Path, *more: str) -> list[str]:
    store_keys = [
        "hidden_states.mode=hybrid",
        f"hidden_states.path={folder}",
        "hidden_states.shard_tokens=256",
    ]
    return ["data", "features", *keys, *store_keys, "hidden_states.dtype=float32", *more]


def run_in_new_process(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own.

    Launches need one, and so do files that nothing may hold open afterwards.
    """
    line = [sys.executable, "-m", "specdistill", *words]
    return subprocess.run(
        line, env=environment(), capture_output=True, text=True, check=False, timeout=300
    )


def run_killed(place: Any, name: str, number: int, words: Sequence[str]) -> None:
    """Run a command in a process that is killed at the numbered call of a function."""
    calls, original = itertools.count(1), getattr(place, name)

    def call(*arguments: Any, **more: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **more)

    def work() -> None:
        setattr(place, name, call)
        specdistill(*words)

    process = fork(work)
    process.join()
    assert process.exitcode == -signal.SIGKILL


def read_shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.long  # three processes, each with a target of its own
def test_data_features_resumes_after_kills_to_the_same_bytes(
    keys: list[str], whole_store: Path, tmp_path: Path
) -> None:
    """The next process keeps the files that are there and makes only the missing ones."""
    for number in (2, 3):
        before = len(read_shards(tmp_path))
        run_killed(filling, "write_shard", number, build_features_arguments(keys, tmp_path))
        existing_files = {
            path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")
        }
        assert len(existing_files) == before + number - 1
    ended = specdistill(*build_features_arguments(keys, tmp_path))
    assert ended.returncode == 0 and "made again" not in ended.stderr
    assert read_shards(tmp_path) == read_shards(whole_store)
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in existing_files} == existing_files
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["lock", *read_shards(whole_store)]
    )


@pytest.mark.long  # launches two processes
@pytest.mark.distributed
def test_two_processes_fill_a_store_and_train_from_it(
    keys: list[str], whole_store: Path, tmp_path: Path
) -> None:
    two = ["launch=ddp", "num_processes=2"]
    filled = run_in_new_process(build_features_arguments(keys, tmp_path / "store", *two))
    assert filled.returncode == 0, filled.stderr[-3000:]
    assert read_shards(tmp_path / "store") == read_shards(whole_store)
    assert train_and_read_history(
        tmp_path, "offline", keys, whole_store, *two
    ) == train_and_read_history(tmp_path, "online", keys, None, *two)


def build_training_arguments(
    keys: Sequence[str], folder: Path, store: Path | None, *more: str
) -> list[str]:
    line = ["train", *keys, f"train.output_dir={folder}", *more]
    kept = [
        "hidden_states.mode=offline",
        f"hidden_states.path={store}",
        "hidden_states.dtype=float32",
    ]
    return [*line, *(kept if store else [])]


def train_and_read_history(
    folder: Path, name: str, keys: Sequence[str], store: Path | None, *more: str
) -> list[dict[str, float]]:
    """Train, and return the losses, norms of gradients and metrics of its steps."""
    words = build_training_arguments(keys, folder / name, store, *more)
    ended = run_in_new_process(words) if more else specdistill(*words)
    assert ended.returncode == 0, ended.stderr[-3000:]
    state = json.loads(
        (folder / name / "checkpoint-4" / "trainer_state.json").read_text(encoding="utf-8")
    )
    machine_suffixes = ("runtime", "per_second", "memory_gib")
    return [
        {key: value for key, value in entry.items() if not key.endswith(machine_suffixes)}
        for entry in state["log_history"]
    ]
