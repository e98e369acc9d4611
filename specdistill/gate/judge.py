"""A report with its gate decided, and what changed since a baseline report, paired prompt by prompt.

A gate's `max_regression` rules decide on such changes; the `baseline` section shows them to a reader, whatever the rules ask.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from specdistill.errors import UserError
from specdistill.gate.decide import Evidence, decide, find_row, regression
from specdistill.gate.rules import Rule
from specdistill.report.results import main_rows
from specdistill.statistics.metrics import METRICS
from specdistill.statistics.records import ALL

METRICS_SHOWN = ("mean_acceptance_length", "acceptance_rate", "speedup", "tokens_per_second", "draft_ms", "verify_ms")
METRIC_BY_CATEGORY = "mean_acceptance_length"


def judge(rules: Sequence[Rule], evidence: Evidence, baseline: Evidence | None = None) -> dict[str, Any]:
    """The report with its gate decided and, where there is a baseline, what changed since. Raises as `decide`."""
    report = {name: part for name, part in evidence.report.items() if name != "baseline"}
    if baseline is not None:
        report["baseline"] = changes(evidence, baseline)
    return {**report, "gate": decide(rules, evidence, baseline)}


def changes(evidence: Evidence, baseline: Evidence) -> dict[str, Any]:
    """The report's `baseline` section. A baseline that measured something else has no changes, and a `reason`."""
    old = baseline.report
    section = {
        **{name: old[name] for name in ("created", "git_revision") if name in old},
        "draft": {name: old["draft"].get(name) for name in ("model", "revision", "method")},
        "changes": [],
    }
    categories = [row["category"] for row in main_rows(evidence.report) if row["category"] != ALL]
    asked = [(metric, ALL) for metric in METRICS_SHOWN] + [(METRIC_BY_CATEGORY, category) for category in categories]
    try:
        return {**section, "changes": [_change(metric, category, evidence, baseline) for metric, category in asked]}
    except UserError as error:  # the report is shown all the same, with the reason
        return {**section, "reason": str(error)}


def _change(metric: str, category: str, evidence: Evidence, baseline: Evidence) -> dict[str, Any]:
    """Old and new value, the relative change (new / old - 1) and its interval, or the `reason` why one is absent."""
    scope = {"category": category}
    values = {}
    for name, side in (("old", baseline), ("new", evidence)):
        row: Mapping[str, Any] | None = find_row(side.report, scope)
        if row is not None and metric in row:
            values[name] = row[metric]
    change = {"metric": metric, "category": category, "better": METRICS[metric].better, **values}
    if len(values) < 2:
        lacking = "both" if not values else "the report" if "old" in values else "the baseline"
        return {**change, "reason": f"not measured in {lacking}"}
    estimate = regression(Rule(metric, "max_regression", 0.0, scope), evidence, baseline)
    if estimate.value is not None:
        change["change"] = estimate.value
    if estimate.interval is not None:
        change["ci95"] = list(estimate.interval)
    return {**change, "reason": estimate.reason} if estimate.reason else change
