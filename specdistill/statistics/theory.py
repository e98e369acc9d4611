"""What speculation should gain, from acceptance and the cost of a step (arXiv 2211.17192, section 3).

Symbols: K drafted tokens a round, AL mean acceptance length (the target's own token counts), alpha the acceptance rate that,
if it were the same at every position, would give AL. Costs are in plain decoding steps: v one verification of K drafted
tokens, c one draft step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scipy.optimize import brentq


def predicted_speedup(acceptance_length: Any, v: Any, c: Any, k: Any) -> Any:
    """S = AL / (v + c·K); plain decoding (AL = 1, v = 1, K = 0) gives 1. Elementwise over arrays."""
    return acceptance_length / (v + c * k)


def expected_acceptance_length(alpha: float, k: int) -> float:
    """AL = 1 + alpha + … + alpha^K = (1 - alpha^(K+1)) / (1 - alpha)."""
    return float(sum(alpha**i for i in range(k + 1)))


def alpha_from_acceptance_length(acceptance_length: float, k: int) -> float:
    """The alpha in [0, 1] whose `expected_acceptance_length` is AL, for AL in [1, K + 1]."""
    if acceptance_length <= 1:
        return 0.0
    if acceptance_length >= k + 1:
        return 1.0
    return float(brentq(lambda alpha: expected_acceptance_length(alpha, k) - acceptance_length, 0.0, 1.0))


def conditional_rates(rates: Sequence[float]) -> list[float | None]:
    """rate k / rate k-1, with rate 0 = 1: how often position k is accepted once it is reached; None where it never was."""
    previous = [1.0, *rates[:-1]]
    return [rate / before if before > 0 else None for rate, before in zip(rates, previous, strict=True)]


@dataclass(frozen=True)
class RoundCost:
    """Seconds of a round with K' = k drafted tokens: to verify them, and to draft all of them."""

    k: int
    verify_seconds: float
    draft_seconds: float


def speedup_curve(rates: Sequence[float], v: float, c: float, costs: Sequence[RoundCost]) -> list[dict[str, float]]:
    """AL and predicted speedup at K' = 0, at K, and at every K' between whose cost was timed beside that of K.

    A chain's position k is reached and accepted no matter how many positions follow it, so AL(K') is 1 plus the first K' rates.
    `costs` give v and c at K' relative to those at K: v(K') = v · verify(K') / verify(K), K'·c(K') = K·c · draft(K') /
    draft(K).
    """
    longest = len(rates)
    timed = {cost.k: cost for cost in costs}
    curve = [_point(0, rates, 1.0, 0.0)]
    for k in range(1, longest):
        if k in timed and longest in timed:
            verify = v * timed[k].verify_seconds / timed[longest].verify_seconds
            draft = c * longest * timed[k].draft_seconds / timed[longest].draft_seconds
            curve.append(_point(k, rates, verify, draft / k))
    return [*curve, _point(longest, rates, v, c)]


def _point(k: int, rates: Sequence[float], v: float, c: float) -> dict[str, float]:
    length = 1 + sum(rates[:k])
    return {"k": k, "mean_acceptance_length": length, "predicted_speedup": predicted_speedup(length, v, c, k)}


def best_point(curve: Sequence[dict[str, float]]) -> dict[str, float]:
    """The K' with the highest predicted speedup; K' = 0 says that plain decoding is faster."""
    return max(curve, key=lambda point: point["predicted_speedup"])
