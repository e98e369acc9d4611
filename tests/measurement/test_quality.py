import ctypes
import fcntl
import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import evaluate
import numpy as np
import pytest
import yaml
from scipy import stats

from specdistill.gate.decide import Evidence, decide
from specdistill.gate.rules import Rule
from specdistill.measurement import quality
from specdistill.measurement.quality import (
    add_quality,
    is_match,
    is_python_so_far,
    paired,
    passes,
    program,
)
from specdistill.project import ANSWERS, SUITES
from specdistill.report.files import validate
from specdistill.suites.suite import SuiteRow, load_suite, parse
from tests.processes import fork
from tests.refusals import refused
from tests.simulated import SUITE, simulate, simulated_report

LONG = 120.0  # seconds; what takes so long will never end, on any machine


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
            "        x = 1\n        return x\n\n    def next(self):\n        yield\n\nclass Next:\n",
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
def test_python_may_break_off_and_may_not_be_wrong(source, good):
    assert is_python_so_far(source) == good


def test_a_text_makes_a_program():
    assert (
        program("def f(x):\n", "    return x\n\ndef g(x):\n    1 / 0\n")
        == "def f(x):\n    return x\n"
    )
    assert (
        program("def f(x):", "\n    a = x\n\n    return a\nprint(1)")
        == "def f(x):\n    a = x\n\n    return a"
    )
    assert (
        program(None, "Here it is:\n```python\ndef f(x):\n    return x\n```\nDone.")
        == "def f(x):\n    return x\n"
    )
    assert program(None, "def f(x):\n    return x") == "def f(x):\n    return x"


@pytest.mark.parametrize(
    ("code", "good"),
    [
        ("assert 1 + 1 == 2", True),
        ("assert 1 + 1 == 3", False),
        ("raise SystemExit(1)", False),
        *((f"raise SystemExit({code})\nassert False", False) for code in (0, 99)),
        ("import os, sys\nos.write(int(sys.argv[1]), b'0' * 32)\nos._exit(0)", False),
        ("if __name__ == '__main__': input()", True),
        ("x = bytearray(2**31)", False),
        ("open('big', 'wb').write(b'x' * 2**22)", False),
        ("import os\nassert 'SECRET' not in os.environ and os.listdir('.') == []", True),
        ("import sys\nassert sys.flags.isolated", True),
    ],
)
def test_programs_run_within_limits(code, good, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    assert passes(code, seconds=LONG) == good


def test_a_program_without_end_is_ended():
    assert not passes("while True: pass", seconds=0.5)


@pytest.mark.parametrize("ends", [True, False], ids=["the program ends", "the program is ended"])
def test_what_a_program_starts_ends_with_it(tmp_path, monkeypatch, ends):
    """The process that it starts holds a lock for as long as it lives."""
    lock, held = tmp_path / "lock", tmp_path / "held"
    child = f"import fcntl, time; f = open({str(lock)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); open({str(held)!r}, 'w')"
    start = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child + f'; time.sleep({10 * LONG})'!r}])\n"
    wait = f"import os, time\nwhile not os.path.exists({str(held)!r}): time.sleep(0.01)\n"

    def run_out_of_time(process, program, timeout):
        process.stdin.write(program)
        process.stdin.close()
        wait_for(held.exists)
        raise subprocess.TimeoutExpired(process.args, timeout)

    if not ends:
        monkeypatch.setattr(subprocess.Popen, "communicate", run_out_of_time)
    assert passes(f"{start}{wait}", seconds=LONG) == ends
    with lock.open() as file:
        wait_for(lambda: is_free(file))


