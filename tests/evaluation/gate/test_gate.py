import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import yaml

from specdistill.common.project import GATES
from specdistill.evaluation.gate.decide import Estimate, Evidence, compare_with_threshold, decide
from specdistill.evaluation.gate.rules import Rule, load_gate, read_rule
from specdistill.evaluation.report.build import build_result_rows
from specdistill.evaluation.report.phrases import format_about
from specdistill.evaluation.statistics.records import Configuration
from tests.refusals import refused
from tests.rounds import with_rounds
from tests.simulated import SUITE, edited, simulate, simulated_report


@pytest.fixture(scope="module")
def evidence():
    records = simulate()
    return Evidence(simulated_report(records), records)


def write_gate(folder, *rules):
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(list(rules)))
    return str(path)


def judge_rule(evidence, rule, baseline=None):
    (result,) = decide([rule], evidence, baseline)["rules"]
    return result


def edit_evidence(evidence, path, value):
    return Evidence(edited(dict(evidence.report), path, value), evidence.records)


def remove_from_report(evidence, *path):
    section = functools.reduce(lambda part, name: part[name], path[:-1], evidence.report)
    remaining = {name: part for name, part in section.items() if name != path[-1]}
    return (
        edit_evidence(evidence, path[:-1], remaining)
        if path[:-1]
        else Evidence(remaining, evidence.records)
    )


def test_a_number_with_an_interval_is_tested_at_its_confidence_bound(evidence):
    row = evidence.report["results"][0]
    low, high = row["speedup_ci95"]
    between = (low + row["speedup"]) / 2
    assert row["speedup"] > between
    result = judge_rule(evidence, Rule("speedup", "min", between))
    assert not result["passed"]
    assert result["ci95"] == [low, high]
    assert "lower 95% bound" in result["reason"] and f"{low:.4g}" in result["reason"]
    assert judge_rule(evidence, Rule("speedup", "min", low - 1e-6))["passed"]
    result = judge_rule(evidence, Rule("speedup", "max", (high + row["speedup"]) / 2))
    assert not result["passed"]
    assert "upper 95% bound" in result["reason"] and f"{high:.4g}" in result["reason"]
    assert judge_rule(evidence, Rule("speedup", "max", high + 1e-6))["passed"]


def test_the_confidence_of_a_rule_sets_its_interval(evidence):
    low = evidence.report["results"][0]["speedup_ci95"][0]
    result = judge_rule(evidence, Rule("speedup", "min", low + 1e-4, confidence=0.5))
    assert result["passed"]
    assert (result["ci95"], result["confidence"]) == (None, 0.5)
    assert not judge_rule(evidence, Rule("speedup", "min", low, confidence=0.999))["passed"]
    value = evidence.report["results"][0]["speedup"]
    assert judge_rule(evidence, Rule("speedup", "min", value, confidence=0))["passed"]
    assert not judge_rule(evidence, Rule("speedup", "min", value + 1e-6, confidence=0))["passed"]


def test_a_category_has_its_own_row_and_records(evidence):
    row = next(row for row in evidence.report["results"] if row["category"] == "chat")
    result = judge_rule(evidence, Rule("mean_acceptance_length", "min", 1.5, {"category": "chat"}))
    assert (result["value"], result["scope"]) == (
        row["mean_acceptance_length"],
        {"category": "chat"},
    )
    narrow = judge_rule(
        evidence, Rule("mean_acceptance_length", "min", 1.5, {"category": "chat"}, confidence=0.5)
    )
    assert narrow["passed"]


def test_a_rule_takes_equals_and_a_dotted_path(evidence):
    assert judge_rule(evidence, Rule("lossless.greedy_identical", "equals", True))["passed"]
    assert not judge_rule(evidence, Rule("lossless.greedy_identical", "equals", False))["passed"]
    assert judge_rule(evidence, Rule("draft.bytes", "max", 2_000_000))["passed"]


