from dataclasses import replace
from itertools import pairwise

import evaluate
import numpy as np
import pytest
import yaml
from scipy import stats

from specdistill.common.project import ANSWERS, SUITES
from specdistill.evaluation.gate.decide import Evidence, decide
from specdistill.evaluation.gate.rules import Rule
from specdistill.evaluation.measurement.quality import (
    add_quality,
    compare_shares,
    is_match,
    is_python_so_far,
)
from specdistill.evaluation.report.files import validate_report
from specdistill.evaluation.suites.suite import SuiteRow, load_suite, parse_suite_file
from tests.refusals import refused
from tests.simulated import SUITE, simulate, simulated_report


@pytest.mark.parametrize(
    ("text", "reference", "right"),
    [
        ("She has 3 bags of 6, so 18 apples.", "3 * 6 = 18\n#### 18", True),
        ("18 apples are too many: 17.", "#### 18", False),
        ("#### 1,200", "1200", True),
        ("It costs $1,200.00 in all.", "1200", True),
        ("#### 42\n\nQuestion: Tom has 7 apples", "42", True),
        ("17 ####", "17", True),
        ("-5", "5", False),
        ("no idea", "18", False),
        ("  Paris \n", "paris", True),
        ("It is Paris", "paris", False),
    ],
)
def test_the_marked_or_the_last_number_is_the_answer(text, reference, right):
    assert is_match(text, reference) == right


@pytest.mark.parametrize(
    ("source", "good"),
    [
        ("", True),
        ("def f(x):\n    return (x +", True),
        ("def f(x):\n    return x\n\nx = 'broken o", True),
        ("    def method(self):\n        return 1\n\nclass Next:", True),
        ('def f():\n    """A docstring that goes', True),
        (
            (
                "        x = 1\n        return x\n\n    def next(self):\n        yield\n\nclass"
                " Next:\n"
            ),
            True,
        ),
        ("        x = 1\n      y = 2\nz = 3\n", False),
        ("def f(:\n    pass\n", False),
        ("x = 1\n  y = 2\nz = 3\n", False),
        ("return return\nx = 1\n", False),
        ("x = 1\0\ny = 2\n", False),
        ("(" * 3000 + "\n1\n", False),
    ],
)
def test_unfinished_python_passes_and_wrong_python_fails(source, good):
    assert is_python_so_far(source) == good


@pytest.mark.parametrize(
    ("name", "predictions", "references", "rate"),
    [
        ("exact_match", ["so 4", "so 5"], ["4", "4"], 0.5),
        ("python_syntax", ["    return 1\n", " return\n1 1\n\n"], ["def f():\n"] * 2, 0.5),
    ],
)
def test_the_metrics_load_by_path_and_say_each_outcome(name, predictions, references, rate):
    metric = evaluate.load(str(ANSWERS), name, keep_in_memory=True)
    assert metric.compute(predictions=predictions, references=references) == {
        name: rate,
        "outcomes": [True, False],
    }


def test_a_paired_difference_has_an_interval_and_a_p_value():
    ours, theirs = [True] * 30 + [False] * 10 + [True] * 8, [True] * 30 + [True] * 10 + [False] * 8
    found = compare_shares(ours, theirs, [str(number) for number in range(len(ours))], seed=0)
    assert (found["with_draft"], found["without_draft"]) == (38 / 48, 40 / 48)
    assert found["difference"] == pytest.approx(-2 / 48)
    assert (found["only_with_draft"], found["only_without_draft"]) == (8, 10)
    assert found["p_value"] == pytest.approx(stats.binomtest(8, 18, 0.5).pvalue)
    # The normal interval of a mean of 18 signs and 30 zeros.
    half = 1.96 * np.std([1] * 8 + [-1] * 10 + [0] * 30) / np.sqrt(48)
    assert found["difference_ci95"] == pytest.approx([-2 / 48 - half, -2 / 48 + half], abs=0.03)
    # The four turns of a conversation count as one unit.
    turns = compare_shares(
        ours * 4, theirs * 4, [str(number) for number in range(len(ours))] * 4, seed=0
    )
    assert turns["difference_ci95"] == pytest.approx(found["difference_ci95"], abs=0.02)
    same = compare_shares([True, False, True], [True, False, True], ["a", "b", "c"], seed=0)
    assert (same["difference"], same["difference_ci95"], same["p_value"]) == (0.0, [0.0, 0.0], 1.0)
    assert "difference_ci95" not in compare_shares([True], [True], ["a"], seed=0)


