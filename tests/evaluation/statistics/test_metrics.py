import numpy as np
import pytest

from specdistill.evaluation.statistics.metrics import (
    METRICS,
    collect_prompt_sums,
    compute_value,
    count_acceptance,
    select_measured,
)
from specdistill.evaluation.statistics.theory import predicted_speedup
from tests.rounds import record
from tests.simulated import DRAFT_STEP, PLAIN_STEP, VERIFY_STEP, simulate


def test_acceptance_counts_match_a_hand_calculation():
    numbers = count_acceptance([record([(4, 4), (4, 2), (4, 0), (4, 1)])], num_positions=4)
    assert numbers["num_drafts"] == 4
    assert numbers["num_draft_tokens"] == 16
    assert numbers["num_accepted_tokens"] == 7
    assert numbers["accepted_per_position"] == [3, 2, 1, 1]
    assert numbers["emitted_per_position"] == [4, 3, 2, 1, 1]
    sums = {
        name: np.array([count], float) for name, count in numbers.items() if isinstance(count, int)
    }
    assert compute_value(METRICS["acceptance_length_vllm"], sums) == 1 + 7 / 4
    assert compute_value(METRICS["acceptance_rate"], sums) == 7 / 16
    assert numbers["acceptance_rate_per_position"] == [0.75, 0.5, 0.25, 0.25]
    assert numbers["conditional_acceptance_rate"] == [0.75, 2 / 3, 0.5, 1.0]
    # Without drafts there are no rates.
    nothing = count_acceptance([record([(0, 0)] * 3)], num_positions=2)
    assert nothing == {
        "num_drafts": 0,
        "num_draft_tokens": 0,
        "num_accepted_tokens": 0,
        "accepted_per_position": [0, 0],
        "emitted_per_position": [3, 0, 0],
    }


def test_tokens_that_are_not_emitted_do_not_count():
    """Two rounds end where the answer does, after two accepted tokens: by a stop token, or by the
    length limit."""
    records = [record([(4, 4), (4, 2)], cut=True), record([(4, 2)], cut=True)]
    sums = collect_prompt_sums(records)
    assert compute_value(METRICS["mean_acceptance_length"], sums) == (5 + 2 + 2) / 3
    assert compute_value(METRICS["acceptance_length_vllm"], sums) == 1 + (4 + 2 + 2) / 3
    numbers = count_acceptance(records, num_positions=4)
    # Only the first round could emit a token at positions 3 to 5, and it accepted all.
    assert numbers["emitted_per_position"] == [3, 3, 1, 1, 1]
    assert numbers["acceptance_rate_per_position"] == [1, 1, 1, 1]
    # Where no round could emit a token, nothing is known; a position after a rate of 0 is never
    # accepted.
    short = count_acceptance([record([(4, 2)], cut=True)], num_positions=4)
    assert (
        short["acceptance_rate_per_position"]
        == short["conditional_acceptance_rate"]
        == [1, 1, None, None]
    )
    rejected = count_acceptance([record([(4, 0), (4, 0)])], num_positions=4)
    assert rejected["acceptance_rate_per_position"] == [0, 0, 0, 0]
    assert rejected["conditional_acceptance_rate"] == [0, None, None, None]


def test_rates_by_position_do_not_depend_on_where_answers_end():
    """The Kaplan-Meier estimate of drafts that are cut off at random is that of drafts that are
    not."""
    generator = np.random.default_rng(0)
    conditional = (0.8, 0.7, 0.6, 0.5)
    rounds = []
    for _ in range(40_000):
        num_accepted = int(np.argmin([*(generator.uniform(size=4) < conditional), False]))
        limit = int(generator.integers(1, 6))  # tokens that may still be emitted
        is_cut = num_accepted >= limit
        rounds.append(record([(4, min(num_accepted, limit))], cut=is_cut))
    numbers = count_acceptance(rounds, num_positions=4)
    assert numbers["conditional_acceptance_rate"] == pytest.approx(conditional, abs=0.02)
    assert numbers["acceptance_rate_per_position"] == pytest.approx(
        np.cumprod(conditional), abs=0.02
    )


def test_the_predicted_speedup_follows_the_formula_for_a_chain():
    table = collect_prompt_sums(simulate(6, noise=0))
    length = compute_value(METRICS["mean_acceptance_length"], table)
    expected = predicted_speedup(length, VERIFY_STEP / PLAIN_STEP, 4 * DRAFT_STEP / PLAIN_STEP)
    assert compute_value(METRICS["predicted_speedup"], table) == pytest.approx(expected)
    assert compute_value(METRICS["draft_ms"], table) == pytest.approx(1000 * DRAFT_STEP)
    assert compute_value(METRICS["verify_ms"], table) == pytest.approx(1000 * VERIFY_STEP)
    assert compute_value(METRICS["baseline_step_ms"], table) == pytest.approx(1000 * PLAIN_STEP)


def test_speeds_match_a_hand_calculation():
    table = {name: np.array(numbers) for name, numbers in {
        "num_tokens": [10.0, 20.0],
        "seconds": [1.0, 2.0],
        "num_rounds": [3.0, 8.0],
        "num_prompts": [1.0, 1.0],
        "prefill_seconds": [0.5, 0.3],
        "baseline_num_tokens": [8.0, 32.0],  # sampled completions differ in length
        "baseline_seconds": [2.0, 4.5],
        "baseline_prefill_seconds": [0.25, 0.25],
        "hf_num_tokens": [8.0, np.nan],
        "hf_seconds": [1.0, np.nan],
    }.items()}  # fmt: skip
    speedup = (30 / 3) / (40 / 6.5)
    for name, number in {
        "tokens_per_second": 30 / 3,
        "baseline_tokens_per_second": 40 / 6.5,
        "speedup": speedup,
        "decode_speedup": (28 / 2.2) / (38 / 6),
        "overhead_factor": (28 / 11) / speedup,
        "hf_generate_tokens_per_second": 8 / 1,
        # Only the prompt that both generated counts.
        "baseline_over_hf_generate": (8 / 2) / (8 / 1),
        "speedup_over_hf_generate": (10 / 1) / (8 / 1),
    }.items():
        assert compute_value(METRICS[name], table) == pytest.approx(number), name


def test_times_add_up_over_a_batch_and_counts_stay_per_prompt():
    table = {name: np.array(numbers) for name, numbers in {
        "num_tokens": [1.0, 2.0, 4.0, 8.0],
        "seconds": [0.5, np.nan, 0.25, 0.125],
        "num_accepted_tokens": [6.0, 5.0, 4.0, 3.0],
        "num_drafts": [4.0, 4.0, 4.0, 4.0],
        "batch": [7.0, 7.0, 9.0, 9.0],
    }.items()}  # fmt: skip
    tokens, seconds = select_measured(METRICS["tokens_per_second"], table)
    # the second prompt was not timed
    assert (tokens.tolist(), seconds.tolist()) == ([1, 12], [0.5, 0.375])
    accepted, drafts = select_measured(METRICS["acceptance_length_vllm"], table)
    assert (accepted.tolist(), drafts.tolist()) == ([6, 5, 4, 3], [4] * 4)


def test_a_metric_without_a_measurement_is_none_and_not_zero():
    table = collect_prompt_sums(simulate(2))
    table["hf_seconds"][:] = np.nan
    assert compute_value(METRICS["hf_generate_tokens_per_second"], table) is None
    table["num_drafts"][:] = table["num_accepted_tokens"][:] = 0
    assert compute_value(METRICS["acceptance_length_vllm"], table) is None
