"""How a run ends early: a second signal ends it at once, and a loss that is not finite names the
rows of its batch."""

import json
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, TrainerControl, TrainerState

from specdistill.common.errors import ResourceError
from specdistill.data.produce.job import Job
from specdistill.data.rows.row_set import RowTarget
from specdistill.methods.recipe import Recipe, TrainedRecipe
from specdistill.recipe.load import load_recipe
from specdistill.targets.frozen import FrozenTarget
from specdistill.training import resumable
from specdistill.training.resumable import EndedStep, Stopping
from specdistill.workflows.make_data import open_rows
from tests.launches import tiny_files
from tests.scripts import specdistill
from tests.tiny import tiny_tokenizer
from tests.training.small_runs import build_trainer, make_rows


def test_a_second_signal_ends_the_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal just after the first one comes from the launcher, for the same Ctrl-C."""
    seconds, exit_codes = iter((0.0, 0.5, 2.0)), []
    monkeypatch.setattr(resumable.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(resumable.os, "_exit", exit_codes.append)
    stopping, handler = Stopping(None), signal.getsignal(signal.SIGINT)
    with stopping.handle_signals():
        for codes in ([], [], [130]):
            signal.raise_signal(signal.SIGINT)
            assert stopping.asked and exit_codes == codes
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.long  # trains by the command; quick by the trainer, below
def test_a_loss_that_is_not_finite_names_its_rows(tmp_path: Path) -> None:
    """One document holds the one token whose embedding is not a number."""
    every = ["train.gradient_accumulation_steps=2", "train.save_steps=1", "train.eval_steps=1"]
    keys = [*tiny_files(tmp_path), *every, f"train.output_dir={tmp_path / 'run'}"]
    (bad,) = tiny_tokenizer()("@").input_ids
    target = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    target.model.embed_tokens.weight.data[bad] = float("nan")
    target.save_pretrained(tmp_path / "model")
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    lines[30] = json.dumps({"text": "What is @ home?"})
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))

    ended = specdistill("train", *keys)
    assert ended.returncode == 3
    found = json.loads((tmp_path / "run" / "run" / "loss_not_finite.json").read_text())
    recipe = load_recipe(Recipe, keys)
    assert isinstance(recipe, TrainedRecipe)
    target = RowTarget.from_target(FrozenTarget.load(str(tmp_path / "model")))
    train_set, _ = open_rows(Job(recipe.data, target, recipe.measured_on))  # made by the training
    holds = [bad in train_set[row]["input_ids"] for row in found["rows"]]
    assert len(holds) == 4 and sum(holds) == 1  # the rows of a micro-batch
    (error,) = re.findall("^error: .*", ended.stderr, re.MULTILINE)
    assert f"step {found['step']} " in error and f" {found['rows'][0]}, " in error
    later = [
        path
        for path in (tmp_path / "run").glob("checkpoint-*")
        if int(path.name.split("-")[1]) >= found["step"]
    ]
    assert later == []


def spoil(fit: Any, step: int) -> None:
    """Make the loss of this step no number."""
    fit.objective.register_forward_hook(
        lambda _, __, output: (
            (output[0] * float("nan"), *output[1:]) if fit.state.global_step == step else output
        )
    )


@pytest.mark.parametrize("used", ["save_strategy", "eval_strategy"])
def test_an_epoch_that_ends_with_weights_that_are_not_finite_saves_and_evaluates_nothing(
    tmp_path: Path, used: str
) -> None:
    fit = build_trainer(
        tmp_path,
        make_rows(4, 24),
        num_train_epochs=2,
        per_device_train_batch_size=1,
        logging_strategy="no",
        **{used: "epoch"},
    )
    (tmp_path / "run").mkdir()

    spoil(fit, 3)
    with pytest.raises(ResourceError, match="step 4 "):
        fit.train()
    assert not list(tmp_path.glob("checkpoint-*")) and not fit.state.log_history


def test_the_rows_of_a_later_epoch_are_named(tmp_path: Path) -> None:
    """The loss is not finite in the second step of the second epoch."""
    fit = build_trainer(
        tmp_path,
        make_rows(4, 24),
        num_train_epochs=2,
        per_device_train_batch_size=1,
        logging_strategy="no",
        seed=8,
    )
    (tmp_path / "run").mkdir()
    spoil(fit, 5)
    with pytest.raises(ResourceError, match="step 6 "):
        fit.train()
    found = json.loads((tmp_path / "run" / "loss_not_finite.json").read_text(encoding="utf-8"))
    assert found == {
        "step": 6,
        "rows": [int(torch.randperm(4, generator=torch.Generator().manual_seed(8 + 1))[1])],
    }


def test_the_losses_of_a_step_are_checked_after_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    fit: Any = SimpleNamespace(
        micro_batch_losses=[],
        accelerator=SimpleNamespace(reduce=lambda found, _: found),
        get_train_dataloader=lambda: iter(()),
    )
    watch, control, state = Stopping(fit), TrainerControl(), TrainerState()
    arguments: Any = SimpleNamespace(
        world_size=1, should_save=True, output_dir=tmp_path, gradient_accumulation_steps=1
    )
    fit.micro_batch_losses, state.global_step = [torch.tensor(float("nan"))], 1
    watch.on_step_end(arguments, state, control)
    fit.micro_batch_losses, state.global_step = [torch.tensor(1.0)], 2
    with pytest.raises(ResourceError, match="step 1 "):
        watch.on_step_end(arguments, state, control)


@pytest.mark.parametrize("writes", [True, False])
def test_every_process_says_that_a_loss_is_not_finite(tmp_path: Path, writes: bool) -> None:
    """If one process ended silently, the launcher would end the one that reports the loss."""
    arguments: Any = SimpleNamespace(
        world_size=2, should_save=writes, output_dir=tmp_path, gradient_accumulation_steps=1
    )
    stopping = Stopping(SimpleNamespace(get_train_dataloader=lambda: iter(())))
    step = EndedStep(4, [torch.tensor(float("nan"))], torch.tensor([0, 1]), None)
    if writes:
        with pytest.raises(ResourceError, match=r"loss_not_finite\.json"):
            stopping._raise_not_finite(step, arguments)  # there is no folder to write to
        (tmp_path / "run").mkdir()
    with pytest.raises(ResourceError, match="step 4 "):
        stopping._raise_not_finite(step, arguments)
    assert (tmp_path / "run" / "loss_not_finite.json").exists() == writes
