"""Draft length chosen online: each round drafts as many tokens as should pay, by what was accepted before and what rounds cost.

A draft token is worth drafting while the chance that it and all before it are accepted is above what it costs, times the tokens that the
same time yields otherwise. After j draft tokens there is another one if

    Π_{i≤j} p_i · a ≥ s · g        p_i = σ(logit c_i + o)

with c_i the draft's confidence at position i (the probability of its best token), o a running offset that fits confidences to what was
accepted, a the running acceptance rate of a position that is reached, s the cost of one more draft token in plain steps, and g the goodput,
tokens per round over cost per round, running averages as well. Where g < 1 no draft pays: rounds are plain steps, but for a few that try
again, which lose a share of TRIED of the time. Costs are measured before (`measure.calibrate`), with the averages that a request
begins with. All of it is one request's, or the rows' of a batch together: they share passes, and so the length.

Sources: SGLang's adaptive decoding (strategy `throughput_aware`) scores lengths by E[tokens] / cost, from acceptance so far and profiled
costs; SpecDec++ (arXiv 2405.19715) ends a draft when a rejection is likely.

The output is the target's. Whether a position is drafted depends on committed tokens, the draft tokens before it and distributions, never
on the token that would stand there: what is drafted follows the q that it is verified with, and where a draft ends the next token is
drawn from p.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdistill.decoding.proposer import DecodingState, PausingProposer, Proposal
from specdistill.decoding.sampling import Generators, Sampling

WEIGHT = 0.05  # of what was seen last in a running average
TRIED = 0.02
UNKNOWN = 0.5  # confidence of a draft that has none
LEAST = 1e-3  # confidences are kept this far from 0 and 1


class LengthRule:
    """Chooses the length of each round of one request, or of B rows that share rounds, and learns from what became of it.

    Running averages: offset, rate: o and a; tokens, cost: of a round that drafts, whose ratio is g.
    """

    def __init__(self, has_confidences: bool) -> None:
        self.has_confidences = has_confidences
        self.calibrate()

    def calibrate(self) -> None:
        """From now on lengths go round from 0 to K, and averages are learned, from request to request."""
        self.slope: float | None = None
        self.offset, self.rate, self.tokens, self.cost = 0.0, 0.5, 1.0, 1.0
        self._lengths = itertools.count()

    def start(self, base: float, slope: float, goodput: float, rate: float) -> None:
        """From now on choose. A round with k > 0 draft tokens costs base + slope · k plain steps. Each request begins with the offset that
        was learned, with this goodput while it drafts, and this acceptance rate.
        """
        self.base, self.slope, cost = base, slope, base + slope
        self.first = {"offset": self.offset, "rate": rate, "tokens": goodput * cost, "cost": cost}

    def begin(self) -> None:
        if self.slope is not None:
            vars(self).update(self.first)
        self._rounds_without = math.inf  # the first round always drafts
        self._drafted: list[
            tuple[int, list[int]]
        ] = []  # of each row: its tokens before the draft, draft tokens
        self._confidences: list[list[float]] = []  # [K][B], of these

    def length(self, token_ids: Sequence[Sequence[int]], k: int) -> int:
        """How many tokens to draft after those of each row, at most k: fewer if `is_enough` says so."""
        self._learn(token_ids)
        self._drafted, self._confidences = [], []
        if self.slope is None:
            k = next(self._lengths) % (k + 1)
        elif (
            self._rounds_without < (self.cost - self.tokens) / TRIED
        ):  # what a draft loses, in plain steps
            k = 0
        self._rounds_without = 0 if k else self._rounds_without + 1
        if self.has_confidences:
            return k
        unknown = torch.full((len(token_ids),), UNKNOWN)
        return next((length for length in range(1, k + 1) if self.is_enough(unknown)), k)

    def is_enough(self, confidence_B: Tensor) -> bool:
        """Whether the draft ends with the token that it has this confidence in (see `OnlineLengthProposer`)."""
        self._confidences.append(confidence_B.tolist())
        if self.slope is None:
            return False
        reached = [
            math.prod(map(self._expected, of_row))
            for of_row in zip(*self._confidences, strict=True)
        ]
        gain = self.rate * sum(reached) / len(reached)
        return gain < self.slope * max(self.tokens / self.cost, 1.0)

    def _expected(self, confidence: float) -> float:
        """p, how likely a draft token of this confidence is accepted."""
        c = min(max(confidence, LEAST), 1 - LEAST)
        return 1 / (1 + (1 - c) / c * math.exp(-self.offset))

    def drafts(self, token_ids: Sequence[Sequence[int]], proposals: Sequence[Proposal]) -> None:
        """Note what each row drafts after its tokens."""
        self._drafted = [
            (len(ids), proposal.tokens) for ids, proposal in zip(token_ids, proposals, strict=True)
        ]

    def _learn(self, token_ids: Sequence[Sequence[int]]) -> None:
        """From each row's tokens since the last draft: a rejected token is never the one that was emitted in its place."""
        counts = []  # (drafted, accepted) of each row
        for ids, (before, drafted) in zip(token_ids, self._drafted, strict=False):
            agree = (ours == theirs for ours, theirs in zip(drafted, ids[before:], strict=False))
            counts.append((len(drafted), sum(itertools.takewhile(bool, agree))))
        for position, confidences in enumerate(self._confidences):
            reached = [
                (accepted > position, self._expected(confidence))
                for (drafted, accepted), confidence in zip(counts, confidences, strict=False)
                if drafted > position and accepted >= position
            ]
            if reached:
                hit, expected = (
                    sum(column) / len(reached) for column in zip(*reached, strict=True)
                )
                self._average(offset=self.offset + hit - expected, rate=hit)
        longest = max((drafted for drafted, _ in counts), default=0)
        if longest and self.slope is not None:
            tokens = 1 + sum(accepted for _, accepted in counts) / len(counts)
            self._average(tokens=tokens, cost=self.base + self.slope * longest)

    def _average(self, **seen: float) -> None:
        vars(self).update(
            {
                name: (1 - WEIGHT) * getattr(self, name) + WEIGHT * value
                for name, value in seen.items()
            }
        )

    def keep(self, rows: Sequence[int]) -> None:
        self._drafted = [self._drafted[row] for row in rows if self._drafted]
        self._confidences = [
            [confidences[row] for row in rows] for confidences in self._confidences
        ]


class OnlineLengthProposer(PausingProposer):
    """A draft whose chains are as long as `rule` says, up to K.

    A draft that can end its chains by confidence has `is_enough`, which it asks after each draft token with the probability [B] of each
    row's best token; the chains end where it says so.
    """

    def __init__(self, draft: Any) -> None:
        super().__init__(draft, draft_length="online")
        self.rule = LengthRule(hasattr(draft, "is_enough"))
        if self.rule.has_confidences:
            draft.is_enough = self.rule.is_enough

    def begin(self, max_lengths: Sequence[int]) -> None:
        super().begin(max_lengths)
        self.rule.begin()

    def propose(
        self, state: DecodingState, k: int, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        if not (length := self.rule.length(state.token_ids, k)):
            self.pause(state)
            return [Proposal([])] * len(state.token_ids)
        proposals = self.draft.propose(self.resume(state), length, sampling, generators)
        self.rule.drafts(state.token_ids, proposals)
        return proposals

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self.rule.keep(rows)
