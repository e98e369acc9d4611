from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdistill.decoding.decoder import NEAR_TIE, Decoder, Generation, Round, exact
from specdistill.decoding.online_length import OnlineLengthProposer
from specdistill.decoding.proposer import Proposal
from specdistill.decoding.sampling import Sampling
from specdistill.decoding.tree import DynamicTree, StaticTree
from specdistill.measurement import reference
from specdistill.measurement.configurations import Settings
from specdistill.measurement.losslessness import (
    divergence,
    most_telling_prompt,
    sampling_test,
    summary,
    wrong_residual,
)
from specdistill.methods.models.proposer import DraftModelProposer
from specdistill.suites.suite import Prompt
from specdistill.targets.frozen import FrozenTarget
from tests.proposers import ModelProposer, ngram_proposer, tiny_target
from tests.tiny import tiny_target_model, tiny_tokenizer, twins

PROMPT = Prompt("p", "c", "text", (7, 2, 1, 6))
OTHER = Prompt("q", "c", "text", (5, 5, 5))
SAMPLED = Settings(2, 8, sampling=Sampling(1.0))


def generation(tokens: tuple[int, ...]) -> Generation:
    return Generation(
        PROMPT.token_ids, tokens, (Round((), 0, tokens[1:], 0.0, 0.0),), 0.0, 0.0, False
    )


def compared(
    target: Any, pairs: list[tuple[Prompt, Generation, tuple[int, ...]]]
) -> dict[str, Any]:
    return summary([divergence(target, *pair) for pair in pairs])


def test_equal_texts_are_identical():
    found = compared(tiny_target(), [(PROMPT, generation((1, 2, 3)), (1, 2, 3))] * 2)
    assert found["greedy_identical"]
    assert (found["prompts_checked"], found["divergences"], found["first_divergence"]) == (
        2,
        0,
        None,
    )


def test_the_first_divergence_is_named():
    found = compared(
        tiny_target(),
        [(OTHER, generation((1, 2)), (1, 2)), (PROMPT, generation((1, 2, 3)), (1, 2, 4, 5))],
    )
    first = found["first_divergence"]
    assert not found["greedy_identical"]
    assert (
        first["prompt_id"],
        first["position"],
        first["speculative_token"],
        first["baseline_token"],
    ) == ("p", 2, 3, 4)
    best = tiny_target().model(torch.tensor([[7, 2, 1, 6, 1, 2]])).logits[0, -1].topk(2).values
    assert first["top2_gap"] == pytest.approx(float(best[0] - best[1]), abs=1e-4)


def test_a_text_that_ends_early_diverges_where_it_ends():
    found = compared(twins(), [(PROMPT, generation((1, 2)), (1, 2, 4))])
    assert found["first_divergence"]["position"] == 2
    assert found["first_divergence"]["speculative_token"] is None
    assert found["unexplained_divergences"] == 1


@pytest.mark.parametrize(
    ("dtype", "rounding"), [("bfloat16", 2**-7), ("float16", 2**-10), ("float32", NEAR_TIE / 4)]
)
@pytest.mark.parametrize("best", [8.0, -8.0])
@pytest.mark.parametrize(("gap", "near_ties"), [(3, 1), (6, 0)])
def test_a_near_tie_is_at_most_four_roundings_of_the_best_logit(
    monkeypatch, dtype, rounding, best, gap, near_ties
):
    read = []
    logits_V = torch.tensor([-99.0, best, best - gap * rounding * abs(best)])
    monkeypatch.setattr(
        reference,
        "logits",
        lambda target, ids: read.append(ids) or torch.stack([-logits_V, logits_V]),
    )
    found = compared(SimpleNamespace(dtype=dtype), [(PROMPT, generation((1, 2)), (1, 1, 0))])
    assert (found["near_ties"], found["unexplained_divergences"]) == (near_ties, 1 - near_ties)
    assert read == [[*PROMPT.token_ids, 1]]  # what both completions began with


def test_the_wrong_rule_accepts_as_the_right_one_and_then_draws_from_p():
    distribution = torch.tensor([0.5, 0.3, 0.2])
    rejected = []
    for seed in range(4000):
        wrong, right = (
            rule(Proposal([0]), distribution.repeat(2, 1), torch.Generator().manual_seed(seed))
            for rule in (wrong_residual, exact)
        )
        assert wrong[0] == right[0]
        if not right[0]:
            assert right[1] != 0
            rejected.append(wrong[1])
    assert torch.tensor(rejected).bincount(minlength=3) / len(rejected) == pytest.approx(
        distribution, abs=0.04
    )


