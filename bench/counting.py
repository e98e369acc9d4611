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
        # The first 1 is the token that the target adds in every round.
        return (
            1 + sum(self.accepted_per_position) / self.num_drafts if self.num_drafts else math.nan
        )


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
        k = num_speculative_tokens
        generation = decoder.generate(
            prompt_ids, max_new_tokens=max_new_tokens + k, num_speculative_tokens=k
        )

        # Find the end of the completion: the first stop token, or the limit.
        stops = (
            place for place, token in enumerate(generation.token_ids, start=1) if token in stop_ids
        )
        end = min(max_new_tokens, next(stops, max_new_tokens))

        # Count the rounds that begin before this end, and in which something was drafted.
        length, drafts = 1, []  # the first token comes from the prefill, not from a round
        for entry in generation.rounds:
            if length >= end:
                break
            length += len(entry.emitted)
            drafts += [entry] if entry.drafted else []

        # Position k counts as accepted in a round that accepted more than k draft tokens.
        accepted = [
            sum(entry.num_accepted > k for entry in drafts) for k in range(num_speculative_tokens)
        ]
        counts = Counts(len(drafts), sum(len(entry.drafted) for entry in drafts), tuple(accepted))
        completions.append(Completion(generation.token_ids[:end], counts))
    return completions


def count_identical_completions(first: Sequence[Completion], second: Sequence[Completion]) -> int:
    """Return the number of prompts that both continue by the same tokens."""
    return sum(a.token_ids == b.token_ids for a, b in zip(first, second, strict=True))
