"""Drafts in transformers' own loop keep its text and distribution, and draft as in our decoder."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from specdistill.decoding.assisted import Draft
from specdistill.decoding.decoder import Decoder
from specdistill.decoding.proposer import DecodingState, Proposal, Proposer
from specdistill.decoding.sampling import Generators, Sampling
from specdistill.methods.models.proposer import DraftModelProposer
from specdistill.targets.frozen import FrozenTarget
from tests import mtp_targets
from tests.proposers import OTHERS, SHAPES, ModelProposer, Oracle, proposer_of
from tests.refusals import refused
from tests.tiny import qwen, tiny_target_model, tiny_tokenizer

PROMPT = torch.tensor([[5, 9, 5, 9, 20, 31]])
GREEDY = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}


def generate_tokens(
    target: FrozenTarget, proposer: Proposer | None = None, **options: Any
) -> list[int]:
    """Return the tokens that `generate()` adds to the prompt."""
    draft_options = {} if proposer is None else {"custom_generate": Draft("any", proposer, target)}
    ids: Any = target.model.generate(PROMPT, **{**GREEDY, **draft_options, **options})
    return list(ids[0, PROMPT.shape[1] :].tolist())


def record_drafts(proposer: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list to which the drafts of later rounds are added, where four tokens may follow."""
    drafts: list[list[int]] = []
    original_propose = proposer.propose

    def propose(
        state: DecodingState, k: int, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        proposals: list[Proposal] = original_propose(state, k, sampling, generators)
        if k == 4:
            drafts.append(list(proposals[0].tokens))
        return proposals

    monkeypatch.setattr(proposer, "propose", propose)
    return drafts


@pytest.fixture(scope="module")
def plain(target: FrozenTarget) -> list[int]:
    return generate_tokens(target)


@pytest.mark.parametrize("name", [name for name in (*SHAPES, *OTHERS) if "tree" not in name])
def test_drafts_and_greedy_text_are_those_of_this_decoder_and_of_generate(
    target: FrozenTarget, plain: list[int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are the same in each round, up to the last rounds, which are shorter.

    Heads therefore get the features that they get in our decoder.
    """
    # A lookup alone has nothing to propose until a text repeats itself.
    num_tokens = 30 if name in ("ngram", "suffix") else 16
    here, there = proposer_of(name, target), proposer_of(name, target)
    drafted, drafted_there = record_drafts(here, monkeypatch), record_drafts(there, monkeypatch)
    run = Decoder(target, here).generate(
        PROMPT[0].tolist(), max_new_tokens=num_tokens, num_speculative_tokens=4
    )
    text = generate_tokens(target, there, max_new_tokens=num_tokens)
    assert text == plain[:num_tokens] == list(run.token_ids)
    assert drafted_there == drafted[: len(drafted_there)]
    assert len(drafted) - len(drafted_there) <= 4 and any(drafted_there)


def record_widths(target: FrozenTarget, proposer: Proposer, **options: Any) -> list[int]:
    """Return how many tokens the target reads in each pass: the prompt, then rounds with drafts."""
    passes: list[int] = []
    with target.backbone.register_forward_hook(
        lambda _module, _inputs, output: passes.append(output.last_hidden_state.shape[1])
    ):
        generate_tokens(target, proposer, **options)
    return passes


def test_nothing_is_drafted_past_the_limit(target: FrozenTarget, plain: list[int]) -> None:
    oracle = Oracle([*PROMPT[0].tolist(), *plain])
    assert record_widths(target, oracle, max_new_tokens=13) == [6, 5, 5, 2]
    assert record_widths(target, oracle, max_new_tokens=13, num_speculative_tokens=2) == [
        6,
        3,
        3,
        3,
        3,
    ]


def test_a_draft_with_the_targets_distribution_is_accepted_in_full(target: FrozenTarget) -> None:
    torch.manual_seed(0)
    sampled = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.9,
        "max_new_tokens": 16,
    }
    assert record_widths(target, DraftModelProposer(target.model), **sampled) == [6, 5, 5, 5]


@pytest.mark.parametrize("kind", ["windows", "deepseek_v3"])
def test_targets_with_other_layers_keep_their_text(kind: str) -> None:
    target = (
        FrozenTarget(qwen(), tiny_tokenizer(), name=kind)
        if kind == "windows"
        else mtp_targets.tiny_target(kind)
    )
    target.model.generation_config.eos_token_id = []
    plain = generate_tokens(target)
    oracle_text = [
        token if index % 5 else (token + 1) % 200
        for index, token in enumerate([*PROMPT[0].tolist(), *plain])
    ]
    assert generate_tokens(target, Oracle(oracle_text)) == plain
    assert generate_tokens(target, proposer_of("eagle", target)) == plain


def test_text_ends_where_generate_ends_it(target: FrozenTarget, plain: list[int]) -> None:
    oracle = Oracle([*PROMPT[0].tolist(), *plain])
    assert plain.index(plain[6]) == 6  # within what is drafted in the second round
    assert generate_tokens(target, oracle, eos_token_id=plain[6]) == plain[:7]
    assert [generate_tokens(target, oracle, max_new_tokens=count) for count in (1, 2, 7)] == [
        plain[:count] for count in (1, 2, 7)
    ]


class OtherModelProposer(ModelProposer):
    """A proposer with another model than the target: about half of its draws are rejected."""

    def __init__(self, **options: Any) -> None:
        super().__init__(tiny_target_model(num_layers=1, vocab_size=5, seed=3), **options)


@pytest.mark.parametrize(
    "one_hot",
    # two hundred texts each
    [False, pytest.param(True, marks=pytest.mark.long)],
)
def test_sampled_text_follows_the_targets_distribution(one_hot: bool) -> None:
    """Counts of the tokens of two rounds fit their probabilities by the model's own logits.

    The seed is fixed.
    """
    model = tiny_target_model(num_layers=1, vocab_size=5)
    model.generation_config.eos_token_id = []
    target = FrozenTarget(model, tiny_tokenizer(), name="tiny")
    prompt, count = torch.tensor([[1, 2, 3]]), 200
    with torch.no_grad():
        texts = list(product(range(5), repeat=3))
        logits = (
            model(torch.cat((prompt.expand(125, -1), torch.tensor(texts)), dim=1)).logits[:, 2:5]
            / 0.7
        )
        expected = (
            logits.log_softmax(-1)
            .gather(-1, torch.tensor(texts)[..., None])
            .sum((1, 2))
            .exp()
            .double()
        )
    draft: Any = Draft("any", OtherModelProposer(one_hot=one_hot), target)
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 0,
        "max_new_tokens": 4,
        "pad_token_id": 0,
    }
    counts = Counter(
        tuple(model.generate(prompt, custom_generate=draft, **options)[0, 3:6].tolist())
        for _ in range(count)
    )
    common = [index for index, share in enumerate(expected.tolist()) if share * count >= 5]
    observed = [counts[texts[index]] for index in common]
    expected_counts = [share * count for share in expected[common].tolist()]
    assert (
        chisquare(
            [*observed, count - sum(observed)], [*expected_counts, count - sum(expected_counts)]
        ).pvalue
        > 0.01
    )


def test_inputs_that_a_draft_cannot_read_are_refused(
    target: FrozenTarget, plain: list[int]
) -> None:
    draft: Any = Draft("eagle3", proposer_of("eagle3", target), target)
    with refused("custom_generate", "a draft of another model"):
        tiny_target_model().generate(PROMPT, custom_generate=draft, **GREEDY)
    read = target.model(PROMPT[:, :4], use_cache=True).past_key_values
    embedded = target.model.get_input_embeddings()(PROMPT)
    for inputs in ({"inputs": PROMPT, "past_key_values": read}, {"inputs_embeds": embedded}):
        with refused("custom_generate", "inputs_embeds, or tokens in a cache"):
            target.model.generate(custom_generate=draft, **inputs, **GREEDY)
    recurrent = mtp_targets.tiny_target("qwen3_next")
    with refused("custom_generate", holds="recurrent"):
        generate_tokens(recurrent, Oracle([5] * 50))
    # a call that failed leaves the model as it was
    assert "_get_candidate_generator" not in vars(target.model)
    assert generate_tokens(target, DraftModelProposer(target.model)) == plain
