"""The draft length chosen online: it follows acceptance, confidence and costs, from the request's own past alone."""

from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch

from specdistill.decoding.decoder import Decoder, Generation, Round
from specdistill.decoding.online_length import WEIGHT, LengthRule, OnlineLengthProposer
from specdistill.decoding.proposer import DecodingState, Proposal, Remembering
from specdistill.decoding.sampling import GREEDY, Generators, Sampling
from specdistill.measurement.configurations import Settings
from specdistill.measurement.measure import calibrate, cost_and_yield
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.methods.models.proposer import DraftModelProposer
from specdistill.suites.suite import Prompt
from specdistill.targets.frozen import FrozenTarget
from tests.proposers import (
    Oracle,
    behind_lookup,
    ngram_proposer,
    state_of,
    suffix_proposer,
    tiny_target,
)

PROMPT, NEW_TOKENS, K = [5, 9, 5, 9, 6], 200, 6
PAYS, LOSES = (1.2, 0.1, 2.0, 0.5), (1.2, 0.1, 0.8, 0.5)  # what rules start with


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    target = tiny_target()
    target.model.generation_config.eos_token_id = []
    return target


@pytest.fixture(scope="module")
def plain(target: FrozenTarget) -> list[int]:
    return [*Decoder(target).generate(PROMPT, max_new_tokens=NEW_TOKENS).token_ids]


class Scripted(Oracle):
    """Right where `is_right` says so, wrong elsewhere."""

    depends_on_width, vocabulary = False, None
    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, plain: list[int], right: range) -> None:
        start = len(PROMPT)
        super().__init__(
            [
                *PROMPT,
                *(
                    token if index in right else (token + 1) % 250
                    for index, token in enumerate(plain, start)
                ),
            ]
        )


def online(draft: Any, start: tuple[float, float, float, float]) -> OnlineLengthProposer:
    proposer = OnlineLengthProposer(draft)
    proposer.rule.start(*start)
    return proposer


def decode(target: FrozenTarget, proposer: Any, prompt: list[int] = PROMPT) -> Generation:
    return Decoder(target, proposer).generate(
        prompt, max_new_tokens=NEW_TOKENS, num_speculative_tokens=K
    )


def lengths(generation: Generation) -> list[int]:
    return [len(entry.drafted) for entry in generation.rounds]


def test_drafts_are_long_where_they_are_accepted_and_end_where_they_are_not(
    target: FrozenTarget, plain: list[int]
) -> None:
    run = decode(target, online(Scripted(plain, range(80)), PAYS))
    accepted = [entry.num_accepted for entry in run.rounds]
    first_wrong = accepted.index(0)
    assert [*run.token_ids] == plain
    assert max(lengths(run)[:first_wrong]) > 4 and lengths(run)[-30:].count(0) > 25


def test_where_no_draft_pays_it_is_tried_again_now_and_then_and_found_to_pay(
    target: FrozenTarget, plain: list[int]
) -> None:
    never, later = (
        decode(target, online(Scripted(plain, right), LOSES))
        for right in (range(0), range(70, 300))
    )
    tried = [index for index, length in enumerate(lengths(never)) if length]
    # At first a draft costs 1.3 plain steps and yields 1.04 tokens: it loses 2 % of the time of 13 rounds; then more.
    assert tried[0] == 0 and all(14 <= later - earlier <= 25 for earlier, later in pairwise(tried))
    assert 0 in lengths(later)[:60] and min(lengths(later)[-5:-1]) > 2


def test_a_request_begins_as_every_other(target: FrozenTarget, plain: list[int]) -> None:
    """What was learned of one is forgotten before the next, so that repetitions of a prompt hold the same rounds."""
    proposer = online(Scripted(plain, range(40)), PAYS)
    first, other, again = (
        decode(target, proposer, prompt) for prompt in (PROMPT, PROMPT[1:], PROMPT)
    )
    assert [entry.drafted for entry in first.rounds] == [entry.drafted for entry in again.rounds]
    assert lengths(first) != lengths(other)


def test_a_draft_looks_up_earlier_outputs(target: FrozenTarget, plain: list[int]) -> None:
    proposer = online(suffix_proposer(), PAYS)
    assert isinstance(proposer, Remembering)
    proposer.remember([[*PROMPT, *plain]])
    assert sum(entry.num_accepted for entry in decode(target, proposer).rounds) > NEW_TOKENS / 2


