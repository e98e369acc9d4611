"""What changed since an earlier report: old and new of the numbers a reader asks for first, paired prompt by prompt.

A gate's `max_regression` rules decide on such changes; this is for the reader of the report, whatever the rules ask.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from specdistill.errors import UserError
from specdistill.gate.gate import Evidence, Rule, decide, find_row, regression
from specdistill.report.rows import main_rows
from specdistill.statistics.configuration import ALL
from specdistill.statistics.metrics import METRICS

SHOWN = ("mean_acceptance_length", "acceptance_rate", "speedup", "tokens_per_second", "draft_ms", "verify_ms")
BY_CATEGORY = "mean_acceptance_length"


def judge(rules: Sequence[Rule], evidence: Evidence, baseline: Evidence | None = None) -> dict[str, Any]:
    """The report with its gate decided and, where there is a baseline, what changed since. Raises as `gate.decide`."""
    report = {name: part for name, part in evidence.report.items() if name != "baseline"}
    since = {} if baseline is None else {"baseline": changes(evidence, baseline)}
    return {**report, **since, "gate": decide(rules, evidence, baseline)}


def changes(evidence: Evidence, baseline: Evidence) -> dict[str, Any]:
    """The report's `baseline` section. A baseline that measured something else has no changes, and says what that is."""
    old = baseline.report
    section = {
        "created": old["created"],
        **{name: old[name] for name in ("git_revision",) if name in old},
        "draft": {name: old["draft"].get(name) for name in ("model", "revision", "method")},
        "changes": [],
    }
    categories = [row["category"] for row in main_rows(evidence.report) if row["category"] != ALL]
    asked = [(metric, ALL) for metric in SHOWN] + [(BY_CATEGORY, category) for category in categories]
    try:
        return {**section, "changes": [_change(metric, category, evidence, baseline) for metric, category in asked]}
    except UserError as error:  # the report is shown all the same, beside the reason
        return {**section, "reason": str(error)}


def _change(metric: str, category: str, evidence: Evidence, baseline: Evidence) -> dict[str, Any]:
    """Old and new value, the relative change (new / old - 1) and its interval; what is absent is so for `reason`."""
    scope = {"category": category}
    values = {}
    for name, side in (("old", baseline), ("new", evidence)):
        row: Mapping[str, Any] | None = find_row(side.report, scope)
        if row is not None and metric in row:
            values[name] = row[metric]
    entry = {"metric": metric, "category": category, "better": METRICS[metric].better, **values}
    if len(values) < 2:
        return {
            **entry,
            "reason": f"not measured in {'both' if not values else 'the report' if 'old' in values else 'the baseline'}",
        }
    found = regression(Rule(metric, "max_regression", 0.0, scope), evidence, baseline)
    if found.value is not None:
        entry["change"] = found.value
    if found.ends is not None:
        entry["ci95"] = list(found.ends)
    return {**entry, "reason": found.reason} if found.reason else entry