def peaked(seed: int) -> FrozenTarget:
    """Eight tokens with clear top-1 tokens, so that few draws tell distributions apart."""
    model = tiny_target_model(num_layers=1, vocab_size=8, seed=seed)
    model.lm_head.weight.data *= 2.5
    return FrozenTarget(model, tiny_tokenizer(), name="peaked")


def online(draft):
    """Where no draft pays, and only the first round drafts."""
    proposer = OnlineLengthProposer(draft)
    proposer.rule.start(3.0, 1.0, 0.5, 0.5)
    return proposer


@pytest.mark.parametrize(
    ("draft", "k", "tree"),
    [
        (ModelProposer(peaked(0).model, one_hot=True), 1, None),
        (ModelProposer(peaked(3).model), 1, None),
        (online(DraftModelProposer(peaked(3).model)), 4, None),
        (DraftModelProposer(peaked(3).model), 2, StaticTree((2, 1))),
        (DraftModelProposer(peaked(3).model), 2, DynamicTree(budget=3, depth=2, top_k=2)),
    ],
    ids=["one-hot", "drawn", "of a length chosen online", "static tree", "dynamic tree"],
)
def test_sampling_is_lossless_and_the_wrong_rule_is_caught(draft, k, tree):
    prompts = [Prompt("p", "c", "text", (1, 2, 3, 4)), OTHER]
    found = sampling_test(
        peaked(0), draft, prompts, Settings(k, 8, seed=1, tree=tree), num_draws=250
    )
    assert found["p_value"] > 0.01
    assert found["negative_control_p_value"] < 0.01


def test_too_few_draws_are_said_to_be_too_few():
    assert "2 draws" in sampling_test(
        peaked(0), ngram_proposer(), [PROMPT], Settings(1, 8), num_draws=2
    )
    assert (
        sampling_test(peaked(0), ngram_proposer(), [PROMPT], Settings(1, 8), num_draws=0)
        == "eval.sampling_draws is 0"
    )


def test_greedy_settings_are_tested_at_temperature_1_with_the_runs_seed():
    def test(**settings):
        return sampling_test(
            peaked(0), ngram_proposer(), [PROMPT], Settings(1, 8, **settings), num_draws=40
        )

    sampled = test(sampling=Sampling(1.0), seed=1)
    assert test(seed=1) == sampled != test(seed=2)


def test_the_most_telling_prompt_is_a_beginning_of_a_continuation():
    target, draft = tiny_target(), ModelProposer(tiny_target(seed=3).model, one_hot=True)
    prompts = [
        Prompt(name, "c", "text", (token, 2, 1, 6)) for token, name in enumerate("pqr", start=7)
    ]
    ids, name = most_telling_prompt(target, draft, prompts, SAMPLED)
    assert (ids, name) == most_telling_prompt(
        target, draft, prompts[::-1], SAMPLED
    )  # not the first
    (prompt,) = (prompt for prompt in prompts if prompt.id == name)
    assert ids[: len(prompt.token_ids)] == prompt.token_ids
    assert ids != Decoder(target).generate(prompt.token_ids, max_new_tokens=1).token_ids
    assert most_telling_prompt(target, ngram_proposer(), [PROMPT], SAMPLED)[1] == "p"


def test_losslessness_of_several_configurations_is_that_of_all_their_prompts():
    broken = {"prompt_id": "p", "position": 1, "near_tie": False}
    clean = dict.fromkeys(("divergences", "near_ties", "unexplained_divergences"), 0)
    clean |= {"greedy_identical": True, "first_divergence": None, "prompts_checked": 8}
    assert summary([None] * 8) == clean
    found = {
        "greedy_identical": False,
        "first_divergence": broken,
        "divergences": 1,
        "unexplained_divergences": 1,
    }
    assert summary([None] * 5 + [broken] + [None] * 2) == clean | found
    assert summary([{**broken, "near_tie": True}, broken])["near_ties"] == 1


def test_without_logits_no_divergence_is_known_to_be_a_near_tie():
    found = summary([None, {"prompt_id": "p"}])
    assert (found["divergences"], found["first_divergence"]) == (1, {"prompt_id": "p"})
    assert not {"near_ties", "unexplained_divergences"} & found.keys()
