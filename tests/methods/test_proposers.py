"""What each method's proposer says of itself, without being asked to draft."""

import pytest
import torch
from safetensors.torch import load_file

from specdistill.decoding.proposer import Proposer
from specdistill.decoding.sampling import Sampling
from specdistill.decoding.tree import DynamicTree, StaticTree
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.draft_model.proposer import DraftModelProposer
from specdistill.methods.eagle3.checkpoint import save_eagle3
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.methods.ngram.method import NgramProposer
from tests.proposers import ModelProposer, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def test_a_head_proposes_the_tokens_of_its_vocabulary(target):
    proposer: Proposer = HeadProposer(build_eagle3(target, draft_vocabulary=torch.arange(0, target.vocab_size, 3)))
    assert proposer.vocabulary == frozenset(range(0, target.vocab_size, 3))
    assert proposer.settings == {}
    assert proposer.passes(5) == 5


def test_a_heads_size_is_that_of_the_weights_in_its_file(target, tmp_path):
    head = build_eagle3(target).to(torch.bfloat16)
    save_eagle3(head, tmp_path)
    saved = [tensor for tensor in load_file(tmp_path / "model.safetensors").values() if tensor.is_floating_point()]
    proposer = HeadProposer(head)
    assert proposer.num_parameters == sum(tensor.numel() for tensor in saved)
    assert proposer.num_bytes == 2 * proposer.num_parameters


def test_a_draft_model_states_its_options(target):
    proposer: Proposer = DraftModelProposer(target.model, confidence_threshold=0.5, context="window")
    assert proposer.vocabulary is None
    assert proposer.settings == {"confidence_threshold": 0.5, "draft_context": "window"}
    assert proposer.passes(5) == 5


def test_n_grams_propose_any_token_without_a_pass():
    proposer: Proposer = NgramProposer(2, 5, "prompt")
    assert proposer.vocabulary is None
    assert proposer.settings == {"min": 2, "max": 5, "lookup": "prompt"}
    assert proposer.passes(5) == 0


def test_models_draw_under_sampling_but_for_the_best_tokens_of_a_dynamic_tree(target):
    static, dynamic = StaticTree((2,)), DynamicTree(budget=2, depth=1, top_k=2)
    for proposer in (ModelProposer(target.model), DraftModelProposer(target.model), HeadProposer(build_eagle3(target))):
        assert [proposer.draws(Sampling(1.0), tree) for tree in (None, static, dynamic)] == [True, True, False]
        assert [proposer.draws(Sampling(), tree) for tree in (None, static, dynamic)] == [False, False, False]
    assert not NgramProposer().draws(Sampling(1.0), None)