@pytest.mark.parametrize("name", ["alone", "behind a lookup"])
def test_the_draft_has_read_the_rounds_that_it_did_not_draft(
    target: FrozenTarget, name: str
) -> None:
    """What it drafts is what a head drafts that reads the whole sequence at once."""
    head, drafted = HeadProposer(build_eagle3(target)), []

    class Watched(OnlineLengthProposer):
        def propose(
            self, state: DecodingState, k: int, sampling: Sampling, generators: Generators
        ) -> list[Proposal]:
            proposals = super().propose(state, k, sampling, generators)
            drafted.append((list(state.token_ids[0]), proposals[0].tokens))
            return proposals

    watched = Watched(head)
    decode(target, watched if name == "alone" else behind_lookup(watched, min=3, draft_tokens=3))
    for text, tokens in drafted:
        if tokens:
            head.begin([300])
            state = state_of(text, target.features(torch.tensor([text[:-1]]), head.aux_layers))
            assert tokens == head.propose(state, len(tokens), GREEDY, [None])[0].tokens
    counts = [len(tokens) for _, tokens in drafted]
    assert {*counts} == {*range(K + 1 if name == "alone" else 4)}


def test_a_draft_ends_with_a_token_that_it_is_unsure_of() -> None:
    def drafted(*confidences: list[float]) -> int:
        rule = LengthRule(has_confidences=True)
        rule.start(*PAYS)
        rule.begin()
        assert rule.length([[1]] * len(confidences[0]), K) == K
        return 1 + [rule.is_enough(torch.tensor(of_rows)) for of_rows in confidences].index(True)

    unsure = [0.05]
    assert drafted([0.99], [0.9], unsure) == 3 and drafted(unsure) == 1
    assert drafted([0.7], [0.7], [0.7], [0.7]) == 3  # 0.7³ · 0.5 is below 0.1 · 2
    assert drafted([0.05, 0.99], [0.5, 0.99], [0.5, 0.2], [0.5, 0.2]) == 3  # rows by their mean


def test_the_rows_of_a_batch_share_a_length(target: FrozenTarget) -> None:
    proposer, prompts = online(DraftModelProposer(target.model), PAYS), [[3, 4], PROMPT, [8] * 9]
    runs = Decoder(target, proposer).generate_all(
        prompts, max_new_tokens=40, num_speculative_tokens=K
    )
    alone = [Decoder(target).generate(prompt, max_new_tokens=40) for prompt in prompts]
    assert [run.token_ids for run in runs] == [run.token_ids for run in alone]
    shared = [*zip(*map(lengths, runs), strict=False)]
    assert all(len({*of_round}) == 1 for of_round in shared) and len({*shared}) > 1


def test_a_row_that_leaves_a_batch_takes_along_what_it_drafted() -> None:
    rule, rows = LengthRule(has_confidences=True), [[1], [2]]
    rule.start(*PAYS)
    rule.begin()
    rule.length(rows, K)
    rule.is_enough(torch.tensor([0.9, 0.1]))
    rule.drafts(rows, [Proposal([5]), Proposal([6])])
    rule.keep([1])
    rule.length([[2, 6, 7]], K)
    assert rule.offset == pytest.approx(WEIGHT * (1 - 0.1))  # accepted, at a confidence of 0.1


def rounds(length: int, seconds: float, *accepted: int) -> list[Round]:
    return [
        Round((1,) * length, count, (1,) * (count + 1), seconds / 4, 3 * seconds / 4)
        for count in accepted
    ]


def test_costs_are_a_line_over_plain_rounds_and_the_best_length_yields_most() -> None:
    times = {
        0: rounds(0, 2.0, 0, 0),
        1: rounds(1, 3.0, 0, 1),
        2: rounds(2, 3.5, 2, 1),
        3: rounds(3, 4.0, 2, 1),
    }
    assert cost_and_yield(times) == pytest.approx((1.25, 0.25, 2.5 / 1.75, 7 / 11))
    assert cost_and_yield({0: rounds(0, 2.0, 0), 1: rounds(1, 3.0, 1)}) == (1.5, 0.0, 2 / 1.5, 1.0)
    assert (
        cost_and_yield({}) == cost_and_yield({0: rounds(0, 2.0, 0)}) == (1.0, 0.0, 1.0, 0.5)
    )  # nothing was drafted


def test_lengths_follow_each_other_while_costs_are_measured(target: FrozenTarget) -> None:
    """Behind a lookup the draft's own, up to what it may draft there; another measurement begins again."""
    proposer, seen = behind_lookup(OnlineLengthProposer(ngram_proposer()), draft_tokens=2), []
    assert isinstance(proposer.draft, OnlineLengthProposer)
    rule, settings = proposer.draft.rule, Settings(5, 30)
    proposer.draft.draft.propose = lambda state, k, *_: seen.append(k) or [Proposal([7] * k)]  # type: ignore[method-assign]
    for _ in range(2):
        seen.clear()
        calibrate(target, proposer, [Prompt("p", "c", "text", tuple(PROMPT))], settings)
        assert (
            {*seen} == {1, 2}
            and rule.slope is not None
            and rule.first["cost"] == rule.base + rule.slope
        )
    assert rule.first["offset"] < 0 and rule.first["rate"] < 0.25  # nothing was accepted
