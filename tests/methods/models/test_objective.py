"""A draft model's objective: loss positions, counts, and the target as its own draft."""

import copy
from typing import Any

import pytest
import torch

from specdistill.data.rows.packing import index_batch
from specdistill.methods.models.objective import Distillation
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.losses.divergence import forward_kl
from tests.tiny import tiny_target_model

K = 3


def build_rows() -> dict[str, Any]:
    """Return one row: documents of 7 and 5 tokens and 2 of padding.

    The first three tokens of the first document carry no loss. Loss positions are padded, as those
    of a longer row are.
    """
    columns = {
        "input_ids": torch.randint(3, 200, (1, 14), generator=torch.Generator().manual_seed(0)),
        "loss_mask": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]]),
        "document_ids": torch.tensor([[0] * 7 + [1] * 5 + [-1] * 2]),
        "position_ids": torch.tensor([[*range(7), *range(5), 0, 0]]),
    }
    rows = index_batch(columns)
    return {**rows, "loss_positions": torch.nn.functional.pad(rows["loss_positions"], (0, 3))}


def run_objective(
    objective: Distillation, target: FrozenTarget, rows: dict[str, Any], measure: bool = True
) -> Any:
    return objective(**rows, **objective.read_target(target, rows), measure=measure)


def build_small_draft(seed: int = 5) -> Any:
    return tiny_target_model(num_layers=1, seed=seed)


def test_the_target_as_its_own_draft_is_perfect(target: FrozenTarget) -> None:
    rows = build_rows()
    objective = Distillation(copy.deepcopy(target.model), forward_kl, num_positions=K)
    total, sums = run_objective(objective, target, rows)
    num_loss_tokens = 4 + 4  # x_3..x_6 and x_8..x_11: the loss is at the token before each
    assert float(total.detach()) == pytest.approx(0, abs=1e-4)
    assert (
        int(sums.loss_tokens[0])
        == int(sums.correct[0])
        == int(objective.count_loss_tokens(rows))
        == num_loss_tokens
    )
    assert float(sums.accepted[0]) == pytest.approx(num_loss_tokens, rel=1e-5)
    assert (
        [int(count) for count in sums.chains]
        == [int(count) for count in sums.chain_correct]
        == [8, 6, 4]
    )
    assert sums.table().shape == (8, K)


def compute_by_formula(
    target: FrozenTarget, draft: Any, rows: dict[str, Any], temperature: float = 1.0
) -> torch.Tensor:
    """Return KL(p || q) at each loss token, with each document read alone."""
    divergences = []
    for start, stop, first in ((0, 7, 2), (7, 12, 0)):
        ids = rows["input_ids"][:, start:stop]
        p, q = (
            (model(ids).logits[0, first:-1] / temperature).log_softmax(-1)
            for model in (target.model, draft)
        )
        divergences.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(divergences).detach()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_loss_is_the_divergence_in_each_document_alone(
    target: FrozenTarget, temperature: float
) -> None:
    rows, draft = build_rows(), build_small_draft()
    total, _ = run_objective(Distillation(draft, forward_kl, temperature=temperature), target, rows)
    assert float(total.detach()) == pytest.approx(
        float(compute_by_formula(target, draft, rows, temperature).sum()), rel=1e-4
    )


@pytest.mark.parametrize("training", [True, False])
def test_hard_labels_are_the_texts_own_tokens(target: FrozenTarget, training: bool) -> None:
    """Training on hard labels does not run the target."""
    rows, draft = build_rows(), build_small_draft()
    objective = Distillation(draft, forward_kl, labels="hard").train(training)
    target_calls = []
    with target.backbone.register_forward_pre_hook(lambda *_: target_calls.append(1)):
        total, _ = run_objective(objective, target, rows, measure=not training)
    assert bool(target_calls) is not training
    expected = 0.0
    for start, stop, first in ((0, 7, 2), (7, 12, 0)):
        ids = rows["input_ids"][:, start:stop]
        distribution = draft(ids).logits[0, first:-1].log_softmax(-1)
        expected -= float(distribution.gather(1, ids[0, first + 1 :, None]).sum().detach())
    assert float(total.detach()) == pytest.approx(expected, rel=1e-4)
