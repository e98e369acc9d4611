"""Compare the quality of answers with the draft and without it, paired by prompt.

Speculative decoding must not change what the target generates, so greedy answers score the same.
Sampled answers differ by chance, and the difference of their scores must be about 0. Rows with a
`reference` are scored by exact match. If the suite's header names a metric (`quality`), all rows
are scored by it. No answer is executed.
"""

import codeop
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import datasets
import evaluate
import numpy as np
from scipy import stats

from specdistill.common.project import ANSWERS
from specdistill.evaluation.report.phrases import Report
from specdistill.evaluation.statistics.intervals import compute_interval
from specdistill.evaluation.statistics.metrics import Metric
from specdistill.evaluation.statistics.records import PromptRecord, select_records
from specdistill.evaluation.suites.suite import Suite, SuiteRow

DIFFERENCE = Metric(
    ("with_draft", "without_draft", "num_prompts"),
    lambda ours, theirs, number: (ours - theirs) / number,
)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
INDENT = 4  # spaces of one level of Python


def add_quality(
    report: Report,
    records: Sequence[PromptRecord],
    suite: Suite,
    *,
    special_tokens: Sequence[str],
) -> None:
    """Add `quality` to a report that no gate has judged yet.

    For each metric it holds both scores and their paired difference. A metric whose scores differ
    significantly adds a finding, and a metric that is absent adds the reason. The answers are those
    of the report's main configuration.

    Args:
        report: the report, which is changed.
        records: the records of the report.
        suite: the suite that was measured.
        special_tokens: the tokenizer's special tokens, which are removed from answers.
    """
    main = select_records(report["results"][0], records)
    seed = report["settings"]["seed"]
    rows = {row.id: row for row in suite.rows}
    report["quality"], absent = {}, report["not_measured"]
    for name in METRICS:
        # Choose the answers to which this metric applies, with what each is compared with.
        every = (
            (rows[record.id], record, _find_reference(name, suite, rows[record.id], record))
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
        # Score both answers of each prompt.
        metric = evaluate.load(str(ANSWERS), name, keep_in_memory=True)
        references = [reference for _, _, reference in chosen]
        answers = [_answer(record.text, special_tokens) for _, record, _ in chosen]
        baseline_answers = [
            _answer(record.baseline_text or "", special_tokens) for _, record, _ in chosen
        ]
        with_draft = metric.compute(predictions=answers, references=references)["outcomes"]
        without_draft = metric.compute(predictions=baseline_answers, references=references)[
            "outcomes"
        ]
        clusters = [record.cluster or record.id for _, record, _ in chosen]
        entry = report["quality"][name] = compare_shares(
            with_draft, without_draft, clusters, seed=seed
        )
        # A difference is a finding if its interval excludes 0.
        low, high = entry.get("difference_ci95", (0.0, 0.0))
        if low > 0 or high < 0:
            message = (
                f"Answers score {entry['with_draft']:.1%} with the draft and"
                f" {entry['without_draft']:.1%} without by {name}: chance does not explain the"
                " difference."
            )
            report["findings"].append({"name": "quality", "message": message})


def compare_shares(
    with_draft: Sequence[bool], without_draft: Sequence[bool], clusters: Sequence[str], *, seed: int
) -> dict[str, Any]:
    """Compare the shares of prompts that succeed with the draft and without it.

    The confidence interval of the difference comes from a bootstrap over clusters. `p_value` is
    that of McNemar's exact test on the prompts that succeed on one side only, which takes prompts
    as independent; it is 1 when there are no such prompts.

    Args:
        with_draft: whether each prompt's answer with the draft is right.
        without_draft: whether each prompt's answer without the draft is right.
        clusters: the cluster of each prompt.
        seed: of the bootstrap.

    Returns:
        The metric's entry in the report's `quality`; without `difference_ci95` where there is no
        interval.
    """
    ours = np.array(with_draft, dtype=np.float64)
    theirs = np.array(without_draft, dtype=np.float64)
    only_ours = int((ours > theirs).sum())
    only_theirs = int((ours < theirs).sum())
    columns = {"with_draft": ours, "without_draft": theirs, "num_prompts": np.ones(len(ours))}
    columns["cluster"] = np.unique(clusters, return_inverse=True)[1].astype(np.float64)
    ends = compute_interval(DIFFERENCE, columns, seed=seed)
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


def _find_reference(name: str, suite: Suite, row: SuiteRow, record: PromptRecord) -> str | None:
    """Return what a metric compares an answer with, or None where the metric does not apply.

    Only continuations of Python are checked for syntax.
    """
    if name == "python_syntax":
        # The text that the answer continues; the answer to a conversation continues none.
        beginning = "" if row.kind == "messages" else record.prompt
        return beginning if suite.quality == name and is_python_so_far(beginning) else None
    return row.reference


def _answer(text: str, special_tokens: Sequence[str]) -> str:
    """Return a text without special tokens."""
    return re.sub("|".join(map(re.escape, special_tokens)), "", text) if special_tokens else text


def is_match(text: str, reference: str) -> bool:
    """Return whether a text's answer equals that of the reference, as GSM8K scores it.

    The answer of a text is the first number after `####`, or else the last number of the text. A
    reference without a number is compared as a whole, ignoring case and white space.
    """
    answer = _parse_number(reference)
    if answer is None:
        return text.casefold().split() == reference.casefold().split()
    return _parse_number(text) == answer


def _parse_number(text: str) -> Decimal | None:
    """Return the number that is a text's answer, as in `is_match`; None for a text without one."""
    marked, numbers = NUMBER.findall(text.partition("####")[2]), NUMBER.findall(text)
    answer = marked[0] if marked else numbers[-1] if numbers else None
    return Decimal(answer.replace(",", "")) if answer else None


def is_python_so_far(source: str) -> bool:
    """Return whether Python source has no syntax error so far.

    It may begin inside a block and end anywhere, also within a line. Nothing is executed.
    """
    first = next((line for line in source.splitlines() if line.strip()), "")
    indent = len(first) - len(first.lstrip())
    # Functions around a first line that is indented, so that the source begins at level 0.
    blocks = "".join(f"{' ' * level}def _():\n" for level in range(0, indent, INDENT))
    source = blocks + source
    return _is_valid_python(source) or _is_valid_python(source.rpartition("\n")[0])


def _is_valid_python(source: str) -> bool:
    """Return whether a source is valid Python, or the beginning of valid Python."""
    try:
        codeop.compile_command(source, "<text>", "exec")
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        # These are all exceptions that compiling can raise.
        return False
    return True


# Each metric takes a text and its reference, and returns whether the text is right. The reference
# is an answer, or the source that the text continues.
METRICS: dict[str, Callable[[str, str], bool]] = {
    "exact_match": is_match,
    "python_syntax": lambda text, source: is_python_so_far(source + text),
}


class Answers(evaluate.Metric):  # type: ignore[misc]
    """A metric of `evaluate`: the share of texts that are right by their references.

    `compute` returns the share under the name of the metric in METRICS, and under `outcomes`
    whether each text is right.
    """

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features(
            dict.fromkeys(("predictions", "references"), datasets.Value("string"))
        )
        return evaluate.MetricInfo(
            "The share of texts that are right by their references.", "", features
        )

    def _compute(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, object]:
        outcomes = list(map(METRICS[self.config_name], predictions, references))
        return {self.config_name: sum(outcomes) / len(outcomes), "outcomes": outcomes}
