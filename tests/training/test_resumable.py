"""Runs that are killed, stopped or meet a full disk, through train/eagle.py, and resumed: the draft
is that of an uninterrupted run."""

import itertools
import json
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from specdistill.training.history import read_history
from specdistill.training.resumable import ResumableTrainer
from tests.launches import tiny_files
from tests.processes import needs_gradients_in_forks, run_processes
from tests.refusals import refused_key
from tests.scripts import specdistill
from tests.tiny import tiny_target_model
from tests.training.small_runs import build_trainer, make_rows


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tiny_files(tmp_path_factory.mktemp("tiny"))


def train(*keys: str) -> int:
    return specdistill("train", *keys).returncode


@pytest.fixture(scope="module")
def whole_run(keys: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of one process."""
    path = tmp_path_factory.mktemp("whole") / "run"
    assert train(*keys, f"train.output_dir={path}") == 0
    return path


def copy_without_draft(whole_run: Path, run: Path) -> None:
    """Copy a run to the state in which a kill after its last checkpoint leaves it."""
    shutil.copytree(whole_run, run)
    shutil.rmtree(run / "draft")
    recipe = run / "run" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(whole_run), str(run)))


def read_weights(run: Path) -> bytes:
    return (run / "draft" / "model.safetensors").read_bytes()


def read_last_checkpoint(run: Path) -> tuple[int, float, list[float], bytes]:
    """Return the best step, its metric, every evaluation and the weights of the last checkpoint."""
    state = json.loads((run / "checkpoint-12" / "trainer_state.json").read_text())
    evaluations = [
        entry["eval_acceptance_length"]
        for entry in state["log_history"]
        if "eval_acceptance_length" in entry
    ]
    last = (run / "checkpoint-12" / "model.safetensors").read_bytes()
    return state["best_global_step"], state["best_metric"], evaluations, last


@needs_gradients_in_forks
@pytest.mark.distributed
@pytest.mark.parametrize(
    "processes",
    # each trains twice; only the sampler of two processes has to be told the epoch of a resumed run
    [pytest.param(1, marks=pytest.mark.long), 2],
)
def test_every_epoch_has_an_order_of_its_own_also_when_it_is_resumed_in_mid_epoch(
    tmp_path: Path, processes: int
) -> None:
    """Three epochs have three steps of two rows each; the run is resumed after the fourth step."""
    data = make_rows(6, 24)
    options = {
        "per_device_train_batch_size": 2 // processes,
        "num_train_epochs": 3,
        "save_strategy": "steps",
        "save_steps": 4,
    }

    def record_order(**resumed: str) -> list[int]:
        fit = build_trainer(
            tmp_path / "run", data, None, "draft_model", seed=8, data_seed=5, **options
        )
        seen: list[int] = []
        fit.objective.register_forward_pre_hook(
            lambda _, __, batch: seen.extend(
                data["input_ids"].index(ids) for ids in batch["input_ids"].tolist()
            ),
            with_kwargs=True,
        )
        fit.train(**resumed)
        return seen

    def train(rank: int) -> None:
        seen = (
            record_order(),
            record_order(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4")),
        )
        (tmp_path / f"{rank}.json").write_text(json.dumps(seen), encoding="utf-8")

    for process in run_processes(tmp_path, train, *range(processes)):
        assert process.code == 0, process.err
    epochs = [
        torch.randperm(6, generator=torch.Generator().manual_seed(5 + epoch)).tolist()
        for epoch in range(3)
    ]
    expected = [*itertools.chain(*epochs)]
    for rank in range(processes):
        whole, resumed = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert whole == expected[rank::processes] and resumed == expected[8:][rank::processes]


def test_intervals_that_are_shares_of_a_run_stay_when_it_is_resumed(tmp_path: Path) -> None:
    """A run of twelve steps saves after each quarter, resumes at half, and then is extended to
    twice its length."""
    shares = {"save_strategy": "steps", "save_steps": 0.25, "warmup_steps": 0.25}

    def train_and_read_weights(num_epochs: int, **resumed: str) -> dict[int, bytes]:
        run = build_trainer(
            tmp_path / "run",
            make_rows(6, 24),
            num_train_epochs=num_epochs,
            per_device_train_batch_size=2,
            **shares,
        )
        run.train(**resumed)
        paths = (tmp_path / "run").glob("checkpoint-*/model.safetensors")
        return {int(path.parent.name.partition("-")[2]): path.read_bytes() for path in paths}

    whole = train_and_read_weights(4)
    assert sorted(whole) == [3, 6, 9, 12]
    for step in (9, 12):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{step}")
    half = str(tmp_path / "run" / "checkpoint-6")
    with CaptureLogger(logging.get_logger("transformers.trainer_utils")) as warnings:
        assert train_and_read_weights(4, resume_from_checkpoint=half) == whole
    assert "do not match" not in warnings.out
    longer = train_and_read_weights(
        8, resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-12")
    )
    assert sorted(longer) == [3, 6, 9, 12, 18, 24]


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send SIGTERM to this process in the fifth step that it takes."""
    steps, training_step = itertools.count(1), ResumableTrainer.training_step

    def interrupt(self: ResumableTrainer, *args: Any, **kwargs: Any) -> torch.Tensor:
        if next(steps) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return training_step(self, *args, **kwargs)

    monkeypatch.setattr(ResumableTrainer, "training_step", interrupt)


@pytest.mark.usefixtures("interrupted")
def test_a_signal_saves_and_the_same_command_resumes_to_the_same_draft(
    keys: list[str], whole_run: Path, tmp_path: Path
) -> None:
    command = [*keys, f"train.output_dir={tmp_path / 'run'}"]
    stopped = specdistill("train", *command)
    newest = max((tmp_path / "run").glob("checkpoint-*"), key=lambda path: path.stat().st_ctime)
    assert stopped.returncode == 143 and str(newest) in stopped.stderr
    assert not (tmp_path / "run" / "draft").exists()
    resumed = specdistill("train", *command)
    assert resumed.returncode == 0
    assert read_weights(tmp_path / "run") == read_weights(whole_run) and read_last_checkpoint(
        tmp_path / "run"
    ) == read_last_checkpoint(whole_run)
    history = read_history(tmp_path / "run" / "draft", key="drafts")
    assert history is not None and history.seconds is not None
    assert "Resuming after step 6 of 12, from" in resumed.stderr
    before = json.loads((newest / "manifest.json").read_text())["seconds"]
    assert history.seconds > before > 0


@pytest.mark.long  # trains further, and writes two drafts
def test_a_finished_run_is_trained_further(
    keys: list[str], whole_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    recipe = run / "run" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(whole_run), str(run)))
    finished = read_history(run / "draft", key="drafts")
    (run / "draft-12").mkdir()
    (run / "draft-12" / "theirs.txt").write_text("kept")
    longer = specdistill("train", *keys, f"train.output_dir={run}", "train.max_steps=16")
    assert longer.returncode == 0 and f"Training in {run} continues from step 12" in longer.stderr
    assert f"The draft of step 2 of 16 is in {run / 'draft'}, acceptance length" in longer.stdout
    assert f"specdistill eval recipe={recipe}" in longer.stdout
    assert (run / "draft-12-2" / "model.safetensors").read_bytes() == read_weights(whole_run) and (
        run / "checkpoint-16"
    ).is_dir()
    assert [path.name for path in (run / "draft-12").iterdir()] == ["theirs.txt"]
    history = read_history(run / "draft", key="drafts")
    assert (
        history
        and finished
        and history.steps == 16
        and history.log[: len(finished.log) - 1] == finished.log[:-1]
    )
    for length in ("max_steps=16", "max_steps=5"):
        again = specdistill("train", *keys, f"train.output_dir={run}", f"train.{length}")
        assert again.returncode == 2 and "a finished run" in again.stderr, length


