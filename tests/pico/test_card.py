"""The model card's measure has the value that is known for simple models and texts."""

import math

import numpy as np
import pytest
import torch

from recipes.pico.card import KneserNey, baseline_bits_per_byte, bits_per_byte
from tests.tiny import tiny_target_model


def test_a_model_that_knows_nothing_takes_log2_of_the_vocabulary_for_each_token():
    model = tiny_target_model(num_layers=1)
    model.lm_head.weight.data.zero_()
    stream = torch.randint(0, 260, (100,), generator=torch.Generator().manual_seed(0))
    # Two bytes a token; the last 4 tokens fill no window.
    assert bits_per_byte(model, stream, 200, context=32) == pytest.approx(
        math.log2(260) / 2, rel=1e-5
    )


def test_the_baseline_learns_what_repeats():
    stream = torch.tensor([5, 6, 7, 8] * 50)
    assert (
        baseline_bits_per_byte(stream, stream, 200, 260)
        < 0.2
        < 3
        < baseline_bits_per_byte(stream, stream.flip(0), 200, 260)
    )


STREAM = np.random.default_rng(0).integers(0, 5, 400)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_each_distribution_sums_to_one(order: int) -> None:
    model = KneserNey(STREAM, vocab_size=6, order=order)
    for context in ([0, 1], [3, 3], [5, 5]):  # 5 was never seen
        distributions = [
            model.probabilities(np.array([*context, token])[-order:])[0] for token in range(6)
        ]
        assert sum(distributions) == pytest.approx(1)
        assert min(distributions) > 0


def test_probabilities_of_bigrams_equal_those_by_hand() -> None:
    # "0 1 0 1 0 2": bigrams 01 x2, 10 x2, 02 x1; contexts before 0: {1}, before 1: {0}, before 2:
    # {0}
    model = KneserNey(np.array([0, 1, 0, 1, 0, 2]), vocab_size=4, order=2, discount=0.5)
    unigram = (1 - 0.5) / 3 + 0.5 * 3 / 3 * 0.25
    assert model.probabilities(np.array([0, 1]))[0] == pytest.approx(
        (2 - 0.5) / 3 + 0.5 * 2 / 3 * unigram
    )
    # Nothing ever followed 2.
    assert model.probabilities(np.array([2, 1]))[0] == pytest.approx(unigram)