def test_absent_evidence_fails_and_says_why(evidence):
    missing = [
        (remove_from_report(evidence, "results", 0, "speedup"), Rule("speedup", "min", 0.0)),
        (
            remove_from_report(evidence, "lossless", "sampling_test"),
            Rule("lossless.sampling_test.p_value", "min", 0.0),
        ),
        (remove_from_report(evidence, "theory"), Rule("theory.best_k", "min", 0)),
        (evidence, Rule("speedup", "min", 0.0, {"category": "poems"})),
        (evidence, Rule("speedup", "min", 0.0, {"suite": "other"})),
        (evidence, Rule("speedup", "max_regression", 1.0)),
    ]
    for lacking, rule in missing:
        result = judge_rule(lacking, rule)
        assert (result["passed"], result["value"]) == (False, None)
        assert result["reason"].startswith("no evidence: ")
    untold = edit_evidence(
        remove_from_report(evidence, "theory"), ("not_measured", "theory"), "nothing was drafted"
    )
    assert judge_rule(untold, Rule("theory.v", "max", 9.0))["reason"].endswith(
        "nothing was drafted"
    )
    # A section whose name only begins alike has another reason.
    other = edit_evidence(
        remove_from_report(evidence, "theory"), ("not_measured", "the"), "nothing was drafted"
    )
    assert judge_rule(other, Rule("theory.v", "max", 9.0))["reason"].endswith("it was not measured")


def test_a_number_without_the_interval_it_should_have_is_no_evidence():
    records = simulate(1)
    result = judge_rule(Evidence(simulated_report(records), records), Rule("speedup", "min", 0.0))
    assert not result["passed"] and result["reason"].startswith("no evidence")


def test_a_run_that_was_cut_short_fails_whatever_it_shows(evidence):
    cut = edit_evidence(
        edit_evidence(evidence, ("incomplete",), True),
        ("not_measured",),
        {"incomplete": "the server went away"},
    )
    decision = decide([Rule("speedup", "min", 1.0)], cut)
    assert not decision["passed"]
    assert [(rule["metric"], rule["passed"]) for rule in decision["rules"]] == [
        ("incomplete", False),
        ("speedup", True),
    ]
    assert (
        "cut short" in decision["rules"][0]["reason"]
        and "the server went away" in decision["rules"][0]["reason"]
    )
    assert decide([Rule("speedup", "min", 1.0)], edit_evidence(evidence, ("incomplete",), False))[
        "passed"
    ]
    result = judge_rule(evidence, NO_WORSE, cut)
    assert (
        not result["passed"]
        and result["reason"].startswith("no evidence")
        and "baseline" in result["reason"]
    )
    # The prompts differ from the baseline's only because the run was cut short.
    few = Evidence(cut.report, cut.records[:3])
    (_, result) = decide([NO_WORSE], few, evidence)["rules"]
    assert (
        not result["passed"]
        and result["reason"].startswith("no evidence")
        and "baseline" not in result["reason"]
    )


def test_every_setting_that_tells_rows_apart_is_a_scope(evidence):
    tree = {"budget": 24, "depth": 5, "top_k": 4}
    other = {
        "num_speculative_tokens": 7,
        "batch_size": 8,
        "tree": tree,
        "temperature": 1.0,
        "context_bucket": "512",
    }
    row = {**evidence.report["results"][0], **other, "num_rounds": 77}
    report = {**evidence.report, "results": [*evidence.report["results"], row]}
    for name, value in other.items():
        rule = Rule("num_rounds", "equals", 77, {name: value, "context_bucket": "512"})
        assert judge_rule(Evidence(report, []), rule)["value"] == 77, name
    whole = {
        **report,
        "results": [*report["results"], {**row, "context_bucket": "all", "num_rounds": 88}],
    }
    assert judge_rule(
        Evidence(whole, []), Rule("num_rounds", "equals", 88, {"num_speculative_tokens": 7})
    )["passed"]  # a rule without a bucket takes the row of uncut prompts
    # YAML reads a bucket as a number; a report holds it as a string.
    context_rule = read_rule(
        "", {"metric": "num_rounds", "equals": 77, "scope": {"context_bucket": 512}}
    )
    assert judge_rule(Evidence(report, []), context_rule)["passed"]
    nowhere = judge_rule(Evidence(report, []), Rule("num_rounds", "equals", 77, {"batch_size": 16}))
    assert nowhere["reason"].startswith("no evidence") and "batch_size=16" in nowhere["reason"]
    assert (
        judge_rule(Evidence(report, []), Rule("num_rounds", "min", 0))["value"]
        == evidence.report["results"][0]["num_rounds"]
    )


