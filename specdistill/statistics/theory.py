"""What speculation should gain, from acceptance and the cost of a round (arXiv 2211.17192, section 3).

Symbols: K draft tokens per round, AL mean acceptance length (the target's own token counts), alpha the acceptance rate that,
if it were the same at every position, would give AL. Costs are in steps of plain decoding: v to verify K draft tokens, d to
draft all of them. d is a measured function of K. A draft that takes a pass for each token has d = c·K, with c the cost of a pass;
one that drafts a block in one pass has a d that hardly depends on K.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scipy.optimize import brentq

BETTER_K_GAIN = 0.02  # a smaller predicted gain of a K that was not measured counts for nothing


def predicted_speedup(acceptance_length: Any, v: Any, d: Any) -> Any:
    """S = AL / (v + d); plain decoding (AL = 1, v = 1, d = 0) gives 1. Elementwise over arrays."""
    return acceptance_length / (v + d)


def expected_acceptance_length(alpha: float, k: int) -> float:
    """AL = 1 + alpha + … + alpha^K = (1 - alpha^(K+1)) / (1 - alpha)."""
    return float(sum(alpha**i for i in range(k + 1)))


def alpha_from_acceptance_length(acceptance_length: float, k: int) -> float:
    """The alpha in [0, 1] whose `expected_acceptance_length` is AL, for AL in [1, K + 1]."""
    if acceptance_length <= 1:
        return 0.0
    if acceptance_length >= k + 1:
        return 1.0
    return float(
        brentq(lambda alpha: expected_acceptance_length(alpha, k) - acceptance_length, 0.0, 1.0)
    )


def conditional_rates(rates: Sequence[float]) -> list[float | None]:
    """rate k / rate k-1, with rate 0 = 1: how often position k is accepted once it is reached; None where it never was."""
    previous = [1.0, *rates[:-1]]
    return [
        rate / before if before > 0 else None for rate, before in zip(rates, previous, strict=True)
    ]


@dataclass(frozen=True)
class RoundCost:
    """Milliseconds of a round with k draft tokens: to verify them, and to draft all of them."""

    k: int
    verify_ms: float
    draft_ms: float


def speedup_curve(
    rates: Sequence[float], step_ms: float, cost: RoundCost, timed: Sequence[RoundCost]
) -> list[dict[str, float]]:
    """AL, cost and predicted speedup of rounds with K' draft tokens: 0, K, and every K' between that was timed as K was.

    A chain's position k is reached and accepted no matter how many positions follow it, so AL(K') is 1 plus the first K' rates.
    step_ms: a step of plain decoding. cost: of a round at K. timed: rounds at K' <= K; only their ratios to the one at K count.
    """
    at = {entry.k: entry for entry in timed}
    costs = [RoundCost(0, step_ms, 0.0)]
    for k in range(1, cost.k):
        if k in at and cost.k in at:
            verify, draft = (
                at[k].verify_ms / at[cost.k].verify_ms,
                at[k].draft_ms / at[cost.k].draft_ms,
            )
            costs.append(RoundCost(k, cost.verify_ms * verify, cost.draft_ms * draft))
    curve = []
    for entry in (*costs, cost):
        length = 1 + sum(rates[: entry.k])
        speedup = predicted_speedup(length, entry.verify_ms / step_ms, entry.draft_ms / step_ms)
        curve.append(
            {"mean_acceptance_length": length, **vars(entry), "predicted_speedup": speedup}
        )
    return curve


def best_point(curve: Sequence[dict[str, float]]) -> dict[str, float]:
    """The K' with the highest predicted speedup; K' = 0 says that plain decoding is faster."""
    return max(curve, key=lambda point: point["predicted_speedup"])
