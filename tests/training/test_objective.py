"""What objectives count of a batch, and the metrics that are made of it, by hand."""

import numpy as np
import pytest
import torch
from transformers import EvalPrediction

from specdistill.training.objective import StepSums, gather_before, select_loss_rows, step_metrics


def test_a_chain_ends_with_its_first_token_without_loss_or_wrong() -> None:
    """Three chains of three positions: whole, wrong at the second, without loss from the third
    on."""
    has_loss = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]])
    correct = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 0]])
    accepted = torch.tensor([[0.5, 0.5, 1.0], [0.5, 0.25, 1.0], [0.5, 1.0, 0.0]])
    sums = StepSums.from_losses(has_loss, has_loss, correct, accepted)
    assert [row.tolist() for row in (sums.chains, sums.chain_correct, sums.chain_accepted)] == [
        [3.0, 3.0, 2.0],
        [3.0, 2.0, 1.0],
        [2.0, 0.25 + 0.125 + 1.0, 0.125 + 0.125],
    ]


def test_metrics_divide_sums_over_batches() -> None:
    """Of two batches; the third of three positions was not measured."""
    none = float("nan")
    tables = [
        [
            [2.0, 1.0, none],
            [1.0, 1.0, none],
            [1.0, 0.0, none],
            [0.5, 0.3, none],
            [1.0, 1.0, 1.0],
            [0.5, 0.25, 0.1],
            [2, 1, 1],
            [none] * 3,
        ],
        [
            [4.0, 3.0, none],
            [3.0, 1.0, none],
            [1.0, 1.0, none],
            [0.7, 0.6, none],
            [1.0, 0.0, 0.0],
            [0.7, 0.0, 0.0],
            [2, 1, 1],
            [none] * 3,
        ],
    ]
    metrics = step_metrics(EvalPrediction(np.array(tables), np.array([[3.0, 1.0], [9.0, 3.0]])))
    assert metrics == pytest.approx(
        {
            "loss": 12 / 4,
            "loss_1": 6 / 4,
            "loss_2": 4 / 2,
            "accuracy_1": 2 / 4,
            "accuracy_2": 1 / 2,
            "acceptance_1": 1.2 / 4,
            "acceptance_2": 0.9 / 2,
            "cumulative_acceptance_1": 2 / 4,
            "cumulative_acceptance_2": 1 / 2,
            "cumulative_acceptance_3": 1 / 2,
            "acceptance_length": 1 + 2 / 4 + 1 / 2 + 1 / 2,
            "acceptance_length_sampled": 1 + 1.2 / 4 + 0.25 / 2 + 0.1 / 2,
        }
    )


def test_positions_that_nothing_reaches_have_no_metrics() -> None:
    """Of three positions no token is predicted at the third, and no chain reaches the second."""
    table = [
        [2.0, 3.0, 0.0],
        [4.0, 2.0, 0.0],
        [1.0] * 3,
        [3.0, 1.0, 0.0],
        [1.0, 0.0, 0.0],
        [0.5, 0.0, 0.0],
        [4.0, 0.0, 0.0],
    ]
    metrics = step_metrics(
        EvalPrediction(np.array([[*table, [2.0, 0.0, 0.0]]]), np.array([[[6.0, 0.0], [3.0, 0.0]]]))
    )
    assert metrics == {
        "loss": 6 / 3,
        "loss_1": 2 / 4,
        "loss_2": 3 / 2,
        "accuracy_1": 1 / 4,
        "accuracy_2": 1 / 2,
        "acceptance_1": 3 / 4,
        "acceptance_2": 1 / 2,
        "cumulative_acceptance_1": 1 / 4,
        "acceptance_length": 1 + 1 / 4,
        "acceptance_length_sampled": 1 + 0.5 / 4,
        "acceptance_length_uncorrected": 1 + 2 / 4,
    }
    assert step_metrics(EvalPrediction(np.zeros((1, 8, 3)), np.zeros((1, 2, 1)))) == {}


def test_rows_look_so_far_back() -> None:
    """Two rows of three tokens; the second begins a document at its second token."""
    positions, loss_positions = torch.tensor([[0, 1, 2], [3, 0, 1]]), torch.tensor([1, 2, 3, 5, 0])
    assert select_loss_rows(positions, loss_positions, ahead=2).tolist() == [
        False,
        True,
        True,
        False,
        False,
    ]
    x_BTD = torch.arange(6.0).view(2, 3, 1)
    assert gather_before(x_BTD, loss_positions, 1).flatten().tolist() == [0, 1, 2, 4, 0]