@pytest.mark.parametrize(
    ("rule", "key", "got"),
    [
        ({"metric": "speedupp", "min": 1}, ": metric", "speedupp"),
        ({"min": 1}, ": metric", "None"),
        ({"metric": "speedup"}, "", "no requirement"),
        ({"metric": "speedup", "min": 1, "max": 2}, "", "min and max"),
        ({"metric": "speedup", "minimum": 1}, ": minimum", "an unknown key"),
        ({"metric": "speedup", "min": "fast"}, ": min", "'fast'"),
        ({"metric": "speedup", "min": True}, ": min", "True"),
        ({"metric": "speedup", "min": float("nan")}, ": min", "nan"),
        ({"metric": "speedup", "min": 1, "confidence": 1}, ": confidence", "1"),
        ({"metric": "speedup", "max_regression": 1.0}, ": max_regression", "1.0"),
        ({"metric": "speedup", "min": 1, "severity": "alarm"}, ": severity", "alarm"),
        (
            {"metric": "speedup", "min": 1, "scope": {"categry": "chat"}},
            ": scope: categry",
            "an unknown key",
        ),
        ({"metric": "speedup", "min": 1, "scope": "chat"}, ": scope", "'chat'"),
        (
            {"metric": "draft.bytes", "max_regression": 0.1},
            ": max_regression",
            "metric draft.bytes",
        ),
        ("speedup > 1", "", "'speedup > 1'"),
    ],
)
def test_an_invalid_rule_is_refused(tmp_path, rule, key, got):
    with refused(f"mine.yaml rule 1{key}", got):
        load_gate(write_gate(tmp_path, rule))


def test_a_missing_or_broken_gate_is_refused(tmp_path):
    with refused("gate", "defualt"):
        load_gate("defualt")
    for name, content in (("empty", ""), ("broken", "[")):
        (tmp_path / f"{name}.yaml").write_text(content)
        with refused("gate", tmp_path / f"{name}.yaml"):
            load_gate(str(tmp_path / f"{name}.yaml"))


def test_every_gate_that_ships_loads_and_can_be_passed():
    names = sorted(path.stem for path in GATES.glob("*.yaml"))
    assert names == ["default", "pico", "release", "server", "server-bfloat16", "smollm2"]
    records = [
        replace(record, category="gsm8k" if number % 2 else "mt-bench")
        for number, record in enumerate(simulate())
    ]
    measured = Evidence(simulated_report(records), records)
    for name in names:
        measured_at_a_cost = edit_evidence(
            measured, ("measurement",), {"seconds": 100.0, "peak_memory_bytes": 2**30}
        )
        decision = decide(load_gate(name), measured_at_a_cost, baseline=measured_at_a_cost)
        assert decision["passed"], decision
        assert load_gate(f"eval/gates/{name}.yaml") == load_gate(name)


def test_the_default_gate_fails_lossy_untested_and_slow_drafts(evidence):
    for path, value in (
        (("lossless", "unexplained_divergences"), 1),
        (("lossless", "sampling_test", "p_value"), 1e-6),
        (("lossless", "sampling_test", "negative_control_p_value"), 0.4),
        (("results", 0, "speedup_ci95"), [0.99, 1.4]),
    ):
        assert not decide(load_gate("default"), edit_evidence(evidence, path, value))["passed"], (
            path
        )


# Regressions

REPORT = simulated_report(simulate(2))
NO_WORSE = Rule("mean_acceptance_length", "max_regression", 0.03)


def test_a_baseline_on_other_prompts_is_refused_with_the_difference(evidence):
    others = [
        replace(record, id=f"other-{number}") for number, record in enumerate(evidence.records[:5])
    ]
    missing, added = (
        "1 only in the report (function-00)",
        "5 only in the baseline (other-0, other-1, other-2, …)",
    )
    with refused("baseline", f"other prompts: {missing}; {added}"):
        judge_rule(evidence, NO_WORSE, Evidence(evidence.report, [*evidence.records[1:], *others]))
    with refused("baseline", f"other prompts: {missing}"):
        judge_rule(evidence, NO_WORSE, Evidence(evidence.report, evidence.records[1:]))


@pytest.mark.parametrize(
    ("path", "value", "got"),
    [
        (("results", 0, "suite_version"), "2", "suite_version 2"),
        (("results", 0, "suite"), "other", "suite other"),
        (("results", 0, "temperature"), 1.0, "temperature 1.0"),
        (("results", 0, "batch_size"), 8, "batch_size 8"),
        (("settings", "max_new_tokens"), 64, "max_new_tokens 64"),
        (("settings", "top_p"), 0.9, "top_p 0.9"),
        (("settings", "top_k"), 5, "top_k 5"),
        (("settings", "compile"), True, "compile True"),
        (("suite", "sha256"), "1" * 64, "suite.sha256 1111"),
        (("target", "parameters"), 8, "target.parameters 8"),
        (("target", "dtype"), "bfloat16", "target.dtype bfloat16"),
    ],
)
def test_a_baseline_that_measured_something_else_is_refused(evidence, path, value, got):
    with refused("baseline", got):
        judge_rule(evidence, NO_WORSE, edit_evidence(evidence, path, value))


