"""Compare the quality of answers with the draft and without it, paired by prompt.

Speculative decoding must not change what the target generates. So greedy answers score the same
with the draft and without. Sampled answers differ by chance, and the expected difference of their
scores is 0.

Rows of a suite that have a `reference` are scored by exact match. If the suite's header names a
metric (`quality`), all rows to which it applies are scored by that as well. No answer is executed.
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

# The difference between the shares of prompts that succeed with the draft and without it.
DIFFERENCE = Metric(
    ("with_draft", "without_draft", "num_prompts"),
    lambda ours, theirs, number: (ours - theirs) / number,
)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")  # with commas between thousands, as in -1,234.5
INDENT = 4  # spaces of one level of Python


def add_quality(
    report: Report,
    records: Sequence[PromptRecord],
    suite: Suite,
    *,
    special_tokens: Sequence[str],
) -> None:
    """Score the answers with and without the draft, and add the section `quality` to the report.

    For each metric, `quality` holds the score with the draft, the score without it and their
    difference, paired by prompt. If the scores differ significantly, the report gets a finding. If
    a metric cannot be computed, the report's `not_measured` gets the reason.

    Args:
        report: the report, which is changed in place. No gate has judged it yet.
        records: the records of the report. Only the main configuration is scored.
        suite: the suite that was measured, which has the reference answers.
        special_tokens: the tokenizer's special tokens, which are removed from answers.
    """
    # The first row of results is that of the main configuration, over all prompts of the suite.
    main_records = select_records(report["results"][0], records)
    rows = {row.id: row for row in suite.rows}
    not_measured = report["not_measured"]
    report["quality"] = {}
    for name in METRICS:
        # Select the answers to which this metric applies, with the reference of each.
        scored: list[tuple[PromptRecord, str]] = []
        for record in main_records:
            reference = _find_reference(name, suite, rows[record.id], record)
            if reference is not None:
                scored.append((record, reference))
        if not scored:
            not_measured[f"quality.{name}"] = f"suite {suite.name} has no prompts to score by it"
            continue
        if any(record.baseline_text is None for record, _ in scored):
            not_measured[f"quality.{name}"] = (
                "there are no answers without the draft to compare with"
            )
            continue

        # Score both answers of each prompt with a metric of the library `evaluate`.
        metric = evaluate.load(str(ANSWERS), name, keep_in_memory=True)
        references = [reference for _, reference in scored]
        answers = [_remove_tokens(record.text, special_tokens) for record, _ in scored]
        baseline_answers = [
            _remove_tokens(record.baseline_text or "", special_tokens) for record, _ in scored
        ]
        with_draft = metric.compute(predictions=answers, references=references)
        without_draft = metric.compute(predictions=baseline_answers, references=references)

        # Compare the scores. Prompts of one cluster, e.g. the turns of a conversation, are
        # resampled together.
        entry = report["quality"][name] = compare_shares(
            with_draft["outcomes"],
            without_draft["outcomes"],
            [record.cluster or record.id for record, _ in scored],
            seed=report["settings"]["seed"],
        )

        # Report a difference as a finding if its interval excludes 0.
        low, high = entry.get("difference_ci95", (0.0, 0.0))
        if low > 0 or high < 0:
            message = (
                f"Answers score {entry['with_draft']:.1%} with the draft and"
                f" {entry['without_draft']:.1%} without it, by {name}: chance does not explain"
                " the difference."
            )
            report["findings"].append({"name": "quality", "message": message})


def compare_shares(
    with_draft: Sequence[bool], without_draft: Sequence[bool], clusters: Sequence[str], *, seed: int
) -> dict[str, Any]:
    """Compare how many prompts are answered correctly with the draft and without it.

    The confidence interval of the difference comes from a bootstrap over clusters. `p_value` comes
    from McNemar's exact test, which looks only at prompts whose answer is correct in one of the two
    cases but not in the other, and takes prompts as independent. It is 1 if there are no such
    prompts.

    Args:
        with_draft: whether each prompt's answer with the draft is correct.
        without_draft: whether each prompt's answer without the draft is correct.
        clusters: the cluster of each prompt. Prompts of one cluster, e.g. the turns of a
            conversation, are resampled together.
        seed: the seed of the bootstrap.

    Returns:
        The metric's entry in the report's `quality`. The key `difference_ci95` is missing if there
        is no interval.
    """
    # Count the prompts that are answered correctly only with the draft, and only without it.
    ours = np.array(with_draft, dtype=np.float64)
    theirs = np.array(without_draft, dtype=np.float64)
    only_ours = int((ours > theirs).sum())
    only_theirs = int((ours < theirs).sum())

    # Compute the interval. The bootstrap takes numbers, so clusters are numbered: `return_inverse`
    # gives the number of each prompt's cluster.
    columns = {"with_draft": ours, "without_draft": theirs, "num_prompts": np.ones(len(ours))}
    columns["cluster"] = np.unique(clusters, return_inverse=True)[1].astype(np.float64)
    interval = compute_interval(DIFFERENCE, columns, seed=seed)

    # Test whether `only_ours` and `only_theirs` differ more than by chance (McNemar). By chance
    # alone, a prompt that is counted in one of them is equally likely to be in the other.
    num_differing = only_ours + only_theirs
    p_value = stats.binomtest(only_ours, num_differing).pvalue if num_differing else 1.0
    return {
        "num_prompts": len(ours),
        "with_draft": float(ours.mean()),
        "without_draft": float(theirs.mean()),
        "difference": float((ours - theirs).mean()),
        **({"difference_ci95": list(interval)} if interval else {}),
        "only_with_draft": only_ours,
        "only_without_draft": only_theirs,
        "p_value": float(p_value),
    }


def _find_reference(name: str, suite: Suite, row: SuiteRow, record: PromptRecord) -> str | None:
    """Return the text that a metric compares an answer with.

    Args:
        name: the metric. `python_syntax` needs the Python source that the answer continues. Any
            other metric needs the reference answer of the row.
        suite: the suite. `python_syntax` only applies if the suite's key `quality` names it.
        row: the row of the suite with the prompt.
        record: the record of the prompt.

    Returns:
        The text; None if the metric does not apply to this row.
    """
    if name == "python_syntax":
        # The answer to a text prompt continues the prompt, and is checked together with it. So the
        # prompt must itself be Python source. The answer to a conversation starts a text of its
        # own, so nothing ("") comes before it.
        beginning = "" if row.kind == "messages" else record.prompt
        return beginning if suite.quality == name and is_python_so_far(beginning) else None
    return row.reference


def _remove_tokens(text: str, special_tokens: Sequence[str]) -> str:
    """Remove special tokens, such as the end of the turn, from the text of an answer."""
    if not special_tokens:
        return text
    return re.sub("|".join(map(re.escape, special_tokens)), "", text)


def is_match(text: str, reference: str) -> bool:
    """Return whether a generated text gives the same answer as a reference, as GSM8K scores it.

    The answer of a text is the first number after `####`, or else the last number in the text. If
    the reference has no number, both texts are compared word for word, ignoring case and white
    space.
    """
    answer = _parse_number(reference)
    if answer is None:
        return text.casefold().split() == reference.casefold().split()
    return _parse_number(text) == answer


def _parse_number(text: str) -> Decimal | None:
    """Return the number that a text gives as its answer; None for a text without a number.

    It is the first number after `####`, or else the last number in the text.
    """
    # The text after `####` is the third part; it is empty if the text has no `####`.
    numbers = NUMBER.findall(text)
    marked_numbers = NUMBER.findall(text.partition("####")[2])
    if marked_numbers:
        answer = marked_numbers[0]
    elif numbers:
        answer = numbers[-1]
    else:
        return None
    return Decimal(answer.replace(",", ""))


def is_python_so_far(source: str) -> bool:
    """Return whether an unfinished piece of Python source has no syntax error.

    The source may begin inside an indented block and end anywhere, also within a line. It is not
    executed.
    """
    # If the first line is indented, put as many nested `def` lines before the source as its
    # indentation needs, so that the source is the body of the innermost function.
    lines = [line for line in source.splitlines() if line.strip()]
    first_line = lines[0] if lines else ""
    indent = len(first_line) - len(first_line.lstrip())
    blocks = "".join(f"{' ' * level}def _():\n" for level in range(0, indent, INDENT))
    source = blocks + source

    # The last line may be cut off, so also try the source without its last line.
    return _is_valid_python(source) or _is_valid_python(source.rpartition("\n")[0])


def _is_valid_python(source: str) -> bool:
    """Return whether a source is valid Python, or the beginning of valid Python."""
    # `compile_command` raises for an error, and returns None for source that is not yet complete.
    try:
        codeop.compile_command(source, "<text>", "exec")
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return False
    return True


# The name of each metric -> a function (text, reference) that returns whether the text is right.
# The reference is an answer, or the source that the text continues.
METRICS: dict[str, Callable[[str, str], bool]] = {
    "exact_match": is_match,
    "python_syntax": lambda text, source: is_python_so_far(source + text),
}


class Answers(evaluate.Metric):  # type: ignore[misc]
    """A metric of the library `evaluate`: the share of texts that match their references.

    Its config name is the name of a metric in METRICS. `compute` returns the share under that name,
    and under `outcomes` whether each text is right.
    """

    def _info(self) -> evaluate.MetricInfo:
        """Return the description of the metric that `evaluate` requires: its inputs are strings."""
        features = datasets.Features(
            dict.fromkeys(("predictions", "references"), datasets.Value("string"))
        )
        return evaluate.MetricInfo(
            "The share of texts that are right by their references.", "", features
        )

    def _compute(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, object]:
        """Return the share of texts that are right, and under `outcomes` whether each is right."""
        is_right = METRICS[self.config_name]
        outcomes = list(map(is_right, predictions, references))
        return {self.config_name: sum(outcomes) / len(outcomes), "outcomes": outcomes}
