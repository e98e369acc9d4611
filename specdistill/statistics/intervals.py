"""Intervals by bootstrap over prompts, and the test of sampled tokens, both by scipy.

A prompt's rounds succeed and fail together, so prompts are resampled, all sums of a prompt together (paired). Turns of a conversation are
resampled together, too, and so are the times of prompts that were decoded in one batch (see `metrics.units_of`).
"""

import math
import warnings
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from specdistill.statistics.metrics import Metric, PromptSums, measured, units_of, value

NUM_RESAMPLES = 4_000
MIN_EXPECTED = 5.0  # the usual bound below which chi-square's approximation is poor
POWER, SIGNIFICANCE = 0.8, 0.05
# Of the acceptance length: with it 80 prompts detect a change of 5 %, the prompts and tolerance of vLLM's own acceptance test.
ASSUMED_SPREAD = 0.16

Interval = tuple[float, float]


def interval(
    metric: Metric, sums: PromptSums, *, confidence: float = 0.95, seed: int = 0
) -> Interval | None:
    """The metric's bias-corrected (BCa) interval; None with fewer than two prompts, or units of them, or when resamples are undefined."""
    data = measured(metric, sums)
    if data[0].size < 2:
        return None

    def statistic(*resampled: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        result: NDArray[np.float64] = metric.formula(
            *(column.sum(axis=axis) for column in resampled)
        )
        return result

    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # handled below
        result = stats.bootstrap(
            data,
            statistic,
            paired=True,
            vectorized=True,
            n_resamples=NUM_RESAMPLES,
            batch=1_000,
            confidence_level=confidence,
            method="BCa",
            rng=np.random.default_rng(seed),
        )
        point = float(statistic(*data, axis=-1))
    low, high = (float(end) for end in result.confidence_interval)
    if np.isfinite([low, high]).all():
        return low, high
    # No spread at all has no bias to correct: the interval is the value. Anything else is not known.
    return (point, point) if np.allclose(result.bootstrap_distribution, point, rtol=1e-12) else None


def standard_error(metric: Metric, sums: PromptSums) -> float | None:
    """The metric's jackknife standard error, √((n - 1) / n · Σ_p (metric without prompt p - their mean)²); None below two prompts."""
    data = measured(metric, sums)
    if data[0].size < 2:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        without_one = metric.formula(*(column.sum() - column for column in data))
        error = float(np.sqrt(data[0].size - 1) * without_one.std())
    return error if np.isfinite(error) else None


def macro_interval(
    metric: Metric, sums: PromptSums, categories: Sequence[str], *, confidence: float = 0.95
) -> Interval | None:
    """Interval of the mean over categories of the metric in each; categories [P] are the prompts'.

    Categories are fixed and their prompts are drawn within them, so their jackknife variances add up; Student's t, with Welch's and
    Satterthwaite's degrees of freedom. Where clusters or batches hold prompts of several categories, the jackknife is over these. None
    where a category has fewer than two prompts, or conversations, or no number.
    """
    is_measured = ~np.isnan([sums[name] for name in metric.sums]).any(axis=0)
    sums = {name: column[is_measured] for name, column in sums.items()}
    category_P = np.array(categories)[is_measured]
    if len(set(category_P)) < len(set(categories)):
        return None
    units = units_of(metric, sums)
    if units is not None and len(set(zip(units, category_P, strict=True))) > len(set(units)):
        return _crossed_interval(metric, sums, category_P, units, confidence)
    groups = _by_category(sums, category_P)
    values = [point for group in groups if (point := value(metric, group)) is not None]
    variances = [
        error**2 for group in groups if (error := standard_error(metric, group)) is not None
    ]
    if not len(values) == len(variances) == len(groups) > 0:
        return None
    variance, sizes = sum(variances), [measured(metric, group)[0].size for group in groups]
    parts = sum(part**2 / (size - 1) for part, size in zip(variances, sizes, strict=True))
    quantile = float(stats.t.ppf((1 + confidence) / 2, variance**2 / parts)) if parts else 0.0
    mean, half = sum(values) / len(groups), quantile * float(np.sqrt(variance)) / len(groups)
    return mean - half, mean + half


def _crossed_interval(
    metric: Metric,
    sums: PromptSums,
    category_P: NDArray[np.str_],
    units: NDArray[np.float64],
    confidence: float,
) -> Interval | None:
    """As `macro_interval`, by leaving out one unit after the other, with all that it has in any category."""
    num_categories = len(set(category_P))

    def average(kept: NDArray[np.bool_]) -> float:
        groups = _by_category(
            {name: column[kept] for name, column in sums.items()}, category_P[kept]
        )
        values = [np.nan if (point := value(metric, group)) is None else point for group in groups]
        return float(np.mean(values)) if len(groups) == num_categories else np.nan

    mean, without_one = average(units >= 0), [average(units != unit) for unit in np.unique(units)]
    error = float(np.sqrt(len(without_one) - 1) * np.std(without_one))
    if len(without_one) < 2 or not np.isfinite(error):
        return None
    half = float(stats.t.ppf((1 + confidence) / 2, len(without_one) - 1)) * error
    return mean - half, mean + half


def _by_category(sums: PromptSums, category_P: NDArray[np.str_]) -> list[PromptSums]:
    return [
        {name: column[category_P == group] for name, column in sums.items()}
        for group in dict.fromkeys(category_P.tolist())
    ]


def relative_change(
    metric: Metric,
    sums: PromptSums,
    baseline: PromptSums,
    *,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, Interval | None]:
    """metric / baseline's metric - 1, and its interval, paired: entry p of both is the same prompt."""
    width = len(metric.sums)
    ratio = Metric(
        tuple(f"{name}_{side}" for side in ("new", "old") for name in metric.sums),
        lambda *both: metric.formula(*both[:width]) / metric.formula(*both[width:]) - 1,
    )
    paired = {
        f"{name}_{side}": part[name]
        for side, part in (("new", sums), ("old", baseline))
        for name in metric.sums
    }
    paired |= {name: sums[name] for name in ("batch", "cluster") if name in sums}
    change = float(ratio.formula(*(column.sum() for column in measured(ratio, paired))))
    return change, interval(ratio, paired, confidence=confidence, seed=seed)


def minimum_detectable_change(num_prompts: int) -> float:
    """The smallest relative change of the acceptance length that a comparison over `num_prompts` detects with POWER: that its interval then
    excludes 0. By the normal approximation, with ASSUMED_SPREAD the standard deviation over prompts of their influence on the change:

        (z(1 - significance / 2) + z(power)) · spread / √n
    """
    z: float = stats.norm.ppf(1 - SIGNIFICANCE / 2) + stats.norm.ppf(POWER)
    return z * ASSUMED_SPREAD / math.sqrt(num_prompts)


def chi_square(
    outcomes: Sequence[Hashable], probabilities: Mapping[Any, float]
) -> tuple[float, float, int] | None:
    """Whether a sample follows a distribution: Pearson's statistic, its p-value and the number of cells.

    Outcomes without a probability share what is left to 1. Those expected fewer than five times are pooled with them. None when fewer
    than two cells remain: then the sample cannot tell.
    """
    counts, size = Counter(outcomes), len(outcomes)
    expected = {
        outcome: size * p for outcome, p in probabilities.items() if size * p >= MIN_EXPECTED
    }
    cells = sorted((count, counts[outcome]) for outcome, count in expected.items())
    rest = size - sum(expected.values()), size - sum(counts[outcome] for outcome in expected)
    if rest[0] < MIN_EXPECTED and cells:  # the pool is too rare as well: it joins the smallest cell
        rest = rest[0] + cells[0][0], rest[1] + cells.pop(0)[1]
    cells.append(rest)
    if len(cells) < 2:
        return None
    result = stats.chisquare([observed for _, observed in cells], [count for count, _ in cells])
    return float(result.statistic), float(result.pvalue), len(cells)
