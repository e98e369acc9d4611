from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from specdistill.evaluation.report.text import print_power_analysis
from specdistill.evaluation.statistics.intervals import (
    compute_interval,
    compute_macro_interval,
    compute_relative_change,
    compute_standard_error,
    estimate_detectable_change,
    run_chi_square_test,
)
from specdistill.evaluation.statistics.metrics import (
    METRICS,
    Metric,
    collect_prompt_sums,
    compute_value,
    select_measured,
)
from tests.simulated import in_batches, simulate

MEAN = Metric(("total", "count"), lambda total, count: total / count)


def make_table(values) -> dict[str, np.ndarray]:
    return {"total": np.array(values), "count": np.ones(len(values))}


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_the_interval_is_bias_corrected_as_scipys(confidence):
    skewed = np.random.default_rng(1).exponential(size=20)
    bootstrap = stats.bootstrap(
        (skewed,),
        np.mean,
        n_resamples=20_000,
        confidence_level=confidence,
        rng=np.random.default_rng(0),
    )
    percentile = np.quantile(
        bootstrap.bootstrap_distribution, [(1 - confidence) / 2, (1 + confidence) / 2]
    )
    interval = compute_interval(MEAN, make_table(skewed), confidence=confidence)
    assert interval == pytest.approx(tuple(bootstrap.confidence_interval), rel=0.02)
    assert interval[1] > percentile[1]


def test_the_seed_fixes_an_interval():
    table, metric = collect_prompt_sums(simulate(24)), METRICS["speedup"]
    assert (
        compute_interval(metric, table, seed=3)
        == compute_interval(metric, table, seed=3)
        != compute_interval(metric, table, seed=4)
    )
    changes = [
        compute_relative_change(
            metric, table, collect_prompt_sums(simulate(24, timing_seed=2)), seed=seed
        )[1]
        for seed in (3, 3, 4)
    ]
    assert changes[0] == changes[1] != changes[2]


def test_a_changes_interval_is_as_wide_as_its_confidence():
    """The change is nearly normal, so that the quantiles of the normal distribution are known."""
    new, old = (collect_prompt_sums(simulate(96, noise=0.2, timing_seed=seed)) for seed in (1, 2))
    half, most = (
        np.ptp(compute_relative_change(METRICS["speedup"], new, old, confidence=share)[1])
        for share in (0.5, 0.95)
    )
    assert half / most == pytest.approx(stats.norm.ppf(0.75) / stats.norm.ppf(0.975), rel=0.1)


def test_one_prompt_has_no_interval_and_equal_prompts_have_a_point():
    table = collect_prompt_sums(simulate(1))
    assert compute_interval(METRICS["speedup"], table) is None
    twice = {name: np.repeat(column, 5) for name, column in table.items()}
    low, high = compute_interval(METRICS["speedup"], twice)
    assert low == pytest.approx(high)
    assert low == pytest.approx(compute_value(METRICS["speedup"], twice))


def test_resamples_without_a_value_give_no_interval():
    table = collect_prompt_sums(simulate(4))
    table["num_rounds_long"][:], table["num_emitted_long"][:] = [50, 0, 0, 0], [110, 0, 0, 0]
    table["num_rounds_short"][:], table["num_emitted_short"][:] = 50, 110
    assert compute_interval(METRICS["context_ratio"], table) is None


def test_paired_comparison_sees_what_unpaired_intervals_hide():
    before, after = collect_prompt_sums(simulate(48)), collect_prompt_sums(simulate(48))
    after["num_accepted_tokens"] = after["num_accepted_tokens"] * 0.98  # every prompt alike
    change, (low, high) = compute_relative_change(METRICS["acceptance_rate"], after, before)
    assert change == pytest.approx(-0.02)
    assert low == pytest.approx(high, abs=1e-9)
    new, old = (
        compute_interval(METRICS["acceptance_rate"], after),
        compute_interval(METRICS["acceptance_rate"], before),
    )
    assert new[1] > old[0]  # they overlap


def test_chi_square_is_scipys_on_frequent_outcomes():
    expected = stats.chisquare([70, 20, 10], [60, 25, 15])
    assert run_chi_square_test(
        ["a"] * 70 + ["b"] * 20 + ["c"] * 10, {"a": 0.6, "b": 0.25, "c": 0.15}
    ) == (
        pytest.approx(expected.statistic),
        pytest.approx(expected.pvalue),
        3,
    )


def test_rare_outcomes_are_pooled():
    common, rare = ["a"] * 60, [f"rare{n}" for n in range(40)]
    assert run_chi_square_test(common + rare, {"a": 0.6, "seldom": 0.04}) == (0, 1, 2)
    # in the cell of b
    statistic, _, num_cells = run_chi_square_test(
        ["a"] * 60 + ["b"] * 30 + rare[:10], {"a": 0.6, "b": 0.4}
    )
    assert (statistic, num_cells) == (0, 2)


def test_samples_without_two_frequent_outcomes_are_not_tested():
    assert run_chi_square_test(["a"] * 10, {"a": 1.0}) is None
    assert run_chi_square_test(list(range(4)), dict.fromkeys(range(4), 0.25)) is None


