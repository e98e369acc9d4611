"""bench/counting.py counts as engines do: the last round whole, stop tokens ignored."""

from bench.counting import (
    Counts,
    count_identical_completions,
    generate_here,
    ignore_stop_tokens,
    sum_counts,
)
from specdistill.decoding.proposer import Proposal
from tests.proposers import FirstTokens, ModelProposer, tiny_target

PROMPTS = [[5, 9, 20], [40, 41, 42, 43]]


def test_the_last_round_is_counted_whole_past_the_length_limit():
    target = tiny_target()
    ignore_stop_tokens(target)
    texts = generate_here(
        target, FirstTokens(target.model), PROMPTS, max_new_tokens=10, num_speculative_tokens=4
    )
    plain = generate_here(target, None, PROMPTS, max_new_tokens=10)
    assert count_identical_completions(texts, plain) == 2 and all(
        len(text.token_ids) == 10 for text in texts
    )
    # One token from the prefill, then rounds of 3 + 1: the third passes the limit and is counted
    # whole.
    assert [text.counts for text in texts] == [Counts(3, 12, (3, 3, 3, 0))] * 2
    assert [text.counts for text in plain] == [Counts(0, 0, ())] * 2
    assert (
        sum_counts(texts) == Counts(6, 24, (6, 6, 6, 0))
        and sum_counts(texts).mean_acceptance_length == 4
    )


def test_rounds_that_draft_nothing_are_not_counted_as_drafts():
    class Every2nd(ModelProposer):
        def after(self, text, *arguments):
            return super().after(text, *arguments) if len(text) % 2 else Proposal([])

    target = tiny_target()
    ignore_stop_tokens(target)
    (text,) = generate_here(
        target, Every2nd(target.model), PROMPTS[1:], max_new_tokens=7, num_speculative_tokens=2
    )
    # 4 prompt tokens and one from the prefill: a draft (2 + 1 tokens), one plain token, a draft.
    assert text.counts == Counts(2, 4, (2, 2))


def test_a_completion_ends_at_a_stop_token_and_its_last_round_is_counted_whole():
    target = tiny_target()
    ignore_stop_tokens(target)
    (whole,) = generate_here(target, None, PROMPTS[:1], max_new_tokens=20)
    stop = next(
        token
        for number, token in enumerate(whole.token_ids)
        if number >= 2 and token not in whole.token_ids[:number]
    )
    length = whole.token_ids.index(stop) + 1
    limits = {"max_new_tokens": 20, "num_speculative_tokens": 4, "stop_ids": (stop,)}
    (text,) = generate_here(target, FirstTokens(target.model), PROMPTS[:1], **limits)
    assert text.token_ids == whole.token_ids[:length]
    num_rounds = -(-(length - 1) // 4)  # one token from the prefill, then rounds of 3 + 1
    assert text.counts == Counts(
        num_rounds, 4 * num_rounds, (num_rounds, num_rounds, num_rounds, 0)
    )
