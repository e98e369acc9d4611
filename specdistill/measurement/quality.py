"""Answer quality with the draft and without it: task metrics of both, paired by prompt; and how an answer is read.

Speculation must not change what the target generates, so greedy answers score the same; sampled answers differ by chance, and the
difference of their scores must be about 0. Rows with a `reference` are scored by exact match, rows with a `test` by running the
program, and all rows by the metric that the suite's header names (`quality`).

Generated programs run in a process of their own with limits on time, memory and file size, and read no other's environment. This contains
accidents, not malice: a program can read files and use the network as its user can, and what it starts in another session outlives it.
Nothing is run unless `eval.run_code=true`.
"""

import codeop
import ctypes
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any

import datasets
import evaluate
import numpy as np
from scipy import stats

from specdistill.project import ANSWERS
from specdistill.statistics.intervals import interval
from specdistill.statistics.metrics import Metric
from specdistill.statistics.records import PromptRecord, records_of
from specdistill.suites.suite import Suite, SuiteRow

DIFFERENCE = Metric(
    ("with_draft", "without_draft", "num_prompts"),
    lambda ours, theirs, number: (ours - theirs) / number,
)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
INDENT = 4
FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
SECONDS = 10.0
MEMORY_BYTES = 2**30
FILE_BYTES = 2**20

# The child sets its own limits before it reads the program, which cannot raise them again. What it was given first it writes into a pipe
# once the program has run to its end: no exit code can say that. On Linux it enters a Landlock domain (in which only making devices is
# forbidden): from there /proc does not show the environments of processes outside. And it gives up root's capabilities, by which it would.
LIMITED = f"""
import ctypes, os, resource, sys
if sys.platform == "linux":
    libc = ctypes.CDLL(None)
    libc.prctl(38, 1, 0, 0, 0)
    libc.syscall(446, libc.syscall(444, (ctypes.c_uint64 * 1)(1 << 6), ctypes.c_size_t(8), 0), 0)
    libc.capset((ctypes.c_uint32 * 2)(0x20080522), (ctypes.c_uint32 * 6)())
for limit, most in ((resource.RLIMIT_AS, {MEMORY_BYTES}), (resource.RLIMIT_FSIZE, {FILE_BYTES}), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(limit, (most, most))
nonce, _, program = sys.stdin.read().partition("\\n")
exec(compile(program, "program", "exec"), {{"__name__": "program"}})
os.write(int(sys.argv[1]), nonce.encode())
"""


def add_quality(
    report: dict[str, Any],
    records: Sequence[PromptRecord],
    suite: Suite,
    *,
    special_tokens: Sequence[str],
    run_code: bool,
) -> None:
    """Add `quality` to a report that is not yet judged: by metric both scores and their paired difference; a finding where the scores
    differ; and reasons for what is absent.

    The answers are those of the report's main configuration. special_tokens: the tokenizer's, not part of an answer. run_code: run the
    programs of rows with a `test`.
    """
    main, seed = records_of(report["results"][0], records), report["settings"]["seed"]
    rows = {row.id: row for row in suite.rows}
    report["quality"], absent = {}, report["not_measured"]
    for name in METRICS:
        every = (
            (rows[record.id], record, _reference(name, suite, rows[record.id], record))
            for record in main
        )
        chosen = [
            (row, record, reference) for row, record, reference in every if reference is not None
        ]
        if not chosen:
            absent[f"quality.{name}"] = f"suite {suite.name} has nothing to score by it"
            continue
        if any(record.baseline_text is None for _, record, _ in chosen):
            absent[f"quality.{name}"] = "there are no answers without the draft to compare with"
            continue
        if name == "pass_rate" and not run_code:
            absent[f"quality.{name}"] = "programs are run only with eval.run_code=true"
            continue
        metric = evaluate.load(str(ANSWERS), name, keep_in_memory=True)
        references = [reference for _, _, reference in chosen]
        with_draft, without_draft = (
            metric.compute(
                predictions=[
                    _answer(name, row, record, getattr(record, side), special_tokens)
                    for row, record, _ in chosen
                ],
                references=references,
            )["outcomes"]
            for side in ("text", "baseline_text")
        )
        clusters = [record.cluster or record.id for _, record, _ in chosen]
        entry = report["quality"][name] = paired(with_draft, without_draft, clusters, seed=seed)
        low, high = entry.get("difference_ci95", (0.0, 0.0))
        if low > 0 or high < 0:
            scores = (
                f"{entry['with_draft']:.1%} with the draft and {entry['without_draft']:.1%} without"
            )
            message = f"Answers score {scores} by {name}: chance does not explain the difference."
            report["findings"].append({"name": "quality", "message": message})


