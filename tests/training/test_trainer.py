"""The trainer: gradients that do not depend on how a batch is cut, and a head that learns what the
decoder then accepts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset

from specdistill.common.errors import ResourceError
from specdistill.data.rows.packing import collate
from specdistill.decoding.decoder import Decoder
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.models.proposer import DraftModelProposer
from specdistill.methods.recipe import DECODED_METRIC, Recipe, TrainedRecipe
from specdistill.recipe.load import load_recipe
from tests.heads import HEADS
from tests.processes import needs_gradients_in_forks, run_processes
from tests.refusals import refused
from tests.training.small_runs import (
    build_tiny_target,
    build_trainer,
    make_rows,
    record_first_gradients,
    record_gradients,
)


def assert_same_gradients(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and one
    for name in one:
        scale = float(one[name].abs().max())
        assert scale > 0 and torch.allclose(one[name], other[name], rtol=0, atol=2e-5 * scale), name


def test_the_gradient_does_not_depend_on_accumulation(tmp_path: Path) -> None:
    whole = record_first_gradients(tmp_path / "whole", 4, 1)
    assert_same_gradients(whole, record_first_gradients(tmp_path / "quarters", 1, 4))


@pytest.mark.long  # trains in three processes
@pytest.mark.distributed
@needs_gradients_in_forks
def test_the_gradient_does_not_depend_on_processes(tmp_path: Path) -> None:
    whole = record_first_gradients(tmp_path / "whole", 4, 1)

    def save_gradients(rank: int) -> None:
        torch.save(record_first_gradients(tmp_path / "two", 2, 1), tmp_path / f"{rank}.pt")

    for rank, process in enumerate(run_processes(tmp_path, save_gradients, 0, 1)):
        assert process.code == 0, process.err
        assert_same_gradients(whole, torch.load(tmp_path / f"{rank}.pt"))


def train_and_log(
    folder: Path, micro_batch: int, accumulation: int, logging_steps: int
) -> list[dict[str, float]]:
    """Return the log of three steps of four rows each, over six rows whose losses differ."""
    batches = {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
    }
    fit = build_trainer(
        folder,
        make_rows(6, 24),
        None,
        "draft_model",
        max_steps=3,
        logging_steps=logging_steps,
        learning_rate=1e-3,
        **batches,
    )
    fit.train()
    return fit.state.log_history


@pytest.mark.distributed
@needs_gradients_in_forks
def test_the_final_figures_of_a_run_cover_all_processes(tmp_path: Path) -> None:
    """The loss of a training is the mean of all its steps, however often losses are logged, and
    the epoch counts the rows of all processes."""

    def save_log(rank: int) -> None:
        torch.save(train_and_log(tmp_path / "two", 2, 1, 100), tmp_path / f"{rank}.pt")

    *steps, end = train_and_log(tmp_path / "one", 4, 1, 1)
    losses = [entry["loss"] for entry in steps]
    assert len(losses) == 3 and max(losses) - min(losses) > 0.01
    others = [
        train_and_log(tmp_path / "accumulated", 2, 2, logging_steps)[-1]
        for logging_steps in (2, 100)
    ]
    for rank, process in enumerate(run_processes(tmp_path, save_log, 0, 1)):
        assert process.code == 0, process.err
        others.append(torch.load(tmp_path / f"{rank}.pt")[-1])
    for entry in (end, *others):
        assert entry["train_loss"] == pytest.approx(sum(losses) / 3, rel=1e-5)
        assert entry["epoch"] == 1.5


def test_the_logged_memory_is_that_of_the_largest_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = build_trainer(tmp_path, make_rows(4, 24))
    monkeypatch.setattr(
        fit.accelerator, "gather", lambda own: torch.cat([own, torch.tensor([2**40])])
    )
    fit.log({"loss": 1.0})
    assert fit.state.log_history[-1]["peak_memory_gib"] == 2**10


def make_rows_with_answers(count: int, answer: int) -> Dataset:
    """Return rows that end with an answer of this many tokens."""
    data = make_rows(count, 24)
    mask = [0] * (24 - answer) + [1] * answer
    return data.remove_columns("loss_mask").add_column("loss_mask", [mask] * count)


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_the_best_draft_is_kept_where_no_answer_reaches_all_positions(
    tmp_path: Path, method: str
) -> None:
    """Answers have two tokens, and drafts have four."""
    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "acceptance_length_sampled",
        "learning_rate": 0.5,
    }
    times = {
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    fit = build_trainer(tmp_path, make_rows_with_answers(4, 2), method=method, **times, **best)
    fit.train()
    lengths = {
        entry["step"]: entry
        for entry in fit.state.log_history
        if "eval_acceptance_length_sampled" in entry
    }
    assert all(torch.tensor([*entry.values()]).isfinite().all() for entry in fit.state.log_history)
    for entry in lengths.values():
        reached = {name for name in entry if name.startswith("eval_cumulative_acceptance_")}
        assert reached == {"eval_cumulative_acceptance_1", "eval_cumulative_acceptance_2"}
        assert entry["eval_acceptance_length"] == pytest.approx(
            1 + sum(entry[name] for name in reached)
        )
    assert len(lengths) == 4
    assert fit.state.best_global_step == max(
        lengths, key=lambda step: lengths[step]["eval_acceptance_length_sampled"]
    )
    assert (
        fit.state.best_metric
        == lengths[fit.state.best_global_step]["eval_acceptance_length_sampled"]
    )


def test_a_metric_that_the_held_out_rows_do_not_measure_is_refused(tmp_path: Path) -> None:
    """A token has to be the sixth of its document to be predicted at the fourth position."""
    data = (
        make_rows(2, 24)
        .remove_columns("loss_mask")
        .add_column("loss_mask", [[0, 0, 1, 1, 1, *[0] * 19]] * 2)
    )
    keys = {"eval_strategy": "steps", "metric_for_best_model": "acceptance_4"}
    fit = build_trainer(tmp_path, data, **keys)
    with refused("train.metric_for_best_model", "acceptance_4"):
        fit.evaluate()


def test_figures_that_are_no_numbers_are_not_logged(tmp_path: Path) -> None:
    """The first gradients overflow in 16 bits, and have no finite norm."""
    fit = build_trainer(tmp_path, make_rows(4, 24))
    fit.log({"loss": 1.0, "grad_norm": float("nan"), "learning_rate": float("inf")})
    assert {"loss"} == fit.state.log_history[-1].keys() & {"loss", "grad_norm", "learning_rate"}


@pytest.mark.parametrize(
    "method",
    [
        # each trains twice
        *(
            pytest.param(name, marks=[pytest.mark.long] if name != "eagle3" else [])
            for name in HEADS
        ),
        "draft_model",
    ],
)
def test_recomputed_activations_take_less_memory_and_change_no_gradient(
    tmp_path: Path, method: str
) -> None:
    """The memory is the number of bytes that autograd keeps for backward."""
    kept, gradients = [], []
    for recompute in (False, True):
        fit = build_trainer(
            tmp_path,
            make_rows(4, 24),
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
            gradients.append(record_gradients(fit))
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
        for name in build_trainer(tmp_path, make_rows(2, 24), method=method).evaluate()
    }
    assert isinstance(recipe, TrainedRecipe) and {*recipe.metrics()} - {DECODED_METRIC} == {
        name for name in measured if name.startswith(("loss", "accuracy", "acceptance"))
    }


def test_an_argument_that_the_trainer_refuses_is_an_error_of_the_recipe(tmp_path: Path) -> None:
    with refused("train"):
        build_trainer(tmp_path, make_rows(2, 24), batch_eval_metrics=True)


# To learn 24 tokens by heart. AdamW, whose steps take half the time of Muon's on a CPU.
STEPS = {"eagle": 70, "eagle3": 120, "mtp": 80, "draft_model": 50}


@pytest.mark.parametrize(
    "method",
    [
        "draft_model",
        # trained for two to four seconds
        pytest.param("mtp", marks=pytest.mark.long),
        pytest.param("eagle", marks=pytest.mark.long),
        pytest.param("eagle3", marks=pytest.mark.long),
    ],
)
def test_a_memorised_sample_is_accepted_in_full_blocks(tmp_path: Path, method: str) -> None:
    """A draft that overfits one text of the target reaches an acceptance length of 0.9 (K + 1) on
    it, which proves that the shifts are right."""
    target = build_tiny_target()
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
    fit = build_trainer(
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


def test_evaluation_metrics_equal_their_formulas(tmp_path: Path) -> None:
    """The formulas compute the KL divergence and the acceptance at each loss token, and over four
    tokens in a row, from the logits of the target and a draft model."""
    target, data = build_tiny_target(), make_rows(3, 24)
    fit = build_trainer(tmp_path, data, target, "draft_model", per_device_eval_batch_size=2)
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
    """The process is the second of two, in the fourth step of two micro-batches each."""
    fit, numbers = build_trainer(tmp_path, make_rows(4, 24)), []
    fit.objective.prepare = lambda batch, number: (numbers.append(number), batch)[1]
    fit.args = SimpleNamespace(world_size=2, process_index=1)  # type: ignore[assignment]
    fit.state.global_step = 3
    batch = collate([make_rows(4, 24)[0]])
    fit.get_batch_samples(iter([batch, batch]), 2, torch.device("cpu"))
    assert numbers == [13, 15]


def test_a_full_disk_ends_in_one_line_where_a_draft_is_written_to_be_measured(
    tmp_path: Path,
) -> None:
    fit = build_trainer(tmp_path, make_rows(3, 24))

    def fail_to_write(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    fit.save, fit.decode = fail_to_write, lambda folder: 2.0
    with pytest.raises(ResourceError, match="measured"):
        fit.evaluate()
