"""The proposer of each method states its vocabulary, settings, passes and size before it drafts."""

import pytest
import torch
from safetensors.torch import load_file

from specdistill.decoding.proposer import Proposer
from specdistill.decoding.sampling import Sampling
from specdistill.decoding.tree import DynamicTree, StaticTree
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.eagle3.checkpoint import save_eagle3
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.methods.feature_proposer import FeatureProposer
from specdistill.methods.lookups.method import LookupProposer
from specdistill.methods.models.proposer import DraftModelProposer
from specdistill.methods.ngram.lookup import NgramLookup
from tests.proposers import ModelProposer, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.mark.parametrize(
    ("build", "vocabulary", "settings", "passes"),
    [
        (
            lambda target: HeadProposer(
                build_eagle3(target, draft_vocabulary=torch.arange(0, 260, 3))
            ),
            {*range(0, 260, 3)},
            {},
            5,
        ),
        (
            lambda target: DraftModelProposer(target.model),
            None,
            {},
            5,
        ),
        (
            lambda target: LookupProposer(NgramLookup(2, 5, "prompt")),
            None,
            {"min": 2, "max": 5, "lookup": "prompt"},
            0,
        ),
    ],
)
def test_a_proposer_states_its_vocabulary_settings_and_passes(
    target, build, vocabulary, settings, passes
):
    proposer: Proposer = build(target)
    assert (proposer.vocabulary, proposer.settings, proposer.count_passes(5)) == (
        vocabulary,
        settings,
        passes,
    )


def test_a_heads_size_is_that_of_the_weights_in_its_file(target, tmp_path):
    head = build_eagle3(target).to(torch.bfloat16)
    save_eagle3(head, tmp_path)
    saved = [
        tensor
        for tensor in load_file(tmp_path / "model.safetensors").values()
        if tensor.is_floating_point()
    ]
    proposer: FeatureProposer = HeadProposer(head)
    assert proposer.num_parameters == sum(tensor.numel() for tensor in saved)
    assert proposer.num_bytes == 2 * proposer.num_parameters


def test_models_draw_candidates_under_sampling_except_for_dynamic_trees(target):
    static, dynamic = StaticTree((2,)), DynamicTree(budget=2, depth=1, top_k=2)
    for proposer in (
        ModelProposer(target.model),
        DraftModelProposer(target.model),
        HeadProposer(build_eagle3(target)),
    ):
        assert [
            proposer.has_drawn_candidates(Sampling(1.0), tree) for tree in (None, static, dynamic)
        ] == [
            True,
            True,
            False,
        ]
        assert [
            proposer.has_drawn_candidates(Sampling(), tree) for tree in (None, static, dynamic)
        ] == [
            False,
            False,
            False,
        ]
    assert not LookupProposer(NgramLookup()).has_drawn_candidates(Sampling(1.0), None)
