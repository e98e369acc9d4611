import json
from dataclasses import replace

import pytest

from specdistill.evaluation.measurement.in_engine import NO_BASELINE_ROW, ROW_REASONS
from specdistill.evaluation.report.build import (
    build_context_rows,
    build_result_rows,
    build_theory,
    is_looping,
    select_headline,
)
from specdistill.evaluation.report.files import list_row_metrics
from specdistill.evaluation.statistics.records import Configuration, RoundRecord
from tests.rounds import with_rounds
from tests.simulated import (
    PLAIN_STEP,
    SUITE,
    VERIFY_STEP,
    as_from_server,
    in_batches,
    round_costs,
    simulate,
    simulated_report,
)


def build_rows(records, temperature=0.0, k=4, **more):
    return build_result_rows(records, SUITE, Configuration(k, temperature), seed=0, **more)


def test_the_first_row_is_the_whole_suite_and_the_counts_add_up():
    rows = build_rows(simulate(16))
    assert [row["category"] for row in rows] == [
        "all",
        "function",
        "docstring",
        "chat",
        "long_context",
    ]
    for name in (
        "num_prompts",
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_new_tokens",
    ):
        assert rows[0][name] == sum(row[name] for row in rows[1:])


def test_the_numbers_of_a_row_agree_with_each_other():
    row = build_rows(simulate(16))[0]
    assert row["mean_acceptance_length"] == pytest.approx(
        1 + row["num_accepted_tokens"] / row["num_drafts"]
    )
    assert row["mean_acceptance_length"] == pytest.approx(
        1 + sum(row["acceptance_rate_per_position"])
    )
    assert row["acceptance_rate"] == pytest.approx(
        row["num_accepted_tokens"] / row["num_draft_tokens"]
    )
    assert row["speedup"] == pytest.approx(
        row["tokens_per_second"] / row["baseline_tokens_per_second"]
    )
    assert row["overhead_factor"] == pytest.approx(row["mean_acceptance_length"] / row["speedup"])
    v, c = row["verify_ms"] / row["baseline_step_ms"], row["draft_ms"] / row["baseline_step_ms"]
    assert row["predicted_speedup"] == pytest.approx(row["mean_acceptance_length"] / (v + 4 * c))
    assert row["prediction_gap"] == pytest.approx(
        abs(row["speedup"] / row["predicted_speedup"] - 1)
    )
    for name in (
        "tokens_per_second",
        "baseline_tokens_per_second",
        "speedup",
        "mean_acceptance_length",
    ):
        low, high = row[f"{name}_ci95"]
        assert low <= row[name] <= high


def test_prompts_that_share_the_times_of_one_batch_have_no_interval_of_times():
    records = simulate(8, noise=0.2)
    alone, *_ = build_rows(records)
    for size, num_batches in ((8, 1), (4, 2)):
        row, *_ = build_rows(in_batches(records, size))
        assert (row["num_batches"], row["speedup"]) == (
            num_batches,
            pytest.approx(alone["speedup"]),
        )
        assert row["acceptance_rate_ci95"] == alone["acceptance_rate_ci95"]
        assert (
            ("speedup_ci95" in row["not_measured"])
            == ("speedup_ci95" not in row)
            == (num_batches == 1)
        )
    assert row["speedup_ci95"] != alone["speedup_ci95"]


def test_rounds_without_a_draft_count_in_the_acceptance_length():
    records = simulate(4)
    idle = RoundRecord((), (), (), (0,), (" x",))
    waiting = [with_rounds(record, record.rounds + (idle,) * 10) for record in records]
    drafted, mixed = (simulated_report(found)["results"][0] for found in (records, waiting))
    assert (
        drafted["acceptance_length_vllm"]
        == drafted["mean_acceptance_length"]
        == mixed["acceptance_length_vllm"]
    )
    assert mixed["mean_acceptance_length"] == 1 + mixed["num_accepted_tokens"] / (
        mixed["num_drafts"] + 40
    )
    low, high = mixed["mean_acceptance_length_ci95"]
    assert low < mixed["mean_acceptance_length"] < high < mixed["acceptance_length_vllm"]
    messages = {
        finding["name"]: finding["message"] for finding in simulated_report(waiting)["findings"]
    }
    for fact in (
        "20% of the rounds",
        f"{mixed['mean_acceptance_length']:.2f}",
        f"{mixed['acceptance_length_vllm']:.2f}",
    ):
        assert fact in messages["rounds_without_draft"]
    assert "rounds_without_draft" not in [
        finding["name"] for finding in simulated_report(records)["findings"]
    ]


