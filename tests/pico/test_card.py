"""The model card's measure, where its value is known."""

import math

import pytest
import torch

from specdistill.pico.card import baseline_bits_per_byte, bits_per_byte
from tests.tiny import tiny_target_model


def test_a_model_that_knows_nothing_takes_log2_of_the_vocabulary_for_each_token():
    model = tiny_target_model(num_layers=1)
    model.lm_head.weight.data.zero_()
    stream = torch.randint(0, 260, (100,), generator=torch.Generator().manual_seed(0))
    # Two bytes a token; the last 4 tokens fill no window.
    assert bits_per_byte(model, stream, 200, context=32) == pytest.approx(math.log2(260) / 2, rel=1e-5)


def test_the_baseline_learns_what_repeats():
    stream = torch.tensor([5, 6, 7, 8] * 50)
    assert baseline_bits_per_byte(stream, stream, 200, 260) < 0.2 < 3 < baseline_bits_per_byte(stream, stream.flip(0), 200, 260)
