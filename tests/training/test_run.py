"""A training run: what every training script shares, and a new divergence through a script from its recipe."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from specdistill.losses.divergence import DIVERGENCES, LossSum, forward_kl
from specdistill.methods.recipe import Recipe
from specdistill.project import ROOT
from specdistill.recipe import load_recipe
from specdistill.training.progress import ProgressLines
from tests.tiny import tiny_target_model, tiny_tokenizer


def test_a_new_divergence_is_a_function_and_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing but DIVERGENCES has to know it: a recipe names it with its option, and a script trains with it."""
    powers: list[float] = []

    def powered_kl(draft_logits_RW: torch.Tensor, target_probs_RW: torch.Tensor, *, power: float = 2.0) -> LossSum:
        powers.append(power)
        loss = forward_kl(draft_logits_RW, target_probs_RW)
        return LossSum(loss.total**power, loss.count)

    monkeypatch.setitem(DIVERGENCES, "powered_kl", powered_kl)
    logging.disable_progress_bar()
    tiny_target_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    rows = [json.dumps({"text": f"Row {index} says {index * 7} and then again {index * 7}."}) for index in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    settings = [
        f"target.model={tmp_path / 'model'}",
        f"data.source={tmp_path / 'rows.jsonl'}",
        f"data.cache_dir={tmp_path / 'cache'}",
        "data.max_length=64",
        "draft.ttt_steps=2",
        "loss.divergence=[{name: powered_kl, power: 3, weight: 0.5}, {name: forward_kl, weight: 0.5}]",
        f"train.output_dir={tmp_path / 'run'}",
        "train.max_steps=1",
        "train.report_to=none",
    ]
    runpy.run_path(str(ROOT / "train" / "eagle.py"))["main"](load_recipe(Recipe, settings))
    assert set(powers) == {3.0}
    assert (tmp_path / "run" / "draft" / "model.safetensors").exists()
    assert "name: powered_kl" in (tmp_path / "run" / "run" / "recipe.yaml").read_text()
    printed = capsys.readouterr()
    assert re.search(r"^Training: step 1/1.*, 0\.0 min left$", printed.err, re.MULTILINE)
    assert "%|" not in printed.err and "train_runtime" not in printed.out


def test_progress_is_a_line_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr("specdistill.training.progress.time.monotonic", lambda: clock[0])
    arguments, control = TrainingArguments(str(tmp_path), use_cpu=True), TrainerControl()
    state = TrainerState(max_steps=100, is_world_process_zero=True)
    lines = ProgressLines()
    lines.on_train_begin(arguments, state, control)
    for step in range(1, 101):
        clock[0], state.global_step = 2.0 * step, step
        lines.on_log(arguments, state, control, logs={"loss": 1 / step, "grad_norm": 1.0})
        lines.on_step_end(arguments, state, control)
    lines.on_train_end(arguments, state, control)
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == "Training: step 15/100, loss 0.067, 2.8 min left"
    assert len(printed) == 7 and printed[-1] == "Training: step 100/100, loss 0.010, 0.0 min left"
