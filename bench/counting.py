"""Decode with this package's decoder, and count drafts and accepted tokens as vLLM counts them.

vLLM counts the accepted tokens of a round first, and cuts the completion at its limit or at a stop
token afterwards. Rounds here count after the cut. So decoding here ignores stop tokens, continues
past the limit until the last round is complete, and then cuts the completion itself.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from specdistill.decoding.decoder import Decoder
from specdistill.decoding.proposer import Proposer
from specdistill.targets.frozen import FrozenTarget


@dataclass(frozen=True)
class Counts:
    """The counts of one completion or of several, as vLLM counts.

    Attributes:
        num_drafts: rounds in which something was drafted.
        num_draft_tokens: draft tokens of these rounds.
        accepted_per_position: K numbers, one for each position in a draft: in how many rounds the
            draft token at this position was accepted.
    """

    num_drafts: int
    num_draft_tokens: int
    accepted_per_position: tuple[int, ...]

    @property
    def mean_acceptance_length(self) -> float:
        """The mean tokens per round with a draft; NaN if nothing was drafted."""
        if not self.num_drafts:
            return math.nan
        # The target adds one token of its own in every round.
        return 1 + sum(self.accepted_per_position) / self.num_drafts


@dataclass(frozen=True)
class Completion:
    """A completion, and how many draft tokens were accepted while it was generated.

    Attributes:
        token_ids: the completion.
        counts: its counts; all zeros without a draft.
    """

    token_ids: tuple[int, ...]
    counts: Counts


def sum_counts(completions: Sequence[Completion]) -> Counts:
    """Return the counts of all completions together."""
    # Each row holds all numbers of one completion. `zip` turns the rows into columns, whose sums
    # are the totals.
    counts = [completion.counts for completion in completions]
    rows = [
        (count.num_drafts, count.num_draft_tokens, *count.accepted_per_position) for count in counts
    ]
    num_drafts, num_draft_tokens, *accepted_per_position = map(sum, zip(*rows, strict=True))
    return Counts(num_drafts, num_draft_tokens, tuple(accepted_per_position))


def ignore_stop_tokens(target: FrozenTarget) -> None:
    """Remove the stop tokens of a target, so that it always generates `max_new_tokens` tokens."""
    # An empty list, because None would make the decoder read the stop tokens from the model's
    # config instead.
    target.model.generation_config.eos_token_id = []


def generate_here(
    target: FrozenTarget,
    proposer: Proposer | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    num_speculative_tokens: int = 0,
    stop_ids: Collection[int] = (),
) -> list[Completion]:
    """Continue each prompt greedily by `max_new_tokens` tokens, or up to a stop token.

    Accepted tokens are counted as vLLM counts them: all of those in the last round count, although
    the completion may end in the middle of that round. So decoding continues for up to K tokens
    after the end, and these extra tokens are cut off.

    Args:
        target: the target. It must ignore stop tokens (`ignore_stop_tokens`), so that it completes
            the last round.
        proposer: the draft; None for plain decoding.
        prompts: the token ids of each prompt.
        max_new_tokens: the limit of each completion.
        num_speculative_tokens: K.
        stop_ids: tokens at which a completion is cut off.

    Returns:
        The completion of each prompt, with its counts.

    Raises:
        UserError: if the target's context has no room for K more tokens.
    """
    decoder = Decoder(target, proposer)
    completions = []
    for prompt_ids in prompts:
        # Generate K tokens more than asked for, so that the last round is complete.
        generation = decoder.generate(
            prompt_ids,
            max_new_tokens=max_new_tokens + num_speculative_tokens,
            num_speculative_tokens=num_speculative_tokens,
        )
        end = _find_end(generation.token_ids, stop_ids, max_new_tokens)

        # Select the rounds that begin before the completion ends and that draft something. The
        # length starts at 1, because the first token comes from the prefill and not from a round.
        length = 1
        drafted_rounds = []
        for entry in generation.rounds:
            if length >= end:
                break
            length += len(entry.emitted)
            if entry.drafted:
                drafted_rounds.append(entry)

        # A round that accepts n draft tokens accepts those at the positions 0 to n - 1.
        accepted_per_position = []
        for position in range(num_speculative_tokens):
            accepted_per_position.append(
                sum(entry.num_accepted > position for entry in drafted_rounds)
            )
        counts = Counts(
            num_drafts=len(drafted_rounds),
            num_draft_tokens=sum(len(entry.drafted) for entry in drafted_rounds),
            accepted_per_position=tuple(accepted_per_position),
        )
        completions.append(Completion(generation.token_ids[:end], counts))
    return completions


def _find_end(token_ids: Sequence[int], stop_ids: Collection[int], limit: int) -> int:
    """Return the length of a completion: up to its first stop token, or up to the limit."""
    for length, token in enumerate(token_ids[:limit], start=1):
        if token in stop_ids:
            return length
    return limit


def count_identical_completions(first: Sequence[Completion], second: Sequence[Completion]) -> int:
    """Return for how many prompts both lists have the same completion."""
    return sum(a.token_ids == b.token_ids for a, b in zip(first, second, strict=True))
