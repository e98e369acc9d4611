"""The gate's decision, from a report and its records alone.

A number with an interval passes only if the interval's bound on the side of the requirement does: the lower bound for `min`, the upper
one for `max`. Missing evidence fails, and so does a run that was cut short.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdistill.errors import UserError
from specdistill.gate.rules import DEFAULT_CONFIDENCE, SCOPES, Rule
from specdistill.report.schema import row_metrics
from specdistill.statistics.intervals import Interval, interval, relative_change
from specdistill.statistics.metrics import METRICS, prompt_sums
from specdistill.statistics.records import PromptRecord, records_of
from specdistill.statistics.sample_size import corrected_confidence

# Settings that change what is accepted or timed: two measurements share them, beside the row's configuration, or are not compared.
SHARED_SETTINGS = ("top_p", "top_k", "max_new_tokens")
NUM_IDS_SHOWN = 3


@dataclass(frozen=True)
class Evidence:
    """A report and the records it was made from."""

    report: Mapping[str, Any]
    records: Sequence[PromptRecord]


@dataclass(frozen=True)
class Estimate:
    """A rule's metric in the evidence: its value and interval, or the reason why there is none.

    num_prompts: compared, for a regression.
    """

    value: Any = None
    interval: Interval | None = None
    reason: str | None = None
    num_prompts: int | None = None


def decide(rules: Sequence[Rule], evidence: Evidence, baseline: Evidence | None = None) -> dict[str, Any]:
    """The report's `gate` section. Raises UserError when a `max_regression` rule meets a baseline that measured something else.

    The report of a run that was cut short gets one failed rule more, `incomplete`.
    """
    results = [_decide(rule, evidence, baseline) for rule in rules]
    if evidence.report.get("incomplete"):
        reason = evidence.report["not_measured"].get("incomplete", "what it left out could say otherwise")
        cut_short = Rule("incomplete", "equals", False)
        results.insert(0, _result(cut_short, Estimate(True), False, f"the run was cut short: {reason}"))
    return {"passed": all(result["passed"] or result["severity"] == "warn" for result in results), "rules": results}


def _decide(rule: Rule, evidence: Evidence, baseline: Evidence | None) -> dict[str, Any]:
    if rule.requirement == "max_regression":
        estimate = regression(rule, evidence, baseline)
    elif rule.metric in row_metrics():
        estimate = _row_metric(rule, evidence)
    else:
        estimate = _document_metric(rule, evidence.report)
    passed, reason = (False, f"no evidence: {estimate.reason}") if estimate.reason else holds(rule, estimate)
    return _result(rule, estimate, passed, reason)


def _result(rule: Rule, estimate: Estimate, passed: bool, reason: str) -> dict[str, Any]:
    return {
        "metric": rule.metric,
        "scope": dict(rule.scope),
        "requirement": {rule.requirement: rule.threshold},
        "confidence": rule.confidence,
        "severity": rule.severity,
        "value": estimate.value,
        "ci95": list(estimate.interval) if estimate.interval and rule.confidence == DEFAULT_CONFIDENCE else None,
        "passed": passed,
        "reason": reason,
    }


def find_row(report: Mapping[str, Any], scope: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The first row in a scope; without a category or context bucket in it, the whole suite's (`all`)."""
    wanted = {"category": "all", "context_bucket": "all", **scope}
    return next((row for row in report["results"] if all(row.get(name) == value for name, value in wanted.items())), None)


def _row_metric(rule: Rule, evidence: Evidence) -> Estimate:
    row = find_row(evidence.report, rule.scope)
    if row is None:
        return Estimate(reason=f"the report has no row for {_scope(rule)}")
    if row.get(rule.metric) is None:
        return Estimate(reason=row["not_measured"].get(rule.metric, "it was not measured"))
    value = row[rule.metric]
    if rule.confidence == 0:
        return Estimate(value)
    if rule.metric not in METRICS or rule.confidence == DEFAULT_CONFIDENCE:
        ci95, why = row.get(f"{rule.metric}_ci95"), row["not_measured"].get(f"{rule.metric}_ci95")
        return Estimate(value, tuple(ci95) if ci95 else None, f"no interval ({why})" if why else None)
    sums, seed = prompt_sums(records_of(row, evidence.records)), evidence.report["settings"]["seed"]
    bounds = interval(METRICS[rule.metric], sums, confidence=_confidence(rule, evidence), seed=seed)
    return Estimate(value, bounds, None if bounds else "too few prompts for an interval")


def _document_metric(rule: Rule, report: Mapping[str, Any]) -> Estimate:
    section: Any = None
    value: Any = report
    for name in rule.metric.split("."):
        section, value = value, value.get(name) if isinstance(value, Mapping) else None
    if value is None:
        reasons = (reason for name, reason in report["not_measured"].items() if rule.metric.startswith(name))
        return Estimate(reason=next(reasons, "it was not measured"))
    ci95 = section.get(f"{name}_ci95")
    if ci95 is None or rule.confidence == 0:
        return Estimate(value)
    if rule.confidence != DEFAULT_CONFIDENCE:
        return Estimate(value, reason=f"its interval is known at {DEFAULT_CONFIDENCE:.0%} only")
    return Estimate(value, tuple(ci95))


def _confidence(rule: Rule, *sides: Evidence) -> float:
    """The rule's, corrected where a run had interim analyses."""
    with_interim_analyses = any(side.report["settings"].get("target_precision") for side in sides)
    return corrected_confidence(rule.confidence) if with_interim_analyses else rule.confidence