def test_macro_and_micro_averages_are_told_apart():
    records = [
        record
        for record in simulate(48)
        if record.category != "chat" or record.id.endswith(("00", "01"))
    ]
    rows = build_rows(records)
    quoted = select_headline(rows, records)
    for name in ("mean_acceptance_length", "speedup"):
        assert quoted[name] == pytest.approx(sum(row[name] for row in rows[1:]) / 4)
        assert quoted["micro"][name] == rows[0][name] != quoted[name]
        assert quoted[f"{name}_ci95"][0] < quoted[name] < quoted[f"{name}_ci95"][1]
        assert quoted["micro"][f"{name}_ci95"] == rows[0][f"{name}_ci95"]
    assert "4 categories" in quoted["average"]
    for fact in (f"{rows[0]['num_new_tokens']} tokens", "38 prompts"):
        assert fact in quoted["micro"]["average"]


def test_a_headline_quotes_what_every_category_measured():
    silent = [
        with_rounds(record, ()) if record.category == "chat" else record for record in simulate(8)
    ]
    quoted = select_headline(build_rows(silent), silent)
    assert "mean_acceptance_length" not in quoted
    assert quoted["speedup"] > 1


def test_completions_that_end_at_once_are_counted():
    ended = [with_rounds(record, ()) for record in simulate(3)]
    records = [*ended, *simulate(8)[3:]]
    assert build_rows(records)[0]["num_empty"] == 3
    messages = {
        finding["name"]: finding["message"] for finding in simulated_report(records)["findings"]
    }
    assert "3 of 8" in messages["empty_completions"]


def test_a_metric_that_is_not_a_number_is_absent_with_a_reason():
    """A clock that fails for one prompt takes that prompt out of the speeds; one that fails for all
    leaves none, and never NaN."""
    records = simulate(8)

    def break_clock(record):
        return replace(record, speculative=replace(record.speculative, seconds=float("nan")))

    row_with_failure, row_without_prompt = (
        build_rows([break_clock(records[0]), *records[1:]])[0],
        build_rows(records[1:])[0],
    )
    assert (row_with_failure["speedup"], row_with_failure["num_drafts"]) == (
        row_without_prompt["speedup"],
        8 * 40,
    )
    row = build_rows([break_clock(record) for record in records])[0]
    for name in (
        "tokens_per_second",
        "speedup",
        "prediction_gap",
        "overhead_factor",
        "decode_speedup",
    ):
        assert name not in row
        assert row["not_measured"][name]
    assert row["mean_acceptance_length"] > 1
    json.dumps(build_rows([break_clock(record) for record in records]), allow_nan=False)


def test_a_metric_that_was_not_measured_is_absent_with_a_reason():
    nothing_drafted = [
        replace(with_rounds(record, [RoundRecord((), (), (), (1,), ("x",))]), hf_generate=None)
        for record in simulate(1)
    ]
    row = build_rows(nothing_drafted)[0]
    assert row["mean_acceptance_length"] == 1
    for name in (
        "acceptance_length_vllm",
        "predicted_speedup",
        "hf_generate_tokens_per_second",
        "context_ratio",
    ):
        assert name not in row
        assert row["not_measured"][name]
    assert row["num_drafts"] == 0
    assert "speedup_ci95" in row["not_measured"]
    assert build_theory(row, [], lambda k: k) is None
    untimed = [replace(record, hf_generate=None) for record in simulate(4)]
    assert "baseline_over_hf_generate" in build_rows(untimed)[0]["not_measured"]


def test_every_metric_of_a_row_is_there_or_has_a_reason():
    for records in (simulate(16), simulate(1), simulate(3, num_rounds=2)):
        for row in build_rows(records):
            assert [
                name
                for name in list_row_metrics()
                if name not in row and name not in row["not_measured"]
            ] == []
            assert [
                name for name in list_row_metrics() if name in row and name in row["not_measured"]
            ] == []