def test_the_standard_error_of_a_mean_matches_the_formula():
    values = np.array([1.0, 2.0, 4.0, 9.0])
    assert compute_standard_error(MEAN, make_table(values)) == pytest.approx(values.std(ddof=1) / 2)
    assert compute_standard_error(MEAN, make_table(values[:1])) is None


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_the_interval_of_a_macro_average_is_welchs(confidence):
    """The average of two means is half their sum, which varies as much as their difference does."""
    one, other = np.array([1.0, 2.0, 4.0, 9.0]), np.array([20.0, 21.0, 20.5])
    low, high = compute_macro_interval(
        MEAN, make_table([*one, *other]), ["a"] * 4 + ["b"] * 3, confidence=confidence
    )
    assert (low + high) / 2 == pytest.approx((one.mean() + other.mean()) / 2)
    difference = stats.ttest_ind(one, other, equal_var=False).confidence_interval(confidence)
    assert high - low == pytest.approx((difference.high - difference.low) / 2)
    assert compute_macro_interval(MEAN, make_table(np.ones(3)), ["a", "a", "b"]) is None


def test_intervals_of_times_are_over_batches_and_those_of_texts_over_prompts():
    alone = simulate(192, noise=0.2)
    plain, batched = collect_prompt_sums(alone), collect_prompt_sums(in_batches(alone, 4))
    speedup, length = METRICS["speedup"], METRICS["mean_acceptance_length"]
    assert (
        len(select_measured(speedup, batched)[0]) == 48
        and len(select_measured(length, batched)[0]) == 192
    )
    assert compute_value(speedup, batched) == pytest.approx(compute_value(speedup, plain))
    assert compute_interval(length, batched) == compute_interval(length, plain)

    without_batches = {name: column for name, column in batched.items() if name != "batch"}
    right, wrong, truth = (
        np.ptp(compute_interval(speedup, table)) for table in (batched, without_batches, plain)
    )
    assert wrong < 0.6 * right  # as if a batch's four prompts were four measurements of its time
    assert 0.8 * truth < right < 1.25 * truth


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_the_interval_of_a_macro_average_over_shared_prompts_is_students(confidence):
    """An example is a suite whose prompts run under two adapters.

    The two values of a prompt depend on each other, but the means of the prompts are independent.
    """
    one, other = np.array([1.0, 2.0, 4.0, 9.0]), np.array([2.0, 2.5, 4.0, 8.0])
    table = {**make_table([*one, *other]), "cluster": np.array([0.0, 1, 2, 3] * 2)}
    low, high = compute_macro_interval(MEAN, table, ["a"] * 4 + ["b"] * 4, confidence=confidence)
    mean_interval = stats.ttest_1samp((one + other) / 2, 0).confidence_interval(confidence)
    assert (low, high) == pytest.approx((mean_interval.low, mean_interval.high))
    # A single cluster, and a cluster that is all of a category, give no interval.
    for clusters in ([0] * 8, [0] * 4 + [1] + [0] * 3):
        assert (
            compute_macro_interval(
                MEAN, {**table, "cluster": np.array(clusters)}, ["a"] * 4 + ["b"] * 4
            )
            is None
        )


def test_turns_of_a_conversation_are_drawn_together():
    alone = simulate(24)
    turns = [
        replace(record, id=f"{record.id}/{turn}", cluster=record.id)
        for record in alone
        for turn in range(4)
    ]
    whole, each = collect_prompt_sums(alone), collect_prompt_sums(turns)
    for name in ("mean_acceptance_length", "speedup"):
        assert compute_interval(METRICS[name], each) == pytest.approx(
            compute_interval(METRICS[name], whole), rel=0.05
        )
        other = collect_prompt_sums(simulate(24, timing_seed=2))
        repeated = {key: np.repeat(column, 4) for key, column in other.items()}
        change = compute_relative_change(METRICS[name], each, repeated)
        assert change[0] == pytest.approx(compute_relative_change(METRICS[name], whole, other)[0])
        assert np.ptp(change[1]) == pytest.approx(
            np.ptp(compute_relative_change(METRICS[name], whole, other)[1]), rel=0.1
        )


def test_a_change_between_reports_is_resampled_by_batch_too():
    new, old = (
        collect_prompt_sums(in_batches(simulate(16, noise=0.2, timing_seed=seed), 16))
        for seed in (1, 2)
    )
    change, ends = compute_relative_change(METRICS["speedup"], new, old)
    assert abs(change) < 0.5 and ends is None  # one batch
    _, ends = compute_relative_change(METRICS["mean_acceptance_length"], new, old)
    assert ends is not None


def test_the_smallest_detectable_change_matches_the_power_formula():
    assert estimate_detectable_change(80) == pytest.approx(
        (1.959964 + 0.841621) * 0.16 / np.sqrt(80), rel=1e-6
    )
    assert estimate_detectable_change(320) == pytest.approx(estimate_detectable_change(80) / 2)


@pytest.mark.parametrize(("num_prompts", "is_warned"), [(127, True), (128, False)])
def test_few_prompts_for_a_gate_give_a_warning(
    num_prompts: int, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    print_power_analysis([str(number) for number in range(num_prompts)])
    assert ("on 127 prompts. With fewer than 128 it is often inconclusive" in caplog.text) == (
        is_warned
    )


def test_the_power_analysis_states_its_assumptions(capsys: pytest.CaptureFixture[str]):
    print_power_analysis([str(number) for number in range(80)])
    printed = capsys.readouterr().err
    for fact in (
        "80 prompts",
        "5.0% of the acceptance length",
        "80% power",
        "two-sided α = 0.05",
        "deviation between prompts 16%",
    ):
        assert fact in printed