@pytest.mark.long  # trains three times
@pytest.mark.usefixtures("interrupted")
def test_generation_and_dropout_of_a_draft_are_the_same_after_a_signal(
    keys: list[str], tmp_path: Path
) -> None:
    """A run with on-policy batches and LoRA's dropout is stopped between two checkpoints."""
    files = [key for key in keys if key.startswith(("target", "data", "train"))]
    method_keys = [
        "method=draft_model",
        "draft.lora={rank: 4, dropout: 0.3}",
        "on_policy={fraction: 0.5, prompt_tokens: 8, num_tokens: 8}",
    ]
    command = [*files, *method_keys, "train.save_steps=100", "train.eval_steps=100"]
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert train(*command, f"train.output_dir={run}") == 143
    assert train(*command, f"train.output_dir={run}") == 0
    assert train(*command, f"train.output_dir={whole}") == 0
    assert read_weights(run) == read_weights(whole)


@pytest.mark.long  # trains for three seconds
def test_the_best_checkpoint_is_saved_between_two_regular_saves(
    keys: list[str], tmp_path: Path
) -> None:
    """The run evaluates at every second step and saves at every sixth. The best evaluation here is
    the first, which has the greatest loss."""
    rare = [
        "train.save_steps=6",
        "train.save_total_limit=1",
        "train.metric_for_best_model=loss",
        "train.greater_is_better=true",
    ]
    assert train(*keys, *rare, f"train.output_dir={tmp_path / 'run'}") == 0
    history = json.loads((tmp_path / "run" / "run" / "history.json").read_text())
    losses = {entry["step"]: entry["eval_loss"] for entry in history["log"] if "eval_loss" in entry}
    assert history["best_step"] == (best := max(losses, key=lambda step: losses[step])) == 2
    assert read_weights(tmp_path / "run") == read_weights(tmp_path / "run" / f"checkpoint-{best}")


