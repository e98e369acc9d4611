"""Checkpoints: which one a run resumes from when some are damaged, which ones go, and which launch
can resume one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specdistill.common.documents import parse_json
from specdistill.common.errors import ResourceError
from specdistill.training.checkpoints import (
    check_launch,
    find_checkpoint,
    find_complete_steps,
    list_steps,
    prune,
    publish_checkpoint,
    saving,
)
from tests.refusals import refused


def save_checkpoint(run: Path, step: int, best: int | None = None, **launch: Any) -> Path:
    """Save a checkpoint as training does, with the step `best` as the best so far."""
    staging = find_checkpoint(run / "saving", step)
    (staging / "draft").mkdir(parents=True)
    for rank in (0, 1):
        (staging / f"rng_state_{rank}.pth").touch()
    (staging / "draft" / "config.json").write_text("{}")
    save_file({"fc.weight": torch.zeros(2, 3)}, staging / "model.safetensors")
    place = None if best is None else str(find_checkpoint(run, best))
    (staging / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": place}))
    publish_checkpoint(staging, run, {"sharding": "none", "processes": 2, "rows": 8, **launch}, 1.0)
    return find_checkpoint(run, step)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def remove(path: Path) -> None:
    path.unlink()


def change_best(best: str) -> Callable[[Path], None]:
    """Return a function that changes the best checkpoint of a state, whose manifest still fits."""

    def damage(path: Path) -> None:
        path.write_text(f'{{"best_model_checkpoint": {best}}}')
        manifest = path.with_name("manifest.json")
        names = json.loads(manifest.read_text())
        names["files"][path.name] = path.stat().st_size
        manifest.write_text(json.dumps(names))

    return damage


@pytest.mark.parametrize(
    ("damage", "name", "message"),
    [
        (cut, "model.safetensors", "model.safetensors has 103 of 104 bytes"),
        (remove, "draft/config.json", "it has no draft/config.json"),
        (remove, "manifest.json", "it has no manifest.json"),
        (lambda path: path.write_text('{"files": '), "manifest.json", "its manifest.json"),
        (lambda path: path.write_text("[]"), "manifest.json", "its manifest.json"),
        (lambda path: path.write_text('{"files": []}'), "manifest.json", "its manifest.json"),
        (
            lambda path: path.write_bytes(bytes(path.stat().st_size)),
            "trainer_state.json",
            "its trainer_state.json",
        ),
        (change_best("[4, 6]"), "trainer_state.json", "its trainer_state.json cannot be read"),
        (change_best("16"), "trainer_state.json", "its trainer_state.json cannot be read"),
        (change_best('{"a": 1}'), "trainer_state.json", "its trainer_state.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any, name: str, message: str
) -> None:
    for step in (2, 4, 10):
        save_checkpoint(tmp_path, step)
    assert find_complete_steps(tmp_path) == [10, 4, 2] and not caplog.records
    damage(find_checkpoint(tmp_path, 10) / name)
    assert find_complete_steps(tmp_path) == [4, 2]
    assert [
        record.getMessage().startswith(f"{find_checkpoint(tmp_path, 10)} is skipped: {message}")
        for record in caplog.records
    ] == [True]


def test_a_checkpoint_whose_best_is_damaged_is_skipped(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save_checkpoint(tmp_path, step, best=None if step == 2 else 4)
    cut(find_checkpoint(tmp_path, 4) / "model.safetensors")
    assert find_complete_steps(tmp_path) == [2]
    shutil.rmtree(find_checkpoint(tmp_path, 4))
    assert find_complete_steps(tmp_path) == [2]


def test_checkpoints_that_name_each_other_the_best_are_complete(tmp_path: Path) -> None:
    for step, best in ((2, 4), (4, 2)):
        save_checkpoint(tmp_path, step, best=best)
    assert find_complete_steps(tmp_path) == [4, 2]


def test_a_skipped_checkpoint_is_replaced(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 2)
    cut(find_checkpoint(tmp_path, 2) / "model.safetensors")
    save_checkpoint(tmp_path, 2)
    assert find_complete_steps(tmp_path) == [2]


@pytest.mark.parametrize(
    ("limit", "left"), [(None, [2, 4, 8, 16]), (3, [4, 8, 16]), (2, [4, 16]), (1, [4, 16])]
)
def test_the_newest_and_the_best_are_never_removed(
    tmp_path: Path, limit: int | None, left: list[int]
) -> None:
    for step in (2, 4, 8, 16):
        save_checkpoint(tmp_path, step)
    prune(tmp_path, limit, {find_checkpoint(tmp_path, 4), find_checkpoint(tmp_path, 16)})
    assert list_steps(tmp_path) == left


@pytest.mark.parametrize(
    ("sharding", "environment", "processes", "batch", "key"),
    [
        ("none", {}, 1, 8, None),
        ("none", {}, 2, 4, None),
        ("none", {}, 2, 8, "accelerate launch"),
        ("none", {"ACCELERATE_USE_FSDP": "true"}, 2, 4, "accelerate launch"),
        ("zero2", {"ACCELERATE_USE_FSDP": "true"}, 2, 4, "accelerate launch"),
        ("zero2", {"ACCELERATE_USE_DEEPSPEED": "true"}, 2, 4, "accelerate launch"),
        ("zero3", {"ACCELERATE_USE_DEEPSPEED": "true"}, 2, 4, None),
        ("fsdp", {"ACCELERATE_USE_FSDP": "true"}, 1, 8, "accelerate launch"),
    ],
)
def test_a_launch_that_cannot_resume_a_checkpoint_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sharding: str,
    environment: dict[str, str],
    processes: int,
    batch: int,
    key: str | None,
) -> None:
    folder = save_checkpoint(tmp_path, 2, sharding=sharding)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    arguments: Any = SimpleNamespace(
        world_size=processes,
        process_index=0,
        train_batch_size=batch,
        gradient_accumulation_steps=1,
        deepspeed_plugin=SimpleNamespace(zero_stage=3),
    )
    if key is None:
        check_launch(folder, arguments)
        assert len(caplog.records) == (processes != 2)
    else:
        with refused(key):
            check_launch(folder, arguments)


def test_a_machine_under_another_number_than_when_it_saved_is_refused(tmp_path: Path) -> None:
    """With train.save_on_each_node, a machine has only the random states of its own processes; the
    Trainer would resume without them."""
    folder = save_checkpoint(tmp_path, 2)
    (folder / "rng_state_1.pth").unlink()
    launch: Any = SimpleNamespace(
        world_size=2, process_index=0, train_batch_size=4, gradient_accumulation_steps=1
    )
    check_launch(folder, launch)
    launch.process_index = 1
    with refused("accelerate launch --machine_rank", folder):
        check_launch(folder, launch)


def test_each_machine_names_the_checkpoints_that_it_skips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remove(save_checkpoint(tmp_path, 2) / "manifest.json")
    for rank, local_rank in ((0, 0), (1, 1), (2, 0)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        assert find_complete_steps(tmp_path) == []
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed")]
)
def test_a_full_disk_ends_a_save_in_one_line_that_names_the_checkpoint(error: Exception) -> None:
    with pytest.raises(ResourceError, match="checkpoint-2"), saving(Path("checkpoint-2")):
        raise error


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not fit"), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_an_error_that_is_no_disk_fault_is_raised_unchanged(error: RuntimeError) -> None:
    with pytest.raises(type(error), match=str(error)), saving(Path("checkpoint-2")):
        raise error


def test_an_unknown_duration_is_not_written(tmp_path: Path) -> None:
    """The last checkpoint of a resumed run may not name its duration."""
    staging = find_checkpoint(tmp_path / "saving", 2)
    staging.mkdir(parents=True)
    publish_checkpoint(staging, tmp_path, {}, float("nan"))
    assert parse_json((find_checkpoint(tmp_path, 2) / "manifest.json").read_text()) == {
        "files": {},
        "launch": {},
    }
