"""Training on a stream as a user starts it: killed in mid-epoch it resumes to the same losses, and processes share the rows."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from specdistill.command import run
from specdistill.methods.recipe import Recipe
from tests.launches import finish, start, tiny_files, wait_for
from tests.scripts import load_script
from tests.tiny import input_keys


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("streaming")
    tiny_files(path)
    rows = [json.dumps({"text": f"Row {index} says {index * 7} and then again {index * 7}."}) for index in range(400)]
    (path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return path


def keys(folder: Path, output: Path, *more: str) -> list[str]:
    given = [
        *input_keys(folder),
        "data.streaming=true",
        "data.buffer_size=16",
        "method=eagle",
        "loss.noise=0.1",
        "draft.ttt_steps=2",
        "train.max_steps=16",
        "train.per_device_train_batch_size=2",
        "train.gradient_accumulation_steps=2",
        "train.learning_rate=1e-3",
        "train.logging_steps=1",
        "train.eval_strategy=steps",
        "train.eval_steps=8",
        "train.save_steps=3",
        "train.report_to=none",
        f"train.output_dir={output}",
    ]
    return [*given, *more]


def log(run: Path) -> list[dict[str, float]]:
    entries = json.loads((run / "run" / "history.json").read_text(encoding="utf-8"))["log"]
    timed = ("runtime", "per_second", "total_flos", "train_loss")  # of this command's steps alone
    return [{name: value for name, value in entry.items() if not name.endswith(timed)} for entry in entries]


@pytest.mark.long  # launches
@pytest.mark.distributed
@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_run_resumes_in_mid_epoch_to_the_same_losses(folder: Path, tmp_path: Path, processes: int) -> None:
    def begun(output: str, *more: str) -> "subprocess.Popen[str]":
        config = "cpu" if processes == 1 else "ddp"
        return start(*keys(folder, tmp_path / output, *more), num_processes=processes, config=config)

    whole = begun("whole")
    said = finish(whole)
    assert whole.returncode == 0, said
    killed = begun("killed")
    wait_for(tmp_path / "killed" / "checkpoint-6", killed)
    os.killpg(killed.pid, signal.SIGKILL)
    finish(killed)
    assert not (tmp_path / "killed" / "draft").exists()
    place = json.loads((tmp_path / "killed" / "checkpoint-6" / "stream_0.json").read_text(encoding="utf-8"))
    assert place["buffer"] > 0 and place["taken"] > 0, place  # within an epoch, and within a buffer
    if processes == 2:
        alone = start(*keys(folder, tmp_path / "killed", "train.per_device_train_batch_size=4"), num_processes=1, config="cpu")
        said = finish(alone)
        assert (
            alone.returncode != 0 and "error: accelerate launch --num_processes: got 1, expected 2, whose places in" in said
        ), said
    resumed = begun("killed")
    said = finish(resumed)
    assert resumed.returncode == 0, said
    assert log(tmp_path / "killed") == log(tmp_path / "whole")
    weights = [(tmp_path / run / "draft" / "model.safetensors").read_bytes() for run in ("whole", "killed")]
    assert weights[0] == weights[1]
    if processes == 2:
        places = [json.loads(path.read_text()) for path in sorted((tmp_path / "whole" / "checkpoint-15").glob("stream_*.json"))]
        assert len(places) == 2


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("train.max_steps=-1", "train.max_steps: got none with data.streaming=true, expected a number of steps"),
        ("train.eval_strategy=epoch", "train.eval_strategy: got epoch with data.streaming=true, expected steps"),
        ("train.dataloader_num_workers=1", "train.dataloader_num_workers: got 1 with data.streaming=true, expected 0"),
        ("hidden_states={mode: hybrid, path: x}", "data.streaming: got true with hidden_states.mode=hybrid, expected false"),
        ("data.near_duplicates=0.8", "data.near_duplicates: got 0.8, expected null: it is read only without data.streaming"),
    ],
)
def test_what_a_stream_does_not_show_is_refused(
    folder: Path, tmp_path: Path, key: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(load_script("train/eagle.py").main, Recipe, keys(folder, tmp_path / "run", key)) == 2
    assert f"error: {message}" in capsys.readouterr().err