def test_a_run_that_only_lost_its_draft_takes_no_further_step(
    keys: list[str], whole_run: Path, tmp_path: Path
) -> None:
    copy_without_draft(whole_run, tmp_path / "run")
    assert train(*keys, f"train.output_dir={tmp_path / 'run'}") == 0
    assert read_weights(tmp_path / "run") == read_weights(whole_run)
    assert json.loads((tmp_path / "run" / "run" / "history.json").read_text())["steps"] == 12


@pytest.mark.long  # trains twice, for four seconds
def test_a_full_disk_ends_in_one_line_and_the_run_resumes_when_there_is_room(
    keys: list[str], whole_run: Path, tmp_path: Path
) -> None:
    """A limit on the size of a file fails as a full disk does, in the middle of a file."""
    command = [*keys, f"train.output_dir={tmp_path / 'run'}"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        full = specdistill("train", *command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (error,) = (line for line in full.stderr.splitlines() if "error" in line.lower())
    assert full.returncode == 3
    assert error.startswith(f"error: {tmp_path / 'run' / 'checkpoint-2'} ")
    assert train(*command) == 0
    assert read_weights(tmp_path / "run") == read_weights(whole_run)


def test_another_target_or_other_rows_under_the_same_recipe_are_refused(
    keys: list[str], whole_run: Path, tmp_path: Path
) -> None:
    folder = Path(keys[0].removeprefix("target.model=")).parent
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    copy_without_draft(whole_run, tmp_path / "run")
    recipe = tmp_path / "run" / "run" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(folder), str(tmp_path)))
    copied_keys = [key.replace(str(folder), str(tmp_path)) for key in keys]
    command = [*copied_keys, f"train.output_dir={tmp_path / 'run'}"]

    def check_refused(fact: str) -> None:
        refused = specdistill("train", *command)
        assert refused.returncode == 2 and refused_key(refused.stderr) == "train.output_dir"
        assert f" {fact} " in refused.stderr

    rows = tmp_path / "rows.jsonl"
    text = rows.read_text()
    rows.write_text(text.replace("and then", "or else"))
    check_refused("rows from data.source")
    rows.write_text(text)
    tiny_target_model(seed=1).save_pretrained(tmp_path / "model")
    check_refused("weights of target.model")


@pytest.mark.long  # trains three times, for four seconds
@needs_gradients_in_forks
@pytest.mark.distributed
def test_two_processes_stop_together_and_one_resumes(
    keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal reaches only the second process. Then one process that accumulates two batches takes
    the same steps, except for rounding."""
    # Plain gradient steps, since Muon and Adam amplify rounding.
    sgd = [
        "optimizer=adamw",
        "train.optim=sgd",
        "train.learning_rate=0.1",
        "train.load_best_model_at_end=false",
    ]
    first_epoch = [
        *keys,
        *sgd,
        "loss.noise=0",
        "train.max_steps=4",
        "train.save_steps=1",
        "train.eval_strategy=no",
    ]
    alone = [*first_epoch, "train.gradient_accumulation_steps=2"]
    training_step = ResumableTrainer.training_step

    def stop(rank: int) -> None:
        def interrupt(self: ResumableTrainer, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self.state.global_step == rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return training_step(self, *args, **kwargs)

        monkeypatch.setattr(ResumableTrainer, "training_step", interrupt)
        os._exit(train(*first_epoch, f"train.output_dir={tmp_path / 'run'}"))

    ended = run_processes(tmp_path, stop, 0, 1)
    assert [process.code for process in ended] == [143, 143], ended
    assert not (tmp_path / "run" / "draft").exists()
    assert (
        train(*alone, f"train.output_dir={tmp_path / 'run'}", "train.per_device_train_batch_size=8")
        == 2
    )
    assert train(*alone, f"train.output_dir={tmp_path / 'run'}") == 0
    assert train(*alone, f"train.output_dir={tmp_path / 'whole'}") == 0
    one, other = (
        load_file(tmp_path / run / "draft" / "model.safetensors") for run in ("whole", "run")
    )
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-5)
