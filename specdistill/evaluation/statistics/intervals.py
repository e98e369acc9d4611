"""Confidence intervals by bootstrap over prompts, and the test of sampled tokens, both by scipy.

The rounds of a prompt succeed and fail together. So prompts are resampled, and all sums of a prompt
stay together (paired). The turns of a conversation are resampled together, too, and so are the
times of prompts that were decoded in one batch (see `metrics.list_units`).
"""

import math
import warnings
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from specdistill.evaluation.statistics.metrics import (
    Metric,
    PromptSums,
    compute_value,
    list_units,
    select_measured,
)

# Bootstrap resamples of an interval. More make the ends of the interval steadier and take longer.
NUM_RESAMPLES = 4_000
MIN_EXPECTED = 5.0  # the usual bound; below it the chi-square approximation is poor
# The sampling test is trusted if it rejects a rule that is wrong on purpose with a p-value of at
# most this. The gates in eval/gates ask for the same value.
CONTROL_P_VALUE = 0.01
# The usual power and significance level of a comparison.
POWER = 0.8
SIGNIFICANCE = 0.05
# The assumed standard deviation of the acceptance length between prompts. With it, 80 prompts
# detect a change of 5 %: these are the prompts and the tolerance of vLLM's own acceptance test.
ASSUMED_SPREAD = 0.16

Interval = tuple[float, float]
Outcome = TypeVar("Outcome", bound=Hashable)


