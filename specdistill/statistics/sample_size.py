"""What a run of n prompts can detect, stated before it runs.

A change is detected when the interval of metric / baseline's metric - 1 excludes 0. By the normal approximation, n prompts detect a
change of

    (z(1 - significance / 2) + z(power)) · spread / √n

with that power, two-sided, where `spread` is the standard deviation over prompts of their influence on the relative change.
"""

import math

from scipy import stats

POWER, SIGNIFICANCE = 0.8, 0.05
# Of the acceptance length: with it 80 prompts detect a change of 5 %, the prompts and tolerance of vLLM's own acceptance test.
ASSUMED_SPREAD = 0.16


def minimum_detectable_change(num_prompts: int) -> float:
    """The smallest relative change of the acceptance length that a comparison over `num_prompts` detects with POWER."""
    z: float = stats.norm.ppf(1 - SIGNIFICANCE / 2) + stats.norm.ppf(POWER)
    return z * ASSUMED_SPREAD / math.sqrt(num_prompts)


def power_analysis(num_prompts: int) -> str:
    """One sentence: the change that `num_prompts` can detect."""
    return (
        f"{num_prompts} prompts can detect a change of {minimum_detectable_change(num_prompts):.1%} of the acceptance length: power "
        f"{POWER:.0%}, two-sided {SIGNIFICANCE:.0%}, by an assumed spread of {ASSUMED_SPREAD:.0%} a prompt."
    )
