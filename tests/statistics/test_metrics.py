import numpy as np
import pytest

from specdistill.statistics.metrics import METRICS, acceptance, measured, prompt_sums, value
from specdistill.statistics.theory import predicted_speedup
from tests.simulated import DRAFT_STEP, PLAIN_STEP, VERIFY_STEP, simulate


def test_acceptance_by_hand():
    numbers = acceptance([(4, 4), (4, 2), (4, 0), (4, 1)], num_positions=4)
    assert numbers["num_drafts"] == 4
    assert numbers["num_draft_tokens"] == 16
    assert numbers["num_accepted_tokens"] == 7
    assert numbers["accepted_per_position"] == [3, 2, 1, 1]
    sums = {
        name: np.array([count], float) for name, count in numbers.items() if isinstance(count, int)
    }
    assert value(METRICS["mean_acceptance_length"], sums) == 1 + 7 / 4
    assert value(METRICS["acceptance_rate"], sums) == 7 / 16
    assert numbers["acceptance_rate_per_position"] == [0.75, 0.5, 0.25, 0.25]
    assert numbers["conditional_acceptance_rate"] == [0.75, 0.5 / 0.75, 0.5, 1.0]
    counts = {
        "num_drafts": 0,
        "num_draft_tokens": 0,
        "num_accepted_tokens": 0,
        "accepted_per_position": [0, 0],
    }
    assert acceptance([], num_positions=2) == counts  # and no rates


def test_the_prediction_is_the_formula_for_a_chain():
    table = prompt_sums(simulate(6, noise=0))
    length = value(METRICS["mean_acceptance_length"], table)
    expected = predicted_speedup(length, VERIFY_STEP / PLAIN_STEP, 4 * DRAFT_STEP / PLAIN_STEP)
    assert value(METRICS["predicted_speedup"], table) == pytest.approx(expected)
    assert value(METRICS["draft_ms"], table) == pytest.approx(1000 * DRAFT_STEP)
    assert value(METRICS["verify_ms"], table) == pytest.approx(1000 * VERIFY_STEP)
    assert value(METRICS["baseline_step_ms"], table) == pytest.approx(1000 * PLAIN_STEP)


def test_speed_by_hand():
    table = {name: np.array(numbers) for name, numbers in {
        "num_tokens": [10.0, 20.0],
        "seconds": [1.0, 2.0],
        "num_accepted_tokens": [6.0, 12.0],
        "num_drafts": [4.0, 8.0],
        "num_prompts": [1.0, 1.0],
        "prefill_seconds": [0.5, 0.3],
        "baseline_num_tokens": [8.0, 32.0],  # sampled, the two ways end elsewhere
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
        "overhead_factor": 2.5 / speedup,
        "hf_generate_tokens_per_second": 8 / 1,
        "baseline_over_hf_generate": (8 / 2) / (8 / 1),  # of the prompt that both generated
        "speedup_over_hf_generate": (10 / 1) / (8 / 1),
    }.items():
        assert value(METRICS[name], table) == pytest.approx(number), name


def test_times_are_added_up_over_a_batch_and_counts_stay_a_prompts():
    table = {name: np.array(numbers) for name, numbers in {
        "num_tokens": [1.0, 2.0, 4.0, 8.0],
        "seconds": [0.5, np.nan, 0.25, 0.125],
        "num_accepted_tokens": [6.0, 5.0, 4.0, 3.0],
        "num_drafts": [4.0, 4.0, 4.0, 4.0],
        "batch": [7.0, 7.0, 9.0, 9.0],
    }.items()}  # fmt: skip
    tokens, seconds = measured(METRICS["tokens_per_second"], table)
    assert (tokens.tolist(), seconds.tolist()) == (
        [1, 12],
        [0.5, 0.375],
    )  # the second prompt was not timed
    accepted, drafts = measured(METRICS["mean_acceptance_length"], table)
    assert (accepted.tolist(), drafts.tolist()) == ([6, 5, 4, 3], [4] * 4)


def test_nothing_measured_is_none_and_not_zero():
    table = prompt_sums(simulate(2))
    table["hf_seconds"][:] = np.nan
    assert value(METRICS["hf_generate_tokens_per_second"], table) is None
    table["num_drafts"][:] = table["num_accepted_tokens"][:] = 0
    assert value(METRICS["mean_acceptance_length"], table) is None