@pytest.fixture
def scored_evidence():
    """A function that builds evidence on 20 prompts with right answers: `num_right` of the answers
    with the draft are right, and all of those without it."""

    def build_evidence(num_right):
        records = simulate(20)
        suite = replace(
            SUITE,
            rows=tuple(
                SuiteRow(record.id, record.category, "messages", [], reference="42")
                for record in records
            ),
        )
        records = [
            replace(
                record,
                text=f"answer = {42 if number < num_right else 41}<|end|>",
                baseline_text="answer = 42<|end|>",
            )
            for number, record in enumerate(records)
        ]
        report = simulated_report(records)
        add_quality(report, records, suite, special_tokens=["<|end|>"])
        validate_report(report)
        return Evidence(report, records)

    return build_evidence


def test_a_report_says_both_scores_and_a_gate_tests_the_lower_end(scored_evidence):
    rule = Rule("quality.exact_match.difference", "min", -0.1)
    whole = scored_evidence(20)
    assert whole.report["quality"]["exact_match"]["with_draft"] == 1.0
    assert decide([rule], whole)["passed"]
    close = scored_evidence(18)  # -0.1 itself, and its interval reaches further
    (judged,) = decide([rule], close)["rules"]
    assert (judged["value"], judged["passed"]) == (pytest.approx(-0.1), False)
    assert judged["ci95"][0] < -0.1
    assert decide([Rule(rule.metric, "min", -0.1001, confidence=0)], close)["passed"]
    (judged,) = decide([Rule(rule.metric, "min", -0.5, confidence=0.8)], close)["rules"]
    assert (
        not judged["passed"]
        and judged["reason"].startswith("no evidence")
        and "95%" in judged["reason"]
    )
    assert not [finding for finding in whole.report["findings"] if finding["name"] == "quality"]
    worse = scored_evidence(8)
    assert worse.report["quality"]["exact_match"]["p_value"] < 0.001
    (found,) = [finding for finding in worse.report["findings"] if finding["name"] == "quality"]
    assert "40.0% with the draft and 100.0% without it, by exact_match" in found["message"]


def test_a_suite_names_its_quality_metric_and_its_references(tmp_path):
    assert load_suite("pico").quality == "python_syntax"
    (tmp_path / "mine.jsonl").write_text(
        '{"prompt": "2 + 2 =", "reference": "4"}\n{"prompt": "def f():"}\n'
    )
    assert [row.reference for row in load_suite(str(tmp_path / "mine.jsonl")).rows] == ["4", None]
    (tmp_path / "bad.jsonl").write_text('{"prompt": "2 + 2 =", "reference": 4}\n')
    with refused("eval.suite", "bad.jsonl:1 with reference=4"):
        load_suite(str(tmp_path / "bad.jsonl"))


def test_a_prompt_that_is_no_python_is_not_scored_as_python():
    records = simulate(4)
    kinds = ("prompt", "prompt", "messages", "prompt")
    prompts = ("def f(x):\n", "Once upon a time\nthere was\n", "ignored ((", "    x = 1\n")
    rows = tuple(
        SuiteRow(record.id, "c", kind, prompt)
        for record, kind, prompt in zip(records, kinds, prompts, strict=True)
    )
    suite = replace(SUITE, rows=rows, quality="python_syntax")
    records = [
        replace(record, prompt=prompt, text="    return 1\n", baseline_text="  return (\n):\n")
        for record, prompt in zip(records, prompts, strict=True)
    ]
    report = simulated_report(records)
    add_quality(report, records, suite, special_tokens=[])
    assert report["quality"]["python_syntax"]["num_prompts"] == 3
    assert report["quality"]["python_syntax"]["with_draft"] == 1.0
    assert report["quality"]["python_syntax"]["without_draft"] == 0.0
    assert "quality.exact_match" in report["not_measured"]
    without = [replace(record, baseline_text=None) for record in records]
    report = simulated_report(without)
    add_quality(report, without, suite, special_tokens=[])
    assert report["quality"] == {} and "quality.python_syntax" in report["not_measured"]


def test_gsm8k_scores_its_own_solutions(shared_data):
    content = (shared_data / "prompts" / "gsm8k" / "test.jsonl").read_bytes()
    rows = parse_suite_file(
        "test.jsonl", content, yaml.safe_load((SUITES / "gsm8k.yaml").read_text())["columns"]
    )
    assert all(
        is_match(f"So the answer is {row.reference.rpartition('#### ')[2]}.", row.reference)
        for row in rows
    )
    others = pairwise(rows)
    assert (
        sum(
            is_match(f"It is {one.reference.rpartition('#### ')[2]}", other.reference)
            for one, other in others
        )
        < 60
    )