def regression(rule: Rule, evidence: Evidence, baseline: Evidence | None) -> Estimate:
    """The paired relative change, metric / baseline's metric - 1. Raises UserError when the two did not measure the same."""
    if baseline is None:
        return Estimate(reason="no baseline report was given")
    for side, name in ((evidence, "the"), (baseline, "the baseline's")):
        if side.report.get("incomplete"):
            return Estimate(reason=f"{name} run was cut short")
    row, old_row = find_row(evidence.report, rule.scope), find_row(baseline.report, rule.scope)
    if row is None or old_row is None:
        return Estimate(reason=f"{'the report' if row is None else 'the baseline'} has no row for {_scope(rule)}")
    for name, measured in (("the report", row), ("the baseline", old_row)):
        if not measured.get(rule.metric):  # a change from 0 has no size
            why = measured["not_measured"].get(rule.metric, f"it is {measured.get(rule.metric, 'absent')}")
            return Estimate(reason=f"not measured in {name}: {why}")
    metric = METRICS[rule.metric]
    place, old_place = _place(evidence.report), _place(baseline.report)
    if metric.is_timed and place != old_place:
        return Estimate(reason=f"timed elsewhere: the report on {place}, the baseline on {old_place}")
    records, old_records = _paired_records(row, old_row, evidence, baseline)
    change, bounds = relative_change(
        metric,
        prompt_sums(records),
        prompt_sums(old_records),
        confidence=_confidence(rule, evidence, baseline),
        seed=evidence.report["settings"]["seed"],
    )
    missing = None if bounds else "too few prompts measured in both reports for an interval"
    return Estimate(change, bounds, missing, len(records))


def _paired_records(
    row: Mapping[str, Any], old_row: Mapping[str, Any], evidence: Evidence, baseline: Evidence
) -> tuple[list[PromptRecord], list[PromptRecord]]:
    """The records of both rows, in the same order of prompts. Raises UserError that names the first difference."""
    report, old = evidence.report, baseline.report
    compared = {
        **{name: (row.get(name), old_row.get(name)) for name in ("suite_version", *SCOPES)},
        **{name: (report["settings"][name], old["settings"][name]) for name in SHARED_SETTINGS},
        "suite.sha256": (report["suite"]["sha256"], old["suite"]["sha256"]),
        **{f"target.{name}": (report["target"].get(name), old["target"].get(name)) for name in ("parameters", "dtype")},
    }
    for name, (value, old_value) in compared.items():
        if value != old_value:
            raise UserError("baseline", got=f"{name} {old_value}", expected=f"{value}, as in the report")
    new = {record.id: record for record in records_of(row, evidence.records)}
    earlier = {record.id: record for record in records_of(old_row, baseline.records)}
    if new.keys() != earlier.keys():
        only = [("the report", new.keys() - earlier.keys()), ("the baseline", earlier.keys() - new.keys())]
        differences = "; ".join(_ids(name, sorted(ids)) for name, ids in only if ids)
        raise UserError("baseline", got=f"other prompts: {differences}", expected="a report of the same prompts")
    return list(new.values()), [earlier[id] for id in new]


def _ids(side: str, ids: Sequence[str]) -> str:
    """`5 only in the report (a, b, c, …)`."""
    shown = [*ids[:NUM_IDS_SHOWN], *["…"] * (len(ids) > NUM_IDS_SHOWN)]
    return f"{len(ids)} only in {side} ({', '.join(shown)})"


def _place(report: Mapping[str, Any]) -> str:
    """Machine and engine: speeds are compared where both are the same."""
    return f"{report['hardware']['name']} by {report.get('engine', {}).get('name', 'specdistill')}"


def holds(rule: Rule, estimate: Estimate) -> tuple[bool, str]:
    """Whether a rule's requirement holds for an estimate with a value, and why."""
    if rule.requirement == "equals":
        return estimate.value == rule.threshold, f"{_show(estimate.value)}, required {_show(rule.threshold)}"
    low, high = estimate.interval or (estimate.value, estimate.value)
    threshold, at = float(rule.threshold), f" {rule.confidence:.0%} bound " if estimate.interval else ""
    lower, upper = (f"{side}{at}" if at else "" for side in ("lower", "upper"))
    if rule.requirement == "min":
        return low >= threshold, f"{lower}{_show(low)}, required at least {_show(rule.threshold)}"
    if rule.requirement == "max":
        return high <= threshold, f"{upper}{_show(high)}, required at most {_show(rule.threshold)}"
    change, side, sign = (low, lower, -1) if METRICS[rule.metric].better == "higher" else (high, upper, 1)
    passed = sign * change <= threshold
    reason = f"{side}{change:+.1%}, allowed {sign * threshold:+.1%}"
    return passed, reason if passed else reason + _prompts_needed(estimate, sign * estimate.value, sign * change, threshold)


def _prompts_needed(estimate: Estimate, loss: float, bound: float, threshold: float) -> str:
    """How many prompts would have shown that a `loss` is allowed, where only the interval's `bound` is not; else empty.

    An interval narrows with the square root of the number of prompts.
    """
    if estimate.num_prompts is None or loss >= threshold:
        return ""
    needed = math.ceil(estimate.num_prompts * ((bound - loss) / (threshold - loss)) ** 2)
    return f"; {estimate.num_prompts} prompts cannot tell the measured {estimate.value:+.1%} from that, about {needed:,} could"


def _scope(rule: Rule) -> str:
    return ", ".join(f"{name}={value}" for name, value in rule.scope.items()) or "the whole suite"


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
