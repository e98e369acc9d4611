from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdistill.decoding.decoder import Decoder, verify_sampled
from specdistill.decoding.near_ties import NEAR_TIE
from specdistill.decoding.proposer import Proposal
from specdistill.decoding.sampling import Sampling
from specdistill.decoding.sequence import Generation, Round
from specdistill.decoding.tree import DynamicTree, StaticTree
from specdistill.evaluation.measurement import losslessness, reference
from specdistill.evaluation.measurement.configurations import Settings
from specdistill.evaluation.measurement.losslessness import (
    find_divergence,
    find_most_telling_prompt,
    run_sampling_test,
    summarize_greedy,
    verify_with_wrong_residual,
)
from specdistill.evaluation.suites.suite import Prompt
from specdistill.methods.models.proposer import DraftModelProposer
from specdistill.targets.frozen import FrozenTarget
from tests.proposers import ModelProposer, ngram_proposer, tiny_target
from tests.tiny import tiny_target_model, tiny_tokenizer, twins

PROMPT = Prompt("p", "c", "text", (7, 2, 1, 6))
OTHER = Prompt("q", "c", "text", (5, 5, 5))
SAMPLED = Settings(2, 8, sampling=Sampling(1.0))


def make_generation(tokens: tuple[int, ...]) -> Generation:
    return Generation(
        PROMPT.token_ids, tokens, (Round((), 0, tokens[1:], 0.0, 0.0),), 0.0, 0.0, False
    )


def compare_texts(
    target: Any, pairs: list[tuple[Prompt, Generation, tuple[int, ...]]]
) -> dict[str, Any]:
    return summarize_greedy([find_divergence(target, *pair) for pair in pairs])


def test_equal_texts_are_identical():
    found = compare_texts(tiny_target(), [(PROMPT, make_generation((1, 2, 3)), (1, 2, 3))] * 2)
    assert found["greedy_identical"]
    assert (found["prompts_checked"], found["divergences"], found["first_divergence"]) == (
        2,
        0,
        None,
    )


def test_the_first_divergence_is_named():
    found = compare_texts(
        tiny_target(),
        [
            (OTHER, make_generation((1, 2)), (1, 2)),
            (PROMPT, make_generation((1, 2, 3)), (1, 2, 4, 5)),
        ],
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
    found = compare_texts(twins(), [(PROMPT, make_generation((1, 2)), (1, 2, 4))])
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
        "compute_logits",
        lambda target, ids, num_last: read.append(ids) or torch.stack([-logits_V, logits_V]),
    )
    found = compare_texts(
        SimpleNamespace(dtype=dtype), [(PROMPT, make_generation((1, 2)), (1, 1, 0))]
    )
    assert (found["near_ties"], found["unexplained_divergences"]) == (near_ties, 1 - near_ties)
    assert read == [[*PROMPT.token_ids, 1]]  # both completions begin with token 1


def test_the_wrong_rule_accepts_as_the_right_one_and_then_draws_from_p():
    distribution = torch.tensor([0.5, 0.3, 0.2])
    rejected = []
    for seed in range(1000):
        wrong, right = (
            rule(Proposal([0]), distribution.repeat(2, 1), torch.Generator().manual_seed(seed))
            for rule in (verify_with_wrong_residual, verify_sampled)
        )
        assert wrong[0] == right[0]
        if not right[0]:
            assert right[1] != 0
            rejected.append(wrong[1])
    assert torch.tensor(rejected).bincount(minlength=3) / len(rejected) == pytest.approx(
        distribution, abs=0.04
    )


def make_peaked_target(seed: int) -> FrozenTarget:
    """Return a target of eight tokens with clear favourites, so that few draws tell them apart."""
    model = tiny_target_model(num_layers=1, vocab_size=8, seed=seed)
    model.lm_head.weight.data *= 2.5
    return FrozenTarget(model, tiny_tokenizer(), name="peaked")


DYNAMIC = DynamicTree(budget=3, depth=2, top_k=2)


@pytest.mark.parametrize(
    ("draft", "k", "tree"),
    [
        pytest.param(ModelProposer(make_peaked_target(3).model), 1, None, id="drawn"),
        # two seconds each
        pytest.param(
            DraftModelProposer(make_peaked_target(3).model),
            2,
            DYNAMIC,
            id="dynamic tree",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ModelProposer(make_peaked_target(0).model, one_hot=True),
            1,
            None,
            id="one-hot",
            marks=pytest.mark.long,
        ),
        pytest.param(
            DraftModelProposer(make_peaked_target(3).model),
            2,
            StaticTree((2, 1)),
            id="static tree",
            marks=pytest.mark.long,
        ),
    ],
)
def test_sampling_is_lossless_and_the_wrong_rule_is_caught(draft, k, tree):
    prompts = [Prompt("p", "c", "text", (1, 2, 3, 4)), OTHER]
    found = run_sampling_test(
        make_peaked_target(0), draft, prompts, Settings(k, 8, seed=1, tree=tree), num_draws=120
    )
    assert found["p_value"] > 0.01
    assert found["negative_control_p_value"] < 0.01


