"""Compute what speculative decoding should gain, from acceptance and the cost of a round.

The model is that of arXiv 2211.17192, section 3. Symbols:

- K is the number of draft tokens per round.
- AL is the mean acceptance length: tokens emitted per round.
- alpha is the acceptance rate that would give AL if it were the same at every position.
- v is the cost to verify K draft tokens, in steps of plain decoding.
- d is the cost to draft all K tokens, in steps of plain decoding. It is a measured function of K.

A draft that takes a pass for each token has d = c·K, where c is the cost of a pass. A draft that
produces a block in one pass has a d that hardly depends on K.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, isotonic_regression

Number = TypeVar("Number", float, NDArray[np.float64])

# A K that was not measured counts as better only if it is predicted to gain more than this share.
# A smaller share would recommend differences that a measurement cannot confirm.
BETTER_K_GAIN = 0.02


def predicted_speedup(acceptance_length: Number, v: Number, d: Number) -> Number:
    """Return the speedup over plain decoding, S = AL / (v + d), elementwise over arrays.

    A round emits AL tokens and costs as much as v + d steps of plain decoding, which emits one
    token per step. Plain decoding itself (AL = 1, v = 1, d = 0) gives 1.

    Args:
        acceptance_length: AL, tokens per round.
        v: the cost of verification in a round, in steps of plain decoding.
        d: the cost of drafting in a round, in steps of plain decoding.
    """
    return acceptance_length / (v + d)


def expected_acceptance_length(alpha: float, k: int) -> float:
    """Return the acceptance length of K draft tokens if each is accepted with probability alpha.

    AL = 1 + alpha + … + alpha^K = (1 - alpha^(K+1)) / (1 - alpha)
    """
    # Compute the sum, because the fraction divides by zero at alpha = 1.
    return float(sum(alpha**i for i in range(k + 1)))


def alpha_from_acceptance_length(acceptance_length: float, k: int) -> float:
    """Return the alpha in [0, 1] that gives this acceptance length, which is in [1, K + 1].

    This inverts `expected_acceptance_length`.
    """
    if acceptance_length <= 1:
        return 0.0
    if acceptance_length >= k + 1:
        return 1.0

    # The acceptance length rises with alpha, so there is one root, which brentq finds.
    return float(
        brentq(lambda alpha: expected_acceptance_length(alpha, k) - acceptance_length, 0.0, 1.0)
    )


@dataclass(frozen=True)
class RoundCost:
    """The milliseconds of a round.

    Attributes:
        k: the number of draft tokens.
        verify_ms: the time to verify them.
        draft_ms: the time to draft all of them.
    """

    k: int
    verify_ms: float
    draft_ms: float


def compute_deviation_from_rising(timed: Sequence[RoundCost]) -> float:
    """Return the largest relative deviation of verification times from a curve that rises with K.

    A pass over more tokens has more to do, so verification times should rise with K. The rising
    curve that is closest to the times is fitted by isotonic regression. A large deviation comes
    from noise, or from kernels that are faster for some numbers of rows. If it is large, the time
    at one K says little about the time at the next K.

    Args:
        timed: the measured costs of a round, at several K.
    """
    if not timed:
        return 0.0

    # Fit the closest curve that never falls, and compare each time with it.
    verify_ms = [cost.verify_ms for cost in sorted(timed, key=lambda cost: cost.k)]
    rising_ms = isotonic_regression(verify_ms).x
    return float(
        max(
            abs(measured / rising - 1)
            for measured, rising in zip(verify_ms, rising_ms, strict=True)
        )
    )


def compute_speedup_curve(
    emitted_per_position: Sequence[int],
    num_drafts: int,
    step_ms: float,
    cost: RoundCost,
    timed: Sequence[RoundCost],
) -> list[dict[str, float]]:
    """Predict acceptance length, cost and speedup for fewer draft tokens per round than measured.

    The measured rounds had up to K draft tokens (`cost.k`). The curve has a point for K' = 0 (plain
    decoding), for each smaller number K' in `timed`, and for K.

    The draft tokens after a token do not change whether it is accepted. So with K' draft tokens, a
    round emits the first K' + 1 of the tokens that it emits with K, or all if these are fewer. The
    same text then takes more rounds. Some rounds draft nothing (a lookup may find nothing). They
    are steps of plain decoding, so their number is the same for every K'.

    Args:
        emitted_per_position: [K + 1], how many rounds emitted at least 1, 2, …, K + 1 tokens. The
            first entry counts all rounds.
        num_drafts: the number of rounds in which something was drafted.
        step_ms: the milliseconds of a step of plain decoding.
        cost: the milliseconds of a round at K, on average over all rounds of the measurement.
        timed: the milliseconds of a round at K and at smaller K', timed on a few prompts or
            estimated. Only ratios to those at K are used: they scale the costs in `cost`.

    Returns:
        The points of the curve, with increasing K'.
    """
    # Rounds in which nothing was drafted emit one token each, as plain decoding does.
    num_rounds = emitted_per_position[0]
    num_tokens = sum(emitted_per_position)
    num_plain_steps = num_rounds - num_drafts
    tokens_of_drafts = num_tokens - num_plain_steps

    # `cost` has means over all rounds. Compute the means over the rounds with a draft: subtract the
    # plain steps from the total time of verification; drafting takes no time in a plain step.
    verify_ms = (cost.verify_ms * num_rounds - step_ms * num_plain_steps) / num_drafts
    draft_ms = cost.draft_ms * num_rounds / num_drafts

    def make_point(rounds_of_text: float, mean_cost: RoundCost) -> dict[str, float]:
        """Return the point of the curve for rounds with up to K' draft tokens (`mean_cost.k`).

        Args:
            rounds_of_text: how many rounds the text of `num_tokens` tokens takes at this K'.
            mean_cost: K', and the mean cost of these rounds.
        """
        length = num_tokens / rounds_of_text
        v = mean_cost.verify_ms / step_ms
        d = mean_cost.draft_ms / step_ms
        return {
            "mean_acceptance_length": length,
            **vars(mean_cost),
            "predicted_speedup": predicted_speedup(length, v, d),
        }

    # At K' = 0, plain decoding, each token takes a step. A K' below K (`shorter`) can be predicted
    # only if its rounds were timed, and if rounds at K were timed in the same way.
    curve = [make_point(num_tokens, RoundCost(k=0, verify_ms=step_ms, draft_ms=0.0))]
    timed_at = {entry.k: entry for entry in timed}
    timed_at_k = timed_at.get(cost.k)
    for shorter in range(1, cost.k):
        timed_at_shorter = timed_at.get(shorter)
        if timed_at_k is None or timed_at_shorter is None:
            continue

        # With K' draft tokens, a round emits the tokens of its first K' + 1 positions. So the same
        # tokens take more rounds. Every round with a draft emits a first token, so `num_drafts`
        # counts these; the first entry of `emitted_per_position` has the plain steps as well.
        tokens_per_draft = (num_drafts + sum(emitted_per_position[1 : shorter + 1])) / num_drafts
        num_more_drafts = tokens_of_drafts / tokens_per_draft
        num_more_rounds = num_plain_steps + num_more_drafts

        # The costs at K' are scaled from those at K by their measured ratio.
        shorter_verify_ms = verify_ms * timed_at_shorter.verify_ms / timed_at_k.verify_ms
        shorter_draft_ms = draft_ms * timed_at_shorter.draft_ms / timed_at_k.draft_ms
        total_verify_ms = step_ms * num_plain_steps + shorter_verify_ms * num_more_drafts
        mean_cost = RoundCost(
            k=shorter,
            verify_ms=total_verify_ms / num_more_rounds,
            draft_ms=shorter_draft_ms * num_more_drafts / num_more_rounds,
        )
        curve.append(make_point(num_more_rounds, mean_cost))
    curve.append(make_point(num_rounds, cost))
    return curve


def select_best_point(curve: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the point of a curve of `compute_speedup_curve` with the highest predicted speedup.

    If the K' of this point is 0, plain decoding is faster than any draft.
    """
    return max(curve, key=lambda point: point["predicted_speedup"])