# Of every process that is not the program's own, whatever file of /proc tells it.
READ_SECRETS = """
import glob, os
def read(path):
    try:
        return open(path, "rb").read()
    except OSError:
        return b""
assert not any(read(f"/proc/{os.getppid()}/{name}") for name in ("environ", "mem", "auxv"))
assert not [path for path in glob.glob("/proc/[0-9]*/environ") if read(path) and f"/{os.getpid()}/" not in path]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("user", [0, 65534], ids=["root", "nobody"])
@pytest.mark.parametrize("landlock", [True, False], ids=["", "without Landlock"])
def test_no_program_reads_the_environment_of_other_processes(tmp_path, user, landlock, monkeypatch):
    if user != os.getuid() != 0:
        pytest.skip("only root becomes another user")
    system = shutil.which("python3", path=os.defpath)
    if user and not (system and Path(system).resolve().is_relative_to("/usr")):
        pytest.skip("no interpreter that every user may run")
    if not landlock:  # as on a kernel that does not have it: root's programs read nothing because they are root's no longer
        monkeypatch.setattr(
            quality, "LIMITED", quality.LIMITED.replace("libc.syscall(446", "(lambda *_: 0)(446")
        )
    program = READ_SECRETS if landlock else READ_SECRETS.rpartition("assert")[0]

    def work():
        if user:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            ctypes.CDLL(None).prctl(
                4, 1, 0, 0, 0
            )  # as of a process that had this user from its start
            sys.executable = system
        sys.exit(0 if passes(program, LONG) else 1)

    process = fork(work)
    process.join()
    assert process.exitcode == 0


def wait_for(condition):
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_free(file):
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "predictions", "references", "rate"),
    [
        ("exact_match", ["so 4", "so 5"], ["4", "4"], 0.5),
        ("pass_rate", ["x = 4", "x = 5"], ["assert x == 4"] * 2, 0.5),
        ("python_syntax", ["    return 1\n", " return\n1 1\n\n"], ["def f():\n"] * 2, 0.5),
    ],
)
def test_the_metrics_load_by_path_and_say_each_outcome(name, predictions, references, rate):
    metric = evaluate.load(str(ANSWERS), name, keep_in_memory=True)
    assert metric.compute(predictions=predictions, references=references) == {
        name: rate,
        "outcomes": [True, False],
    }


def test_a_paired_difference_and_its_test():
    ours, theirs = [True] * 30 + [False] * 10 + [True] * 8, [True] * 30 + [True] * 10 + [False] * 8
    found = paired(ours, theirs, [str(number) for number in range(len(ours))], seed=0)
    assert (found["with_draft"], found["without_draft"]) == (38 / 48, 40 / 48)
    assert found["difference"] == pytest.approx(-2 / 48)
    assert (found["only_with_draft"], found["only_without_draft"]) == (8, 10)
    assert found["p_value"] == pytest.approx(stats.binomtest(8, 18, 0.5).pvalue)
    # The normal interval of a mean of 18 signs and 30 zeros.
    half = 1.96 * np.std([1] * 8 + [-1] * 10 + [0] * 30) / np.sqrt(48)
    assert found["difference_ci95"] == pytest.approx([-2 / 48 - half, -2 / 48 + half], abs=0.03)
    turns = paired(
        ours * 4, theirs * 4, [str(number) for number in range(len(ours))] * 4, seed=0
    )  # of conversations
    assert turns["difference_ci95"] == pytest.approx(found["difference_ci95"], abs=0.02)
    same = paired([True, False, True], [True, False, True], ["a", "b", "c"], seed=0)
    assert (same["difference"], same["difference_ci95"], same["p_value"]) == (0.0, [0.0, 0.0], 1.0)
    assert "difference_ci95" not in paired([True], [True], ["a"], seed=0)


@pytest.fixture
def scored():
    """Records of a suite whose prompts have a right answer: with the draft `num_right` are right, without it all are."""

    def make(num_right, **options):
        records = simulate(20)
        right = {"reference": "42", "test": "assert answer == 42"}
        suite = replace(
            SUITE,
            rows=tuple(SuiteRow(one.id, one.category, "messages", [], **right) for one in records),
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
        add_quality(
            report, records, suite, special_tokens=["<|end|>"], **{"run_code": False, **options}
        )
        validate(report)
        return Evidence(report, records)

    return make


def test_a_report_says_both_scores_and_a_gate_tests_the_lower_end(scored):
    rule = Rule("quality.exact_match.difference", "min", -0.1)
    whole = scored(20)
    assert whole.report["quality"]["exact_match"]["with_draft"] == 1.0
    assert decide([rule], whole)["passed"]
    close = scored(18)  # -0.1 itself, and its interval reaches further
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
    worse = scored(8)
    assert worse.report["quality"]["exact_match"]["p_value"] < 0.001
    (found,) = [finding for finding in worse.report["findings"] if finding["name"] == "quality"]
    assert "40.0% with the draft and 100.0% without by exact_match" in found["message"]


def test_programs_are_run_only_when_asked(scored):
    report = scored(20).report
    assert "pass_rate" not in report["quality"]
    assert "eval.run_code=true" in report["not_measured"]["quality.pass_rate"]
    (judged,) = decide([Rule("quality.pass_rate.with_draft", "min", 0.5)], Evidence(report, []))[
        "rules"
    ]
    assert not judged["passed"] and "eval.run_code=true" in judged["reason"]
    assert scored(15, run_code=True).report["quality"]["pass_rate"]["with_draft"] == 0.75


def test_suites_say_what_their_texts_are_scored_by(tmp_path):
    assert load_suite("pico").quality == "python_syntax"
    (tmp_path / "mine.jsonl").write_text(
        '{"prompt": "2 + 2 =", "reference": "4"}\n{"prompt": "def f():", "test": "f()"}\n'
    )
    assert [(row.reference, row.test) for row in load_suite(str(tmp_path / "mine.jsonl")).rows] == [
        ("4", None),
        (None, "f()"),
    ]
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
    add_quality(report, records, suite, special_tokens=[], run_code=False)
    assert report["quality"]["python_syntax"]["num_prompts"] == 3
    assert report["quality"]["python_syntax"]["with_draft"] == 1.0
    assert report["quality"]["python_syntax"]["without_draft"] == 0.0
    assert {"quality.exact_match", "quality.pass_rate"} <= report["not_measured"].keys()
    without = [replace(record, baseline_text=None) for record in records]
    report = simulated_report(without)
    add_quality(report, without, suite, special_tokens=[], run_code=False)
    assert report["quality"] == {} and "quality.python_syntax" in report["not_measured"]


def test_the_solutions_that_humaneval_holds_pass_its_tests_and_broken_ones_do_not(shared_data):
    content = (shared_data / "prompts" / "human_eval" / "HumanEval.jsonl.gz").read_bytes()
    columns = yaml.safe_load((SUITES / "humaneval.yaml").read_text())["columns"]
    rows = parse("HumanEval.jsonl.gz", content, columns)[:4]
    solutions = [json.loads(line) for line in gzip.decompress(content).splitlines()[:4]]
    answers = [
        f"```python\n{entry['prompt']}{entry['canonical_solution']}```" for entry in solutions
    ]
    assert all(
        passes(f"{program(None, answer)}\n{row.test}\n", LONG)
        for answer, row in zip(answers, rows, strict=True)
    )
    broken = [answer.replace("return", "return None and") for answer in answers]
    assert not any(
        passes(f"{program(None, answer)}\n{row.test}\n", LONG)
        for answer, row in zip(broken, rows, strict=True)
    )


def test_gsm8k_scores_its_own_solutions(shared_data):
    content = (shared_data / "prompts" / "gsm8k" / "test.jsonl").read_bytes()
    rows = parse(
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