def test_a_baseline_on_another_target_is_refused_by_name(evidence):
    report = edit_evidence(evidence, ("target", "weights"), "a" * 64)
    other = edit_evidence(
        edit_evidence(evidence, ("target", "model"), "another"), ("target", "weights"), "b" * 64
    )
    with refused("baseline", "a report on another (weights bbbbbbbb)"):
        judge_rule(report, NO_WORSE, other)
    moved = edit_evidence(
        edit_evidence(evidence, ("target", "model"), "elsewhere"), ("target", "weights"), "a" * 64
    )
    assert (
        judge_rule(report, NO_WORSE, moved)["passed"]
        and judge_rule(report, NO_WORSE, evidence)["passed"]
    )


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        (("hardware", "name"), "NVIDIA H200", "NVIDIA H200 by specdistill"),
        (("engine",), {"name": "vllm", "version": "1"}, "AMD EPYC 9B45 by vllm"),
    ],
)
def test_a_baseline_of_another_machine_or_engine_compares_acceptance_but_not_speed(
    evidence, path, value, place
):
    elsewhere = edit_evidence(evidence, path, value)
    result = judge_rule(evidence, Rule("speedup", "max_regression", 0.5), elsewhere)
    assert (result["passed"], result["value"]) == (False, None)
    assert "AMD EPYC 9B45 by specdistill" in result["reason"] and place in result["reason"]
    assert judge_rule(evidence, NO_WORSE, elsewhere)["passed"]


def test_a_metric_that_one_side_did_not_measure_is_no_evidence(evidence):
    rule = Rule("draft_ms", "max_regression", 0.5)
    lacking = remove_from_report(evidence, "results", 0, "draft_ms")
    lacking = edit_evidence(
        lacking, ("results", 0, "not_measured", "draft_ms"), "nothing was drafted"
    )
    free = edit_evidence(evidence, ("results", 0, "draft_ms"), 0.0)
    for new, old, side, why in (
        (lacking, evidence, "report", "nothing was drafted"),
        (evidence, lacking, "baseline", "nothing was drafted"),
        (evidence, free, "baseline", "0.0"),  # a change from 0 has no size
    ):
        result = judge_rule(new, rule, old)
        assert (
            not result["passed"]
            and result["reason"].startswith("no evidence")
            and result["reason"].endswith(why)
        )
        assert side in result["reason"]


def test_a_configuration_of_a_sweep_is_compared_with_its_own_prompts_alone():
    """The same prompt ids are in every configuration; only the records of the rule's configuration
    may count."""
    cold = simulate(8)

    def sweep_with_rate(rate):
        records = [
            replace(record, configuration=Configuration(4, 1.0))
            for record in simulate(8, conditional=(rate,) * 4)
        ]
        rows = build_result_rows(records, SUITE, Configuration(4, 1.0), seed=0)
        return Evidence({**REPORT, "results": [*REPORT["results"], *rows]}, [*cold, *records])

    warm, worse = sweep_with_rate(0.6), sweep_with_rate(0.4)
    rule = replace(NO_WORSE, scope={"temperature": 1.0})
    assert judge_rule(warm, NO_WORSE, worse)["value"] == 0
    assert judge_rule(warm, rule, warm)["value"] == 0
    result = judge_rule(worse, rule, warm)
    assert result["value"] < -0.1 and not result["passed"]


def test_a_baseline_may_list_its_prompts_in_another_order(evidence):
    turned = Evidence(evidence.report, evidence.records[::-1])
    assert judge_rule(evidence, NO_WORSE, turned)["ci95"] == [0.0, 0.0]  # paired by prompt


def test_an_interval_that_is_too_wide_says_how_many_prompts_would_do(evidence):
    records = [
        with_rounds(record, record.rounds[:-2]) if number % 2 else record
        for number, record in enumerate(evidence.records)
    ]
    other = Evidence(evidence.report, vary_acceptance(records, 0.0, seed=1))
    result = judge_rule(
        other,
        Rule("mean_acceptance_length", "max_regression", 0.004),
        Evidence(evidence.report, records),
    )
    (value, (low, _)) = result["value"], result["ci95"]
    assert low < -0.004 < value  # the change itself is allowed
    needed = math.ceil(48 * ((value - low) / (value + 0.004)) ** 2)
    assert needed > 48
    for fact in (
        "lower 95% bound",
        f"{low:+.1%}",
        "allowed -0.4%",
        "48 prompts",
        format_about(needed),
    ):
        assert fact in result["reason"]
    assert (result["verdict"], result["passed"], result["prompts_needed"]) == (
        "inconclusive",
        False,
        needed,
    )
    worse = judge_rule(
        Evidence(evidence.report, vary_acceptance(records, 0.2, seed=1)),
        NO_WORSE,
        Evidence(evidence.report, records),
    )
    assert worse["value"] < -0.03 and "prompts" not in worse["reason"]