def test_too_few_draws_give_a_reason_and_no_result():
    assert "2 draws" in run_sampling_test(
        make_peaked_target(0), ngram_proposer(), [PROMPT], Settings(1, 8), num_draws=2
    )
    assert (
        run_sampling_test(
            make_peaked_target(0), ngram_proposer(), [PROMPT], Settings(1, 8), num_draws=0
        )
        == "eval.sampling_draws is 0"
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_draws"),
    # 400 draws take two seconds
    [(0, 50), (288, 72), pytest.param(100_000, 400, marks=pytest.mark.long)],
)
def test_a_short_measurement_is_followed_by_a_short_test(num_tokens, num_draws):
    draft = ModelProposer(make_peaked_target(0).model, one_hot=True)
    found = run_sampling_test(
        make_peaked_target(0),
        draft,
        [PROMPT],
        Settings(1, 8, seed=1),
        num_draws=None,
        num_tokens=num_tokens,
    )
    assert found["num_draws"] == num_draws
    assert found["negative_control_p_value"] <= 0.01 < found["p_value"]


def test_a_short_test_that_misses_the_wrong_rule_becomes_a_long_one(monkeypatch):
    # The control verifies correctly, so that no test can find it.
    monkeypatch.setattr(losslessness, "verify_with_wrong_residual", losslessness.verify_sampled)
    monkeypatch.setattr(losslessness, "MAX_DRAWS", 80)
    draft = ModelProposer(make_peaked_target(0).model, one_hot=True)
    assert (
        run_sampling_test(
            make_peaked_target(0), draft, [PROMPT], Settings(1, 8, seed=1), num_draws=None
        )["num_draws"]
        == 80
    )


def test_a_target_without_frequent_outcomes_gives_a_reason_and_no_result(monkeypatch):
    """The target is random with many tokens: every pair of them is rarer than one in a hundred."""
    target = FrozenTarget(tiny_target_model(num_layers=1), tiny_tokenizer(), name="flat")
    target.lm_head.weight.data *= 0.01
    monkeypatch.setattr(losslessness, "run_chi_square_test", None)
    found = run_sampling_test(target, ngram_proposer(), [PROMPT], Settings(1, 8), num_draws=None)
    assert found.startswith("in 400 draws, no two outcomes are frequent enough")


def test_greedy_settings_are_tested_at_temperature_1_with_the_runs_seed():
    def run_test(**settings):
        return run_sampling_test(
            make_peaked_target(0),
            ngram_proposer(),
            [PROMPT],
            Settings(1, 8, **settings),
            num_draws=40,
        )

    sampled = run_test(sampling=Sampling(1.0), seed=1)
    assert run_test(seed=1) == sampled != run_test(seed=2)


def test_the_most_telling_prompt_is_a_beginning_of_a_continuation():
    target, draft = tiny_target(), ModelProposer(tiny_target(seed=3).model, one_hot=True)
    prompts = [
        Prompt(name, "c", "text", (token, 2, 1, 6)) for token, name in enumerate("pq", start=7)
    ]
    ids, name = find_most_telling_prompt(target, draft, prompts, SAMPLED)
    # not the first
    assert (ids, name) == find_most_telling_prompt(target, draft, prompts[::-1], SAMPLED)
    (prompt,) = (prompt for prompt in prompts if prompt.id == name)
    assert ids[: len(prompt.token_ids)] == prompt.token_ids
    assert ids != Decoder(target).generate(prompt.token_ids, max_new_tokens=1).token_ids
    assert find_most_telling_prompt(target, ngram_proposer(), [PROMPT], SAMPLED)[1] == "p"


def test_losslessness_of_several_configurations_is_that_of_all_their_prompts():
    broken = {"prompt_id": "p", "position": 1, "near_tie": False}
    clean = dict.fromkeys(("divergences", "near_ties", "unexplained_divergences"), 0)
    clean |= {"greedy_identical": True, "first_divergence": None, "prompts_checked": 8}
    assert summarize_greedy([None] * 8) == clean
    found = {
        "greedy_identical": False,
        "first_divergence": broken,
        "divergences": 1,
        "unexplained_divergences": 1,
    }
    assert summarize_greedy([None] * 5 + [broken] + [None] * 2) == clean | found
    assert summarize_greedy([{**broken, "near_tie": True}, broken])["near_ties"] == 1


def test_without_logits_no_divergence_is_known_to_be_a_near_tie():
    found = summarize_greedy([None, {"prompt_id": "p"}])
    assert (found["divergences"], found["first_divergence"]) == (1, {"prompt_id": "p"})
    assert not {"near_ties", "unexplained_divergences"} & found.keys()
