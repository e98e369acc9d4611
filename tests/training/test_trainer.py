"""The trainer: gradients that do not depend on how a batch is cut, and a head that learns what the decoder then accepts."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from specdistill.decoding.decoder import Decoder
from specdistill.errors import ResourceError, UserError
from specdistill.methods.draft_model.proposer import DraftModelProposer
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.recipe import DECODED, Recipe, TrainedRecipe
from specdistill.project import ROOT
from specdistill.recipe.load import load_recipe
from tests.heads import HEADS
from tests.training.small_runs import gradient_of_one_step, rows, tiny_target, trainer


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
    result = subprocess.run([*launch, *script], env=environment, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for index in range(2):
        assert_same(whole, torch.load(tmp_path / f"gradients-{index}.pt"))


@pytest.mark.parametrize("method", [*HEADS, "draft_model"])
def test_recomputed_activations_take_less_memory_and_change_no_gradient(tmp_path: Path, method: str) -> None:
    """Counts what autograd keeps for backward, in bytes, and the calls of the first MLP."""
    kept, gradients = [], []
    for recompute in (False, True):
        fit = trainer(tmp_path, rows(4, 24), method=method, max_steps=1, max_grad_norm=0.0, activation_checkpointing=recompute)
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        steps: list[dict[str, torch.Tensor]] = []

        def step(*_: Any, fit: Any = fit, steps: list[dict[str, torch.Tensor]] = steps) -> None:
            named = fit.objective.draft.named_parameters()
            steps.append({name: weight.grad.clone() for name, weight in named if weight.grad is not None})

        assert fit.optimizer is not None
        fit.optimizer.register_step_pre_hook(step)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            fit.train()
        kept.append(sum(sizes.values()))
        gradients += steps
    assert kept[1] < 0.9 * kept[0]
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], rtol=0, atol=1e-6), name


@pytest.mark.parametrize(("method", "keys"), [("eagle3", ["draft.ttt_steps=4"]), ("draft_model", [])])
def test_a_recipe_knows_the_metrics_that_an_evaluation_has(tmp_path: Path, method: str, keys: list[str]) -> None:
    recipe = load_recipe(Recipe, [f"method={method}", "target.model=pico", "train.output_dir=runs", *keys])
    measured = {name.removeprefix("eval_") for name in trainer(tmp_path, rows(2, 24), method=method).evaluate()}
    assert isinstance(recipe, TrainedRecipe) and {*recipe.metrics()} - {DECODED} == {
        name for name in measured if name.startswith(("loss", "accuracy", "acceptance"))
    }


def test_what_the_trainer_refuses_is_the_recipe_s_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^train: got .*batch_eval_metrics"):
        trainer(tmp_path, rows(2, 24), batch_eval_metrics=True)


# To learn 48 tokens by heart. AdamW, whose steps take half the time of Muon's on a CPU.
STEPS = {"eagle": 100, "eagle3": 160, "mtp": 300, "draft_model": 100}


@pytest.mark.parametrize("method", [*HEADS, "draft_model"])
def test_a_memorised_sample_is_accepted_in_full_blocks(tmp_path: Path, method: str) -> None:
    """Proof of the shifts: overfit one text the target wrote, then decode it; acceptance length >= 0.9 (K + 1)."""
    target = tiny_target()
    prompt = [5, 9, 20, 31]
    text = [*prompt, *Decoder(target).generate(prompt, max_new_tokens=44).token_ids]
    sample = Dataset.from_list(
        [{"input_ids": text, "loss_mask": [1] * 48, "document_ids": [0] * 48, "position_ids": list(range(48))}]
    )
    fit = trainer(tmp_path, sample, target, method, max_steps=STEPS[method], lr_scheduler_type="linear")
    draft = fit.objective.draft
    fit.optimizer = torch.optim.AdamW(draft.parameters(), lr=8e-3)
    fit.train()
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
    one = trainer(tmp_path / "one", rows(5, 24), per_device_eval_batch_size=1).evaluate()
    four = trainer(tmp_path / "four", rows(5, 24), per_device_eval_batch_size=4).evaluate()
    for name in one:
        if name.startswith(("eval_loss", "eval_acc", "eval_acceptance")):
            assert one[name] == pytest.approx(four[name], rel=1e-4), name


def test_a_full_disk_is_one_line_also_where_a_draft_is_written_to_be_measured(tmp_path: Path) -> None:
    fit = trainer(tmp_path, rows(3, 24))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    fit.save, fit.decode = full, lambda folder: 2.0
    with pytest.raises(ResourceError, match=r"measured could not be saved \("):
        fit.evaluate()