def compute_interval(
    metric: Metric, sums: PromptSums, *, confidence: float = 0.95, seed: int = 0
) -> Interval | None:
    """Return the bias-corrected and accelerated (BCa) bootstrap interval of a metric.

    Args:
        metric: a formula over totals, e.g. tokens / seconds.
        sums: the table of what was measured of each prompt: name -> values [P].
        confidence: the confidence level.
        seed: the seed of the resampling.

    Returns:
        The ends of the interval. None for fewer than two prompts, and if the metric is undefined on
        some resamples. Prompts of one cluster or batch count as one prompt, because they are
        resampled together.
    """
    # The columns that the metric reads: each is an array [P] over prompts, clusters or batches.
    data = select_measured(metric, sums)
    if data[0].size < 2:
        return None

    def compute_statistic(*resampled: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        """Return the metric of each resample: add up the prompts, then apply the formula.

        scipy passes one array per column, for many resamples at once. `axis` is the dimension of
        the prompts in these arrays.
        """
        result: NDArray[np.float64] = metric.formula(
            *(column.sum(axis=axis) for column in resampled)
        )
        return result

    # Resample whole prompts: a prompt keeps its value in every column (`paired`). A resample in
    # which nothing was drafted divides by zero. Its warnings are silenced here, and an interval
    # that is not finite is handled below.
    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        result = stats.bootstrap(
            data,
            compute_statistic,
            paired=True,
            vectorized=True,
            n_resamples=NUM_RESAMPLES,
            batch=1_000,  # resamples at once, which bounds the memory
            confidence_level=confidence,
            method="BCa",
            rng=np.random.default_rng(seed),
        )
        point = float(compute_statistic(*data, axis=-1))
    low, high = (float(end) for end in result.confidence_interval)
    if np.isfinite([low, high]).all():
        return low, high

    # BCa gives no finite interval. If all resamples have the same value, that value is the
    # interval. In any other case the interval is not known.
    is_constant = np.allclose(result.bootstrap_distribution, point, rtol=1e-12)
    return (point, point) if is_constant else None


def compute_standard_error(metric: Metric, sums: PromptSums) -> float | None:
    """Return the jackknife standard error of a metric; None for fewer than two prompts.

    The metric is computed n times, each time without one of the n prompts:

        error = √((n - 1) / n · Σ_p (metric without prompt p - mean of these n metrics)²)

    Args:
        metric: a formula over totals, e.g. tokens / seconds.
        sums: the table of what was measured of each prompt: name -> values [n].
    """
    data = select_measured(metric, sums)
    if data[0].size < 2:
        return None

    # The total without a prompt is the total minus the prompt's value, for all prompts at once.
    # `std` divides the sum of squares by n already, so only the factor √(n - 1) remains.
    with np.errstate(divide="ignore", invalid="ignore"):
        without_one = metric.formula(*(column.sum() - column for column in data))
        error = float(np.sqrt(data[0].size - 1) * without_one.std())
    return error if np.isfinite(error) else None


def compute_macro_interval(
    metric: Metric, sums: PromptSums, categories: Sequence[str], *, confidence: float = 0.95
) -> Interval | None:
    """Return the confidence interval of a macro-average.

    The macro-average is the metric of each category, averaged over the categories. Each category
    has prompts of its own, so the categories are independent and their jackknife variances add up.
    The interval uses Student's t with the degrees of freedom of Welch and Satterthwaite.

    Args:
        metric: a formula over totals, e.g. tokens / seconds.
        sums: the table of what was measured of each prompt: name -> values [P].
        categories: [P], the category of each prompt.
        confidence: the confidence level.

    Returns:
        The ends of the interval. None if a category has fewer than two measured prompts (those of
        one conversation or batch count as one), or if the metric is undefined in a category.
    """
    # Keep the prompts of which the metric was measured. Every category must have one.
    is_measured = ~np.isnan([sums[name] for name in metric.sums]).any(axis=0)
    sums = {name: column[is_measured] for name, column in sums.items()}
    category_P = np.array(categories)[is_measured]
    if len(set(category_P)) < len(set(categories)):
        return None

    # Some prompts are drawn together, e.g. the turns of a conversation: they are one unit. A unit
    # with prompts of several categories makes the categories dependent, which needs another method.
    # There is such a unit if there are more different pairs (unit, category) than units.
    units = list_units(metric, sums)
    if units is not None and len(set(zip(units, category_P, strict=True))) > len(set(units)):
        return _compute_crossed_interval(metric, sums, category_P, units, confidence)

    # The value and the jackknife variance of each category.
    groups = _split_by_category(sums, category_P)
    values = []
    variances = []
    for group in groups:
        value = compute_value(metric, group)
        error = compute_standard_error(metric, group)
        if value is None or error is None:
            return None
        values.append(value)
        variances.append(error**2)
    if not groups:
        return None

    # Welch and Satterthwaite: the degrees of freedom are variance² / Σ (variance_i² / (n_i - 1)),
    # for categories i of n_i prompts, with variance = Σ variance_i. `parts` is the sum in the
    # denominator. If no category has any spread, `parts` is 0, and the interval is the mean.
    variance = sum(variances)
    sizes = [select_measured(metric, group)[0].size for group in groups]
    parts = sum(part**2 / (size - 1) for part, size in zip(variances, sizes, strict=True))
    quantile = float(stats.t.ppf((1 + confidence) / 2, variance**2 / parts)) if parts else 0.0
    mean = sum(values) / len(groups)
    half_width = quantile * float(np.sqrt(variance)) / len(groups)
    return mean - half_width, mean + half_width


def _compute_crossed_interval(
    metric: Metric,
    sums: PromptSums,
    category_P: NDArray[np.str_],
    units: NDArray[np.float64],
    confidence: float,
) -> Interval | None:
    """Return the confidence interval of a macro-average whose categories are not independent.

    The macro-average is the metric of each category, averaged over the categories. Prompts that
    were drawn or decoded together form a unit, and here some units have prompts of several
    categories. So the jackknife leaves out one whole unit after the other.

    Args:
        metric: a formula over totals, e.g. tokens / seconds.
        sums: the table of what was measured of each prompt: name -> values [P].
        category_P: [P], the category of each prompt.
        units: [P], the number of each prompt's unit, from 0.
        confidence: the confidence level.

    Returns:
        The ends of the interval. None for fewer than two units, and if the metric is undefined in a
        category once some unit is left out.
    """
    num_categories = len(set(category_P))

    def compute_average(is_included_P: NDArray[np.bool_]) -> float:
        """Return the mean over categories of the metric, computed from the included prompts.

        NaN if a category has no included prompt, or if the metric is undefined in it.
        """
        included_sums = {name: column[is_included_P] for name, column in sums.items()}
        groups = _split_by_category(included_sums, category_P[is_included_P])
        if len(groups) < num_categories:
            return np.nan
        values = [compute_value(metric, group) for group in groups]
        return float(np.mean([np.nan if value is None else value for value in values]))

    # The jackknife over units: the macro-average of all prompts (every unit number is at least 0),
    # and the macro-averages without one unit each.
    mean = compute_average(units >= 0)
    without_one = [compute_average(units != unit) for unit in np.unique(units)]
    error = float(np.sqrt(len(without_one) - 1) * np.std(without_one))
    if len(without_one) < 2 or not np.isfinite(error):
        return None
    quantile = float(stats.t.ppf((1 + confidence) / 2, len(without_one) - 1))
    half_width = quantile * error
    return mean - half_width, mean + half_width


def _split_by_category(sums: PromptSums, category_P: NDArray[np.str_]) -> list[PromptSums]:
    """Split a table of P prompts (name -> values [P]) into one table for each category.

    The tables are in the order in which the categories first occur in `category_P`.
    """
    sums_by_category = []
    for group in dict.fromkeys(category_P.tolist()):
        is_in_group_P = category_P == group
        sums_by_category.append({name: column[is_in_group_P] for name, column in sums.items()})
    return sums_by_category


def compute_relative_change(
    metric: Metric,
    sums: PromptSums,
    baseline: PromptSums,
    *,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, Interval | None]:
    """Return the relative change of a metric against a baseline, new / old - 1, and its interval.

    The two measurements are paired: entry p of both belongs to the same prompt. The noise that they
    share cancels out, so the interval is narrower than that of two independent measurements.

    Args:
        metric: a formula over totals, e.g. tokens / seconds.
        sums: the new measurement, what was measured of each prompt: name -> values [P].
        baseline: the same table of the old measurement.
        confidence: the confidence level.
        seed: the seed of the resampling.
    """
    # Define the change as a metric of its own. Its formula gets the new totals, then the old ones.
    num_sums = len(metric.sums)
    new_names = [f"{name}_new" for name in metric.sums]
    old_names = [f"{name}_old" for name in metric.sums]
    change_metric = Metric(
        (*new_names, *old_names),
        lambda *sums: metric.formula(*sums[:num_sums]) / metric.formula(*sums[num_sums:]) - 1,
    )

    # Put both measurements in one table of prompts, so that a resample draws a prompt's new and old
    # values together. The batches and clusters are those of the new measurement.
    paired_sums = {}
    for side, side_sums in (("new", sums), ("old", baseline)):
        for name in metric.sums:
            paired_sums[f"{name}_{side}"] = side_sums[name]
    paired_sums |= {name: sums[name] for name in ("batch", "cluster") if name in sums}

    # Apply the formula to all prompts, and to resamples.
    totals = [column.sum() for column in select_measured(change_metric, paired_sums)]
    change = float(change_metric.formula(*totals))
    return change, compute_interval(change_metric, paired_sums, confidence=confidence, seed=seed)


def estimate_detectable_change(num_prompts: int) -> float:
    """Return the smallest relative change of the acceptance length that a comparison detects.

    This is the usual power analysis. A change is detected if its confidence interval excludes 0,
    which must happen with probability POWER. The normal approximation gives

        (z(1 - significance / 2) + z(power)) · spread / √n

    n is the number of prompts. The spread is ASSUMED_SPREAD, an assumed standard deviation between
    prompts, relative to the mean.
    """
    z: float = stats.norm.ppf(1 - SIGNIFICANCE / 2) + stats.norm.ppf(POWER)
    return z * ASSUMED_SPREAD / math.sqrt(num_prompts)


def can_compare(probabilities: Mapping[Outcome, float], size: int) -> bool:
    """Return whether a sample of this size is large enough for `run_chi_square_test`.

    The test needs two cells that are each expected at least MIN_EXPECTED times. A cell is one
    frequent outcome, or all rare outcomes together.

    Args:
        probabilities: the distribution, outcome -> probability.
        size: the number of outcomes in the sample.
    """
    # Two frequent outcomes are enough. So is one, if the other outcomes together are frequent, too.
    frequent = [p for p in probabilities.values() if size * p >= MIN_EXPECTED]
    return len(frequent) > 1 or (len(frequent) == 1 and size * (1 - frequent[0]) >= MIN_EXPECTED)


def run_chi_square_test(
    outcomes: Sequence[Outcome], probabilities: Mapping[Outcome, float]
) -> tuple[float, float, int] | None:
    """Test whether a sample follows a distribution, by Pearson's chi-square test.

    Outcomes that are expected fewer than five times are pooled into one cell, because the test is
    inaccurate for rare outcomes. Outcomes that `probabilities` does not list are pooled, too.

    Args:
        outcomes: the sample.
        probabilities: the distribution, outcome -> probability. The sum may be below 1: the
            remaining probability is that of the outcomes that are not listed.

    Returns:
        The statistic, its p-value and the number of cells. None if only one cell remains, which
        cannot be compared with anything.
    """
    # A cell is (expected count, observed count). Each frequent outcome has a cell of its own, and
    # all other outcomes share one cell.
    counts = Counter(outcomes)
    size = len(outcomes)
    expected = {
        outcome: size * p for outcome, p in probabilities.items() if size * p >= MIN_EXPECTED
    }
    cells = sorted((count, counts[outcome]) for outcome, count in expected.items())
    shared_expected = size - sum(expected.values())
    shared_observed = size - sum(counts[outcome] for outcome in expected)

    # If the shared cell is too rare as well, it joins the smallest cell.
    if shared_expected < MIN_EXPECTED and cells:
        smallest_expected, smallest_observed = cells.pop(0)
        shared_expected += smallest_expected
        shared_observed += smallest_observed
    cells.append((shared_expected, shared_observed))
    if len(cells) < 2:
        return None

    # Compare the observed with the expected counts.
    expected_counts, observed_counts = zip(*cells, strict=True)
    result = stats.chisquare(observed_counts, expected_counts)
    return float(result.statistic), float(result.pvalue), len(cells)