def test_estimates_of_prompts_are_rounded_and_capped():
    assert [format_about(count) for count in (7, 60, 904, 9_901, 10_000, 45_634)] == [
        "about 7", "about 60", "about 910", "about 10,000", "about 10,000", "more than 10,000",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "interval", "verdict"),
    [
        (Rule("speedup", "min", 1.2), (1.2, 1.4), "passed"),
        (Rule("speedup", "min", 1.2), (1.1, 1.2), "inconclusive"),
        (Rule("prediction_gap", "max", 0.1), (0.05, 0.1), "passed"),
        (Rule("prediction_gap", "max", 0.1), (0.1, 0.2), "inconclusive"),
        (Rule("speedup", "min", 1.2), (1.0, 1.19), "failed"),
        (Rule("prediction_gap", "max", 0.1), (0.11, 0.2), "failed"),
        (Rule("speedup", "max_regression", 0.05), (-0.04, 0.02), "passed"),
        (Rule("speedup", "max_regression", 0.05), (-0.06, 0.02), "inconclusive"),
        # a certain loss, which may exceed the margin
        (Rule("speedup", "max_regression", 0.05), (-0.06, -0.02), "failed"),
        (Rule("speedup", "max_regression", 0.05), (-0.06, 0.0), "inconclusive"),  # perhaps no loss
        # a certain loss, but within the margin
        (Rule("speedup", "max_regression", 0.05), (-0.05, -0.02), "passed"),
        # more milliseconds are a loss
        (Rule("verify_ms", "max_regression", 0.05), (0.02, 0.06), "failed"),
        (Rule("verify_ms", "max_regression", 0.05), (-0.06, 0.04), "passed"),
    ],
)
def test_the_interval_decides_between_three_verdicts(rule, interval, verdict):
    found, _, needed = compare_with_threshold(rule, Estimate(sum(interval) / 2, interval, None, 48))
    assert found == verdict
    assert (needed is not None) == (verdict == "inconclusive")


def test_one_failed_rule_fails_and_an_undecided_one_does_not_pass(evidence):
    row = evidence.report["results"][0]
    holding, open_rule, failing = (
        Rule("speedup", "min", threshold) for threshold in (0.5, row["speedup"], 9.0)
    )
    for rules, verdict in (
        ([holding], "passed"),
        ([holding, open_rule], "inconclusive"),
        ([open_rule, failing], "failed"),
        (
            [holding, replace(failing, severity="warn"), replace(open_rule, severity="warn")],
            "passed",
        ),
    ):
        gate = decide(rules, evidence)
        assert (gate["verdict"], gate["passed"]) == (verdict, verdict == "passed")


def test_a_first_release_is_not_asked_for_regressions(evidence):
    within = edit_evidence(
        evidence, ("measurement",), {"seconds": 60.0, "peak_memory_bytes": 10**9}
    )
    gate = decide(load_gate("release"), within, first_release=True)
    assert gate["first_release"] and all(
        "max_regression" not in rule["requirement"] for rule in gate["rules"]
    )
    assert gate["passed"]
    assert not decide(load_gate("release"), within)["passed"]


def vary_acceptance(records, drop, seed):
    """Return records of the same prompts by a draft that accepts differently.

    One round in twenty accepts one token more and others one less, so that the mean acceptance
    length falls by the share `drop`.
    """
    generator = np.random.default_rng(seed)
    counts = np.array([len(entry.accepted) for record in records for entry in record.rounds])
    gain, full = 0.05, len(records[0].rounds[0].drafted)
    loss = float((gain * (counts < full).mean() + drop * (1 + counts.mean())) / (counts > 0).mean())
    changed_records = []
    for record in records:
        rounds = []
        for entry in record.rounds:
            draw, count = float(generator.uniform()), len(entry.accepted)
            count += (draw < gain and count < full) - (draw > 1 - loss and count > 0)
            emitted = (*entry.drafted[:count], entry.emitted[-1])
            rounds.append(
                replace(
                    entry,
                    accepted=entry.drafted[:count],
                    emitted=emitted,
                    emitted_text=("x",) * len(emitted),
                )
            )
        changed_records.append(with_rounds(record, rounds))
    return changed_records
