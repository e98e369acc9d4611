"""The trainer: gradients that do not depend on how a batch is cut, and a head that learns what the decoder then accepts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset

from specdistill.decoding.decoder import Decoder
from specdistill.errors import ResourceError
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.models.proposer import DraftModelProposer
from specdistill.methods.recipe import DECODED, Recipe, TrainedRecipe
from specdistill.recipe.load import load_recipe
from specdistill.rows.packing import collate
from tests.heads import HEADS
from tests.processes import needs_gradients_in_forks, run_processes
from tests.refusals import refused
from tests.training.small_runs import gradient_of, gradient_of_one_step, rows, tiny_target, trainer


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and one
    for name in one:
        scale = float(one[name].abs().max())
        assert scale > 0 and torch.allclose(one[name], other[name], rtol=0, atol=2e-5 * scale), name


def test_the_gradient_does_not_depend_on_accumulation(tmp_path: Path) -> None:
    whole = gradient_of_one_step(tmp_path / "whole", 4, 1)
    assert_same(whole, gradient_of_one_step(tmp_path / "quarters", 1, 4))


@pytest.mark.distributed
@needs_gradients_in_forks
def test_the_gradient_does_not_depend_on_processes(tmp_path: Path) -> None:
    whole = gradient_of_one_step(tmp_path / "whole", 4, 1)

    def in_one_of_two(rank: int) -> None:
        torch.save(gradient_of_one_step(tmp_path / "two", 2, 1), tmp_path / f"{rank}.pt")

    for rank, process in enumerate(run_processes(tmp_path, in_one_of_two, 0, 1)):
        assert process.code == 0, process.err
        assert_same(whole, torch.load(tmp_path / f"{rank}.pt"))


@pytest.mark.parametrize("method", [*HEADS, "draft_model"])
def test_recomputed_activations_take_less_memory_and_change_no_gradient(
    tmp_path: Path, method: str
) -> None:
    """Counts what autograd keeps for backward, in bytes."""
    kept, gradients = [], []
    for recompute in (False, True):
        fit = trainer(
            tmp_path,
            rows(4, 24),
            method=method,
            max_steps=1,
            max_grad_norm=0.0,
            activation_checkpointing=recompute,
        )
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            gradients.append(gradient_of(fit))
        kept.append(sum(sizes.values()))
    assert kept[1] < 0.9 * kept[0]
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], rtol=0, atol=1e-6), name


@pytest.mark.parametrize(
    ("method", "keys"), [("eagle3", ["draft.ttt_steps=4"]), ("draft_model", [])]
)
def test_a_recipe_knows_the_metrics_that_an_evaluation_has(
    tmp_path: Path, method: str, keys: list[str]
) -> None:
    recipe = load_recipe(
        Recipe, [f"method={method}", "target.model=pico", "train.output_dir=runs", *keys]
    )
    measured = {
        name.removeprefix("eval_")
        for name in trainer(tmp_path, rows(2, 24), method=method).evaluate()
    }
    assert isinstance(recipe, TrainedRecipe) and {*recipe.metrics()} - {DECODED} == {
        name for name in measured if name.startswith(("loss", "accuracy", "acceptance"))
    }


def test_what_the_trainer_refuses_is_the_recipes(tmp_path: Path) -> None:
    with refused("train"):
        trainer(tmp_path, rows(2, 24), batch_eval_metrics=True)


# To learn 24 tokens by heart. AdamW, whose steps take half the time of Muon's on a CPU.
STEPS = {"eagle": 70, "eagle3": 120, "mtp": 80, "draft_model": 70}


@pytest.mark.parametrize("method", [*HEADS, "draft_model"])
def test_a_memorised_sample_is_accepted_in_full_blocks(tmp_path: Path, method: str) -> None:
    """Proof of the shifts: overfit one text the target wrote, then decode it; acceptance length >= 0.9 (K + 1)."""
    target = tiny_target()
    prompt = [5, 9, 20, 31]
    text = [*prompt, *Decoder(target).generate(prompt, max_new_tokens=20).token_ids]
    sample = Dataset.from_list(
        [
            {
                "input_ids": text,
                "loss_mask": [1] * 24,
                "document_ids": [0] * 24,
                "position_ids": list(range(24)),
            }
        ]
    )
    fit = trainer(
        tmp_path, sample, target, method, max_steps=STEPS[method], lr_scheduler_type="linear"
    )
    draft = fit.objective.draft
    fit.optimizer = torch.optim.AdamW(draft.parameters(), lr=1.6e-2)
    fit.train()
    proposer = DraftModelProposer(draft) if method == "draft_model" else HeadProposer(draft)
    run = Decoder(target, proposer).generate(prompt, max_new_tokens=20, num_speculative_tokens=4)
    assert [*prompt, *run.token_ids] == text
    whole = run.rounds[:-1]  # the last round is cut by the length limit
    assert 1 + sum(r.num_accepted for r in whole) / len(whole) >= 0.9 * 5


def test_an_evaluation_is_what_its_formulas_say(tmp_path: Path) -> None:
    """Of a draft model, from both models' logits: the KL divergence and what is accepted at each loss token, and of four in a row."""
    target, data = tiny_target(), rows(3, 24)
    fit = trainer(tmp_path, data, target, "draft_model", per_device_eval_batch_size=2)
    metrics = fit.evaluate()
    ids_BT, has_loss_BT = (
        torch.tensor(data["input_ids"]),
        torch.tensor(data["loss_mask"])[:, 1:].bool(),
    )
    with torch.no_grad():
        p, q = (
            model(ids_BT).logits[:, :-1].double().softmax(-1)
            for model in (target.model, fit.objective.draft)
        )
    loss_BT, accepted_BT = (p * (p.log() - q.log())).sum(-1), torch.minimum(p, q).sum(-1)
    correct_BT = (p.argmax(-1) == q.argmax(-1)).double()
    expected = {
        "loss": loss_BT,
        "loss_1": loss_BT,
        "accuracy_1": correct_BT,
        "acceptance_1": accepted_BT,
    }
    for name, values_BT in expected.items():
        assert metrics[f"eval_{name}"] == pytest.approx(
            float(values_BT[has_loss_BT].mean()), rel=1e-4
        ), name
    for name, values_BT in (
        ("acceptance_length", correct_BT),
        ("acceptance_length_sampled", accepted_BT),
    ):
        length = 1.0
        for k in range(1, 5):
            whole = has_loss_BT.unfold(1, k, 1).all(-1)
            length += float(values_BT.unfold(1, k, 1).prod(-1)[whole].mean())
        assert metrics[f"eval_{name}"] == pytest.approx(length, rel=1e-4), name
    assert 0 < metrics["eval_accuracy_1"] < 1


def test_generated_batches_are_numbered_over_steps_and_processes(tmp_path: Path) -> None:
    """The second of two processes, in the fourth step of two micro-batches each."""
    fit, numbers = trainer(tmp_path, rows(4, 24)), []
    fit.objective.prepare = lambda batch, number: (numbers.append(number), batch)[1]
    fit.args = SimpleNamespace(world_size=2, process_index=1)  # type: ignore[assignment]
    fit.state.global_step = 3
    batch = collate([rows(4, 24)[0]])
    fit.get_batch_samples(iter([batch, batch]), 2, torch.device("cpu"))
    assert numbers == [13, 15]


def test_a_full_disk_is_one_line_also_where_a_draft_is_written_to_be_measured(
    tmp_path: Path,
) -> None:
    fit = trainer(tmp_path, rows(3, 24))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    fit.save, fit.decode = full, lambda folder: 2.0
    with pytest.raises(ResourceError, match="measured"):
        fit.evaluate()
