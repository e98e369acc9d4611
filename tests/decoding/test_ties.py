"""Greedy text where every choice is a near-tie.

The tokens of the vocabulary's second half are twins of the first half, a few roundings apart.
"""

import pytest
import torch

from specdistill.decoding import near_ties
from specdistill.decoding.decoder import Decoder
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.targets.frozen import FrozenTarget
from tests import mtp_targets
from tests.proposers import ngram_proposer
from tests.tiny import twins

PROMPT = [5, 9, 5, 9, 20, 31]
NEW_TOKENS = 20


@pytest.fixture
def target() -> FrozenTarget:
    return twins()


def test_greedy_text_is_what_float64_prefers_and_float32_does_not(target, monkeypatch):
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    plain = Decoder(target).generate(PROMPT, max_new_tokens=NEW_TOKENS).token_ids
    best = near_ties.compute_logits_in_float64(target, [*PROMPT, *plain], len(PROMPT) + len(plain))[
        0
    ].argmax(-1)
    assert list(plain) == best[len(PROMPT) - 1 : -1].tolist()
    assert any(token >= 130 for token in plain)
    assert any(token < 130 for token in plain)
    after = target.model.state_dict()
    assert all(
        torch.equal(tensor, after[name]) and tensor.dtype == after[name].dtype
        for name, tensor in before.items()
    )
    monkeypatch.setattr(near_ties, "NEAR_TIE", -1.0)
    assert Decoder(target).generate(PROMPT, max_new_tokens=NEW_TOKENS).token_ids != plain


def test_a_draft_changes_nothing_at_near_ties(target):
    plain = Decoder(target).generate(PROMPT, max_new_tokens=NEW_TOKENS).token_ids
    for proposer in (HeadProposer(build_eagle3(target)), ngram_proposer()):
        fast = Decoder(target, proposer).generate(
            PROMPT, max_new_tokens=NEW_TOKENS, num_speculative_tokens=4
        )
        assert fast.token_ids == plain


def test_clear_choices_and_16_bit_logits_are_left_alone(target):
    logits = torch.tensor([[[1.0, 2.0, 3.0], [3.0, 3.0, 1.0]]])
    assert near_ties.find_near_ties(target, logits) == [[False, True]]
    assert near_ties.find_near_ties(target, logits.bfloat16()) == [[False, False]]


def test_a_mixture_of_experts_breaks_ties_too():
    target = mtp_targets.tiny_target("deepseek_v3")
    experts = target.config._experts_implementation
    exact = near_ties.compute_logits_in_float64(target, PROMPT, len(PROMPT))
    with torch.no_grad():
        logits = target.logits(target.features(torch.tensor([PROMPT]), ()).last_hidden)
    assert exact.dtype == torch.float64 and logits.dtype == torch.float32
    torch.testing.assert_close(exact, logits.double(), rtol=0, atol=1e-4)
    assert target.config._experts_implementation == experts
