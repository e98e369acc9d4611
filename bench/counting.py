"""What this package's decoder generates with a draft and accepts of it, counted as engines count.

Engines count what the target accepted of a draft before they cut the completion at its limit or at a stop token; rounds here count after
the cut. So decoding here ignores stop tokens and continues until the last round is complete.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from specdistill.decoding.decoder import Decoder
from specdistill.decoding.proposer import Proposer
from specdistill.targets.frozen import FrozenTarget


@dataclass(frozen=True)
class Counts:
    """Of one completion or of several, as vLLM counts. accepted_per_position [K]: drafts whose token there was accepted."""

    num_drafts: int
    num_draft_tokens: int
    accepted_per_position: tuple[int, ...]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round, the target's own included; NaN when nothing was drafted."""
        return (
            1 + sum(self.accepted_per_position) / self.num_drafts if self.num_drafts else math.nan
        )


@dataclass(frozen=True)
class Completion:
    """A completion, and what was accepted on the way: all zeros without a draft."""

    token_ids: tuple[int, ...]
    counts: Counts


def total(completions: Sequence[Completion]) -> Counts:
    """The counts of all completions together."""
    counts = [completion.counts for completion in completions]
    rows = [
        (count.num_drafts, count.num_draft_tokens, *count.accepted_per_position) for count in counts
    ]
    num_drafts, num_draft_tokens, *accepted = map(sum, zip(*rows, strict=True))
    return Counts(num_drafts, num_draft_tokens, tuple(accepted))


def ignore_stop_tokens(target: FrozenTarget) -> None:
    """From now on this target's completions end at their limit alone."""
    target.model.generation_config.eos_token_id = []  # not None, for which the model's config is asked


def generate_here(
    target: FrozenTarget,
    proposer: Proposer | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    num_speculative_tokens: int = 0,
    stop_ids: Collection[int] = (),
) -> list[Completion]:
    """Each prompt continued by `max_new_tokens` tokens, greedily, or to one of `stop_ids`; the last round counts what it would accept
    without that end.

    The target ignores stop tokens (`ignore_stop_tokens`). There must be room for K more tokens in its context; raises UserError where
    there is not.
    """
    decoder, completions = Decoder(target, proposer), []
    for prompt_ids in prompts:
        k = num_speculative_tokens
        generation = decoder.generate(
            prompt_ids, max_new_tokens=max_new_tokens + k, num_speculative_tokens=k
        )
        stops = (
            place for place, token in enumerate(generation.token_ids, start=1) if token in stop_ids
        )
        end = min(max_new_tokens, next(stops, max_new_tokens))
        length, drafts = 1, []  # the first token is the prefill's
        for entry in generation.rounds:
            if length >= end:
                break
            length += len(entry.emitted)
            drafts += [entry] if entry.drafted else []
        accepted = [
            sum(entry.num_accepted > k for entry in drafts) for k in range(num_speculative_tokens)
        ]
        counts = Counts(len(drafts), sum(len(entry.drafted) for entry in drafts), tuple(accepted))
        completions.append(Completion(generation.token_ids[:end], counts))
    return completions


def num_same(one: Sequence[Completion], other: Sequence[Completion]) -> int:
    """How many prompts are continued by the same tokens."""
    return sum(a.token_ids == b.token_ids for a, b in zip(one, other, strict=True))
