"""The trainer: gradients that do not depend on how a batch is cut, and a head that learns what the decoder then accepts."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from specdistill.decoding.decoder import Decoder
from specdistill.losses.divergence import forward_kl
from specdistill.methods.draft_model.create import create_draft_model, save_draft_model
from specdistill.methods.draft_model.objective import Distillation
from specdistill.methods.draft_model.proposer import DraftModelProposer
from specdistill.methods.heads.proposer import HeadProposer
from specdistill.methods.heads.unroll import TrainingTimeTest
from specdistill.project import ROOT
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.arguments import training_arguments
from specdistill.training.optimizer import muon_adamw
from specdistill.training.trainer import DraftTrainer
from tests.heads import HEADS, build_head, save_head
from tests.tiny import tiny_target_model, tiny_tokenizer


def tiny_target() -> FrozenTarget:
    model = tiny_target_model()
    model.generation_config.eos_token_id = []
    return FrozenTarget(model, tiny_tokenizer(), name="tiny")


def rows(count: int, length: int) -> Dataset:
    """Rows whose kept counts differ, so that a mean of means would show."""
    generator = torch.Generator().manual_seed(0)
    table = []
    for index in range(count):
        loss_mask = [0] * (index * 4) + [1] * (length - index * 4)
        ids = torch.randint(3, 200, (length,), generator=generator).tolist()
        table.append(
            {"input_ids": ids, "loss_mask": loss_mask, "document_ids": [0] * length, "position_ids": list(range(length))}
        )
    return Dataset.from_list(table)


def trainer(
    output_dir: Path, data: Dataset, target: FrozenTarget | None = None, method: str = "eagle3", **train: Any
) -> DraftTrainer:
    target = target or tiny_target()
    arguments = training_arguments(
        {"output_dir": str(output_dir), "report_to": "none", "disable_tqdm": True, "save_strategy": "no", **train}
    )
    if method == "draft_model":
        draft: Any = create_draft_model(target, init="layers", num_layers=2)
        objective: torch.nn.Module = Distillation(draft, forward_kl)
        save = partial(save_draft_model, draft, target.tokenizer)
    else:
        draft = build_head(method, target, **({"init": "scratch"} if method == "mtp" else {}))
        objective = TrainingTimeTest(draft, forward_kl, 4, step_decay=0.8)
        save = partial(save_head, method, draft)
    optimizer = muon_adamw(draft, arguments.learning_rate)
    return DraftTrainer(objective, target, arguments, data, data, save=save, optimizer=optimizer)


def gradient_of_one_step(output_dir: Path, micro_batch: int, accumulation: int) -> dict[str, torch.Tensor]:
    """What the optimizer is given in the first step over four rows, through the Trainer's own loop."""
    fit = trainer(
        output_dir,
        rows(4, 24),
        max_steps=1,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=0.0,
        learning_rate=0.0,
    )
    gradients: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        gradients.update({name: p.grad.clone() for name, p in fit.objective.draft.named_parameters() if p.grad is not None})

    assert fit.optimizer is not None
    fit.optimizer.register_step_pre_hook(keep)
    fit.train()
    return gradients


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and one
    for name in one:
        scale = float(one[name].abs().max())
        assert scale > 0 and torch.allclose(one[name], other[name], rtol=0, atol=2e-5 * scale), name


def test_the_gradient_does_not_depend_on_accumulation(tmp_path: Path) -> None:
    whole = gradient_of_one_step(tmp_path / "whole", 4, 1)
    assert_same(whole, gradient_of_one_step(tmp_path / "quarters", 1, 4))


@pytest.mark.distributed
def test_the_gradient_does_not_depend_on_processes(tmp_path: Path) -> None:
    whole = gradient_of_one_step(tmp_path / "whole", 4, 1)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--main_process_port=0"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    script = [str(Path(__file__).with_name("gradient_in_two_processes.py")), str(tmp_path)]
    result = subprocess.run([*launch, *script], env=environment, check=False, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    for index in range(2):
        assert_same(whole, torch.load(tmp_path / f"gradients-{index}.pt"))


@pytest.mark.parametrize("method", [*HEADS, "draft_model"])
def test_a_memorised_sample_is_accepted_in_full_blocks(tmp_path: Path, method: str) -> None:
    """Proof of the shifts: overfit one text the target wrote, then decode it; acceptance length >= 0.9 (K + 1)."""
    target = tiny_target()
    prompt = [5, 9, 20, 31]
    text = [*prompt, *Decoder(target).generate(prompt, max_new_tokens=44).token_ids]
    sample = Dataset.from_list(
        [{"input_ids": text, "loss_mask": [1] * 48, "document_ids": [0] * 48, "position_ids": list(range(48))}]
    )
    fit = trainer(tmp_path, sample, target, method, max_steps=300, learning_rate=1e-2, lr_scheduler_type="linear")
    fit.train()
    draft = fit.objective.draft
    proposer = DraftModelProposer(draft) if method == "draft_model" else HeadProposer(draft)
    run = Decoder(target, proposer).generate(prompt, max_new_tokens=44, num_speculative_tokens=4)
    assert [*prompt, *run.token_ids] == text
    whole = run.rounds[:-1]  # the last round is cut by the length limit
    assert 1 + sum(r.num_accepted for r in whole) / len(whole) >= 0.9 * 5


def test_evaluation_reports_each_step_and_picks_by_acceptance_length(tmp_path: Path) -> None:
    fit = trainer(tmp_path, rows(3, 24))
    metrics = fit.evaluate()
    for k in range(4):
        for name in ("loss", "accuracy", "acceptance"):
            assert metrics[f"eval_{name}_{k}"] >= 0
        assert metrics[f"eval_accuracy_{k}"] <= 1 and metrics[f"eval_acceptance_{k}"] <= 1
    assert 1 <= metrics["eval_acceptance_length"] <= 5


def test_evaluation_does_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    one = trainer(tmp_path / "one", rows(4, 24), per_device_eval_batch_size=1).evaluate()
    four = trainer(tmp_path / "four", rows(4, 24), per_device_eval_batch_size=4).evaluate()
    for name in one:
        if name.startswith(("eval_loss_", "eval_acc", "eval_acceptance")):
            assert one[name] == pytest.approx(four[name], rel=1e-4), name
