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
        accepted_per_position: K numbers: in how many rounds the draft token at this position was
            accepted.
    """

    num_drafts: int
    num_draft_tokens: int
    accepted_per_position: tuple[int, ...]

    @property
    def mean_acceptance_length(self) -> float:
        """The tokens per round, the target's own included; NaN if nothing was drafted."""
        if not self.num_drafts:
            return math.nan
        # The target adds one token of its own in every round.
        return 1 + sum(self.accepted_per_position) / self.num_drafts


@dataclass(frozen=True)
class Completion:
    """A completion, and what was accepted on the way.

    Attributes:
        token_ids: the completion.
        counts: its counts; all zeros without a draft.
    """

    token_ids: tuple[int, ...]
    counts: Counts


def sum_counts(completions: Sequence[Completion]) -> Counts:
    """Return the counts of all completions together."""
    # Add up rounds, draft tokens, and the accepted tokens of each position, column by column.
    counts = [completion.counts for completion in completions]
    rows = [
        (count.num_drafts, count.num_draft_tokens, *count.accepted_per_position) for count in counts
    ]
    num_drafts, num_draft_tokens, *accepted = map(sum, zip(*rows, strict=True))
    return Counts(num_drafts, num_draft_tokens, tuple(accepted))


def ignore_stop_tokens(target: FrozenTarget) -> None:
    """Make all later completions of this target end at their limit only."""
    # None would not do: the stop tokens would then be read from the model's config.
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

    The last round counts what it would accept if the completion did not end there. So decoding
    continues for up to K tokens after the end.

    Args:
        target: the target; it ignores stop tokens (`ignore_stop_tokens`).
        proposer: the draft; None for plain decoding.
        prompts: the token ids of each prompt.
        max_new_tokens: the limit of each completion.
        num_speculative_tokens: K.
        stop_ids: tokens that end a completion.

    Returns:
        The completion of each prompt.

    Raises:
        UserError: if the target's context has no room for K more tokens.
    """
    # Each prompt is continued by K tokens more than asked for, so that no round is cut off.
    decoder = Decoder(target, proposer)
    completions = []
    for prompt_ids in prompts:
        # K tokens more than asked for are generated, so that the last round is not cut off.
        generation = decoder.generate(
            prompt_ids,
            max_new_tokens=max_new_tokens + num_speculative_tokens,
            num_speculative_tokens=num_speculative_tokens,
        )
        end = _find_end(generation.token_ids, stop_ids, max_new_tokens)

        # Count the rounds that begin before this end, and in which something was drafted. The
        # first token comes from the prefill, not from a round.
        length = 1
        drafted_rounds = []
        for entry in generation.rounds:
            if length >= end:
                break
            length += len(entry.emitted)
            if entry.drafted:
                drafted_rounds.append(entry)

        # A position was accepted in a round that accepted more draft tokens than precede it.
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
    """Return the number of prompts that both continue by the same tokens."""
    return sum(a.token_ids == b.token_ids for a, b in zip(first, second, strict=True))