def paired(
    with_draft: Sequence[bool], without_draft: Sequence[bool], clusters: Sequence[str], *, seed: int
) -> dict[str, Any]:
    """Share of prompts that succeed on each side, and their difference with its interval (bootstrap over clusters).

    p_value: McNemar's exact test on the prompts that succeed on one side only, as if drawn one by one; 1 when there are none.
    """
    ours, theirs = np.array(with_draft, dtype=np.float64), np.array(without_draft, dtype=np.float64)
    only_ours, only_theirs = int((ours > theirs).sum()), int((ours < theirs).sum())
    columns = {"with_draft": ours, "without_draft": theirs, "num_prompts": np.ones(len(ours))}
    columns["cluster"] = np.unique(clusters, return_inverse=True)[1].astype(np.float64)
    ends = interval(DIFFERENCE, columns, seed=seed)
    return {
        "num_prompts": len(ours),
        "with_draft": float(ours.mean()),
        "without_draft": float(theirs.mean()),
        "difference": float((ours - theirs).mean()),
        **({"difference_ci95": list(ends)} if ends else {}),
        "only_with_draft": only_ours,
        "only_without_draft": only_theirs,
        "p_value": float(stats.binomtest(only_ours, only_ours + only_theirs).pvalue)
        if only_ours + only_theirs
        else 1.0,
    }


def _reference(name: str, suite: Suite, row: SuiteRow, record: PromptRecord) -> str | None:
    """What a metric scores an answer by; None where it does not apply. Only continuations of Python are checked for syntax."""
    if name == "python_syntax":
        beginning = (
            "" if row.kind == "messages" else record.prompt
        )  # the text that the answer continues
        return beginning if suite.quality == name and is_python_so_far(beginning) else None
    return row.reference if name == "exact_match" else row.test


def _answer(
    name: str, row: SuiteRow, record: PromptRecord, text: str, special_tokens: Sequence[str]
) -> str:
    plain = re.sub("|".join(map(re.escape, special_tokens)), "", text) if special_tokens else text
    return (
        program(None if row.kind == "messages" else record.prompt, plain)
        if name == "pass_rate"
        else plain
    )


def is_match(text: str, reference: str) -> bool:
    """Whether a text's answer is the reference's, as GSM8K scores: the first number after `####`, or else the last of the text.

    A reference without a number is compared as a whole, ignoring case and white space.
    """
    answer = _number(reference)
    if answer is None:
        return text.casefold().split() == reference.casefold().split()
    return _number(text) == answer


def _number(text: str) -> Decimal | None:
    marked, numbers = NUMBER.findall(text.partition("####")[2]), NUMBER.findall(text)
    answer = marked[0] if marked else numbers[-1] if numbers else None
    return Decimal(answer.replace(",", "")) if answer else None


def is_python_so_far(source: str) -> bool:
    """Whether a source has no syntax error. It may begin inside a block and end anywhere, also within a line. Nothing is run."""
    first = next((line for line in source.splitlines() if line.strip()), "")
    indent = len(first) - len(first.lstrip())
    blocks = "".join(
        f"{' ' * level}def _():\n" for level in range(0, indent, INDENT)
    )  # around the first line
    source = blocks + source
    return _compiles(source) or _compiles(source.rpartition("\n")[0])


def _compiles(source: str) -> bool:
    """Whether a source is valid Python, or the beginning of valid Python."""
    try:
        codeop.compile_command(source, "<text>", "exec")
    except (
        SyntaxError,
        ValueError,
        OverflowError,
        RecursionError,
        MemoryError,
    ):  # all that compiling can raise
        return False
    return True


def program(prompt: str | None, text: str) -> str:
    """The program in a text: the rest of the indented block that `prompt` began, or, without a prompt, the first fenced code."""
    if prompt is None:
        fenced = FENCED.search(text)
        return fenced[1] if fenced else text
    first, *lines = text.split("\n")
    end = next((number for number, line in enumerate(lines) if line[:1].strip()), len(lines))
    return "\n".join([prompt + first, *lines[:end]])


def passes(program: str, seconds: float = SECONDS) -> bool:
    """Whether a program runs to its last line, in time and without an error. Its child processes are ended with it."""
    if (
        sys.platform == "linux"
    ):  # PR_SET_DUMPABLE, for kernels without Landlock; it stays, as what a program has started may
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    nonce, (reading, writing) = secrets.token_hex(16), os.pipe()
    os.set_blocking(reading, False)
    with (
        tempfile.TemporaryDirectory() as folder,
        open(reading, "rb") as verdict,
        open(writing, "wb"),
    ):
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", LIMITED, str(writing)],
            pass_fds=[writing],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath},
            start_new_session=True,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        try:
            child.communicate(f"{nonce}\n{program}", timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):  # it has ended already
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return verdict.read() == nonce.encode()


# What tells whether a text is right by its reference: an answer, the code of a test, or the source that the text continues.
METRICS: dict[str, Callable[[str, str], bool]] = {
    "exact_match": is_match,
    "pass_rate": lambda text, test: passes(f"{text}\n{test}\n"),
    "python_syntax": lambda text, source: is_python_so_far(source + text),
}


class Answers(evaluate.Metric):  # type: ignore[misc]
    """Of texts, the share that is right by their references, under the name of a metric, and `outcomes`, one by one."""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features(
            dict.fromkeys(("predictions", "references"), datasets.Value("string"))
        )
        return evaluate.MetricInfo(
            "The share of texts that are right by their references.", "", features
        )

    def _compute(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
        outcomes = list(map(METRICS[self.config_name], predictions, references))
        return {self.config_name: sum(outcomes) / len(outcomes), "outcomes": outcomes}
