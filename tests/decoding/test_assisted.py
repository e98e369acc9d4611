"""Drafts in transformers' own loop, against its `generate()` without them: the same text,
distribution and drafts as here."""

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


def written(target: FrozenTarget, proposer: Proposer | None = None, **options: Any) -> list[int]:
    """What `generate()` adds to the prompt."""
    own = {} if proposer is None else {"custom_generate": Draft("any", proposer, target)}
    ids: Any = target.model.generate(PROMPT, **{**GREEDY, **own, **options})
    return list(ids[0, PROMPT.shape[1] :].tolist())


def keep_drafts(proposer: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The draft tokens of each round from now on in which four may follow."""
    kept: list[list[int]] = []
    as_it_is = proposer.propose

    def propose(
        state: DecodingState, k: int, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        proposals: list[Proposal] = as_it_is(state, k, sampling, generators)
        if k == 4:
            kept.append(list(proposals[0].tokens))
        return proposals

    monkeypatch.setattr(proposer, "propose", propose)
    return kept


@pytest.fixture(scope="module")
def plain(target: FrozenTarget) -> list[int]:
    return written(target)


@pytest.mark.parametrize("name", [name for name in (*SHAPES, *OTHERS) if "tree" not in name])
def test_drafts_and_greedy_text_are_those_of_this_decoder_and_of_generate(
    target: FrozenTarget, plain: list[int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same drafts, round by round, up to the last ones, which are shorter: heads get the
    features that they read here."""
    # A lookup alone has nothing to propose until a text repeats itself.
    num_tokens = 30 if name in ("ngram", "suffix") else 16
    here, there = proposer_of(name, target), proposer_of(name, target)
    drafted, drafted_there = keep_drafts(here, monkeypatch), keep_drafts(there, monkeypatch)
    run = Decoder(target, here).generate(
        PROMPT[0].tolist(), max_new_tokens=num_tokens, num_speculative_tokens=4
    )
    text = written(target, there, max_new_tokens=num_tokens)
    assert text == plain[:num_tokens] == list(run.token_ids)
    assert drafted_there == drafted[: len(drafted_there)]
    assert len(drafted) - len(drafted_there) <= 4 and any(drafted_there)


def widths(target: FrozenTarget, proposer: Proposer, **options: Any) -> list[int]:
    """Tokens that the target reads in each pass: the prompt, then rounds of a token and its
    draft."""
    passes: list[int] = []
    with target.backbone.register_forward_hook(
        lambda _module, _inputs, output: passes.append(output.last_hidden_state.shape[1])
    ):
        written(target, proposer, **options)
    return passes


def test_nothing_is_drafted_past_the_limit(target: FrozenTarget, plain: list[int]) -> None:
    oracle = Oracle([*PROMPT[0].tolist(), *plain])
    assert widths(target, oracle, max_new_tokens=13) == [6, 5, 5, 2]
    assert widths(target, oracle, max_new_tokens=13, num_speculative_tokens=2) == [6, 3, 3, 3, 3]


def test_a_draft_with_the_targets_distribution_is_accepted_in_full(target: FrozenTarget) -> None:
    torch.manual_seed(0)
    sampled = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.9,
        "max_new_tokens": 16,
    }
    assert widths(target, DraftModelProposer(target.model), **sampled) == [6, 5, 5, 5]


@pytest.mark.parametrize("kind", ["windows", "deepseek_v3"])
def test_targets_with_other_layers_keep_their_text(kind: str) -> None:
    target = (
        FrozenTarget(qwen(), tiny_tokenizer(), name=kind)
        if kind == "windows"
        else mtp_targets.tiny_target(kind)
    )
    target.model.generation_config.eos_token_id = []
    plain = written(target)
    wrong = [
        token if index % 5 else (token + 1) % 200
        for index, token in enumerate([*PROMPT[0].tolist(), *plain])
    ]
    assert written(target, Oracle(wrong)) == plain
    assert written(target, proposer_of("eagle", target)) == plain


def test_text_ends_where_generate_ends_it(target: FrozenTarget, plain: list[int]) -> None:
    oracle = Oracle([*PROMPT[0].tolist(), *plain])
    assert plain.index(plain[6]) == 6  # within what is drafted in the second round
    assert written(target, oracle, eos_token_id=plain[6]) == plain[:7]
    assert [written(target, oracle, max_new_tokens=count) for count in (1, 2, 7)] == [
        plain[:count] for count in (1, 2, 7)
    ]


class Drawing(ModelProposer):
    """Of another model than the target, so that about half of what it draws is rejected."""

    def __init__(self, **options: Any) -> None:
        super().__init__(tiny_target_model(num_layers=1, vocab_size=5, seed=3), **options)


@pytest.mark.parametrize(
    "one_hot",
    # two hundred texts each
    [False, pytest.param(True, marks=pytest.mark.long)],
)
def test_sampled_text_follows_the_targets_distribution(one_hot: bool) -> None:
    """Counts of the tokens that two rounds add, against their probabilities by the model's own
    logits; the same seed, so no flakes."""
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
    draft: Any = Draft("any", Drawing(one_hot=one_hot), target)
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 0,
        "max_new_tokens": 4,
        "pad_token_id": 0,
    }
    found = Counter(
        tuple(model.generate(prompt, custom_generate=draft, **options)[0, 3:6].tolist())
        for _ in range(count)
    )
    common = [index for index, share in enumerate(expected.tolist()) if share * count >= 5]
    observed = [found[texts[index]] for index in common]
    wanted = [share * count for share in expected[common].tolist()]
    assert (
        chisquare([*observed, count - sum(observed)], [*wanted, count - sum(wanted)]).pvalue > 0.01
    )


def test_what_a_draft_cannot_read_is_refused(target: FrozenTarget, plain: list[int]) -> None:
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
        written(recurrent, Oracle([5] * 50))
    # a call that failed leaves the model as it was
    assert "_get_candidate_generator" not in vars(target.model)
    assert written(target, DraftModelProposer(target.model)) == plain
