"""The sums of an objective over a batch and the metrics made of them, computed by hand."""

import numpy as np
import pytest
import torch
from transformers import EvalPrediction

from specdistill.training.objective import StepSums, gather_before, select_loss_rows, step_metrics


def test_a_chain_ends_at_its_first_wrong_token_or_token_without_loss() -> None:
    """Of three chains of three positions, one is correct, one is wrong at the second position, and
    one has no loss at the third."""
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
    """There are two batches, and the third of three positions was not measured."""
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
    """No token is predicted at the third of three positions; no chain reaches the second."""
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


def test_loss_rows_look_back_within_their_document() -> None:
    """Both rows have three tokens; the second begins a document at its second token."""
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