def test_a_servers_rows_hold_the_numbers_of_rounds_and_say_what_they_lack():
    records = simulate(16)
    for with_baseline in (True, False):
        served = [as_from_server(record, with_baseline=with_baseline) for record in records]
        reasons = {**ROW_REASONS, **({} if with_baseline else NO_BASELINE_ROW)}
        for row, seen in zip(build_rows(records), build_rows(served, reasons=reasons), strict=True):
            same = [
                name
                for name in seen
                if name.startswith(("acc", "num", "mean", "conditional", "tokens"))
            ]
            assert {name: seen[name] for name in same} == {name: row[name] for name in same}
            assert seen.get("speedup") == (row["speedup"] if with_baseline else None)
            assert (
                ("baseline_tokens_per_second" in seen)
                == ("overhead_factor" in seen)
                == with_baseline
            )
            absent = [name for name in list_row_metrics() if name not in seen]
            assert {"draft_ms", "context_ratio"} <= set(absent) <= set(seen["not_measured"])
            assert not set(seen) & set(seen["not_measured"])
            assert seen["not_measured"]["draft_ms"] == ROW_REASONS["draft_ms"]


def test_a_slow_baseline_also_gives_the_speedup_over_the_faster_loop():
    records = simulate(12)
    fast_library = [
        replace(
            record, hf_generate=replace(record.hf_generate, seconds=record.baseline.seconds / 1.5)
        )
        for record in records
    ]
    row = build_rows(fast_library)[0]
    assert row["baseline_over_hf_generate"] == pytest.approx(1 / 1.5)
    assert row["speedup_over_hf_generate"] == pytest.approx(row["speedup"] / 1.5)
    assert "speedup_over_hf_generate" not in build_rows(records)[0]
    assert "slow_baseline" in [
        finding["name"] for finding in simulated_report(fast_library)["findings"]
    ]


def test_theory_scales_the_costs_of_shorter_drafts_to_the_row():
    row = build_rows(simulate(8))[0]
    theory = build_theory(row, round_costs(4), lambda k: k)
    assert (theory["K"], [point["k"] for point in theory["curve"]]) == (4, [0, 1, 2, 3, 4])
    assert theory["predicted"] == pytest.approx(theory["curve"][4]["predicted_speedup"])
    cost = theory["v"] * (VERIFY_STEP - 3 * PLAIN_STEP / 10) / VERIFY_STEP + theory["c"]
    assert theory["curve"][1]["predicted_speedup"] == pytest.approx(
        (1 + row["acceptance_rate_per_position"][0]) / cost
    )
    assert 0.6 < theory["alpha"] < 0.8


def test_a_tree_s_row_counts_nodes_by_depth_and_its_draft_step_is_a_level():
    tree = {"budget": 16, "depth": 4, "top_k": 4}
    records = [
        replace(record, rounds=tuple(replace(entry, num_off_path=12) for entry in record.rounds))
        for record in simulate(8)
    ]
    chain, row = (
        build_rows(simulate(8))[0],
        build_result_rows(records, SUITE, Configuration(4, tree=tree), seed=0)[0],
    )
    assert row["num_draft_tokens"] == 4 * chain["num_draft_tokens"] == 16 * row["num_drafts"]
    for same in ("mean_acceptance_length", "acceptance_rate_per_position", "predicted_speedup"):
        assert row[same] == chain[same]
    assert row["acceptance_rate"] == pytest.approx(chain["acceptance_rate"] / 4)
    assert row["draft_ms"] == pytest.approx(chain["draft_ms"] / 4)
    theory = build_theory(row, [], lambda k: k)
    assert (theory["K"], [point["k"] for point in theory["curve"]]) == (4, [0, 4])
    assert theory["c"] == pytest.approx(build_theory(chain, [], lambda k: k)["c"])
    assert theory["predicted"] == pytest.approx(
        row["mean_acceptance_length"] / (theory["v"] + theory["c"] * theory["K"])
    )
    assert theory["predicted"] == pytest.approx(theory["curve"][1]["predicted_speedup"])


def test_contexts_are_reported_in_buckets():
    rows = build_context_rows(simulate(48))
    assert [row["bucket"] for row in rows] == ["32-63", "64-127", "128-255", "256-511"]
    assert sum(row["num_rounds"] for row in rows) == 48 * 40
    assert all(row["mean_acceptance_length"] > 1 for row in rows)


def test_loops_are_noticed():
    record = simulate(1)[0]
    assert not is_looping(record)
    loop = RoundRecord((1, 2), ("a", "b"), (1, 2), (1, 2, 3), ("a", "b", "c"))
    assert is_looping(replace(record, rounds=(*record.rounds, *[loop] * 16)))
    assert not is_looping(replace(record, rounds=(loop,) * 5))
    for period, loops in ((16, True), (17, False)):
        emitted = tuple(RoundRecord((), (), (), (number % period,), ("x",)) for number in range(60))
        assert is_looping(replace(record, rounds=emitted)) == loops
