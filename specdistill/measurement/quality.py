"""Answer quality with the draft and without it: task metrics of both, paired by prompt.

Speculation must not change what the target generates, so greedy answers score the same; sampled answers differ by chance, and the
difference of their scores must be about 0. Rows with a `reference` are scored by exact match, rows with a `test` by running the
program, and all rows by the metric that the suite's header names (`quality`).
"""

import re
from collections.abc import Sequence
from typing import Any

import evaluate
import numpy as np
from scipy import stats

from specdistill.measurement import answers
from specdistill.project import METRICS as METRIC_MODULES
from specdistill.statistics.intervals import interval
from specdistill.statistics.metrics import Metric
from specdistill.statistics.records import PromptRecord, records_of
from specdistill.suites.suite import Suite, SuiteRow

METRICS = ("exact_match", "pass_rate", "python_syntax")  # modules under eval/metrics
DIFFERENCE = Metric(("with_draft", "without_draft", "num_prompts"), lambda ours, theirs, number: (ours - theirs) / number)


def add_quality(
    report: dict[str, Any], records: Sequence[PromptRecord], suite: Suite, *, special_tokens: Sequence[str], run_code: bool
) -> None:
    """Add `quality` to a report that is not yet judged, a finding where the scores differ, and reasons for what is absent.

    The answers are those of the report's main configuration. special_tokens: the tokenizer's, not part of an answer. run_code: run the
    programs of rows with a `test`.
    """
    main, seed = records_of(report["results"][0], records), report["settings"]["seed"]
    report["quality"], absent = compare_quality(suite, main, special_tokens=special_tokens, run_code=run_code, seed=seed)
    report["not_measured"] |= absent
    for name, entry in report["quality"].items():
        low, high = entry.get("difference_ci95", (0.0, 0.0))
        if low > 0 or high < 0:
            scores = f"{entry['with_draft']:.1%} with the draft and {entry['without_draft']:.1%} without"
            message = f"Answers score {scores} by {name}: chance does not explain the difference."
            report["findings"].append({"name": "quality", "message": message})


def compare_quality(
    suite: Suite, records: Sequence[PromptRecord], *, special_tokens: Sequence[str], run_code: bool, seed: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """(metric -> both scores and their paired difference, `quality.metric` -> why it is absent)."""
    rows = {row.id: row for row in suite.rows}
    scored, absent = {}, {}
    for name in METRICS:
        every = ((rows[record.id], record, _reference(name, suite, rows[record.id], record)) for record in records)
        chosen = [(row, record, reference) for row, record, reference in every if reference is not None]
        if not chosen:
            absent[f"quality.{name}"] = f"suite {suite.name} has nothing to score by it"
        elif any(record.baseline_text is None for _, record, _ in chosen):
            absent[f"quality.{name}"] = "there are no answers without the draft to compare with"
        elif name == "pass_rate" and not run_code:
            absent[f"quality.{name}"] = "programs are run only with eval.run_code=true"
        else:
            metric = evaluate.load(str(METRIC_MODULES / name), keep_in_memory=True)
            references = [reference for _, _, reference in chosen]
            with_draft, without_draft = (
                metric.compute(
                    predictions=[
                        _answer(name, row, record, getattr(record, side), special_tokens) for row, record, _ in chosen
                    ],
                    references=references,
                )["outcomes"]
                for side in ("text", "baseline_text")
            )
            scored[name] = paired(with_draft, without_draft, seed=seed)
    return scored, absent


def paired(with_draft: Sequence[bool], without_draft: Sequence[bool], *, seed: int) -> dict[str, Any]:
    """Share of prompts that succeed on each side, and their difference with its interval (bootstrap over prompts).

    p_value: McNemar's exact test on the prompts that succeed on one side only; 1 when there are none.
    """
    ours, theirs = np.array(with_draft, dtype=np.float64), np.array(without_draft, dtype=np.float64)
    only_ours, only_theirs = int((ours > theirs).sum()), int((ours < theirs).sum())
    columns = {"with_draft": ours, "without_draft": theirs, "num_prompts": np.ones(len(ours))}
    ends = interval(DIFFERENCE, columns, seed=seed)
    return {
        "num_prompts": len(ours),
        "with_draft": float(ours.mean()),
        "without_draft": float(theirs.mean()),
        "difference": float((ours - theirs).mean()),
        **({"difference_ci95": list(ends)} if ends else {}),
        "only_with_draft": only_ours,
        "only_without_draft": only_theirs,
        "p_value": float(stats.binomtest(only_ours, only_ours + only_theirs).pvalue) if only_ours + only_theirs else 1.0,
    }


def _reference(name: str, suite: Suite, row: SuiteRow, record: PromptRecord) -> str | None:
    """What a metric scores an answer by; None where it does not apply. Only continuations of Python are checked for syntax."""
    if name == "python_syntax":
        beginning = "" if row.kind == "messages" else record.prompt  # the text that the answer continues
        return beginning if suite.quality == name and answers.is_python_so_far(beginning) else None
    return row.reference if name == "exact_match" else row.test


def _answer(name: str, row: SuiteRow, record: PromptRecord, text: str, special_tokens: Sequence[str]) -> str:
    plain = re.sub("|".join(map(re.escape, special_tokens)), "", text) if special_tokens else text
    return answers.program(None if row.kind == "messages" else record.prompt, plain) if name == "pass_rate" else plain
