"""The gate's decision, from a report and its records alone, and what changed since a baseline report, prompt by prompt.

A number with an interval passes only if the interval's bound on the side of the requirement does: the lower bound for `min`, the upper
one for `max`. Missing evidence fails, and so does a run that was cut short. A gate's `max_regression` rules decide on changes; the
report's `baseline` section shows them to a reader, whatever the rules ask.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdistill.errors import UserError
from specdistill.gate.rules import DEFAULT_CONFIDENCE, SCOPES, Rule
from specdistill.hub import fetch, split_revision
from specdistill.report.files import REPORT, SAMPLES, read_report, row_metrics
from specdistill.report.phrases import scalar
from specdistill.report.tables import METRICS_SHOWN, main_rows
from specdistill.statistics.intervals import Interval, interval, relative_change
from specdistill.statistics.metrics import METRICS, prompt_sums
from specdistill.statistics.records import ALL, PromptRecord, records_of
from specdistill.statistics.sample_size import corrected_confidence

# Settings that change what is accepted or timed: two measurements share them, beside the row's configuration, or are not compared.
SHARED_SETTINGS = ("top_p", "top_k", "max_new_tokens")
NUM_IDS_SHOWN = 3
BASELINE = "a report.json, its folder, or a Hub id with its revision, as org/name@v1.2"


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


def read_baseline(name: str, key: str = "baseline") -> Evidence:
    """The report that a draft is compared with, and its records; of a Hub repository, those in its folder `report` are fetched.

    Raises UserError when there is no report or it is not what it should be, ResourceError when the Hub fails.
    """
    if Path(name).exists():
        return Evidence(*read_report(Path(name), key))
    repository, revision = split_revision(name)
    if repository.startswith((".", "/", "~")) or repository.count("/") != 1 or repository.endswith(".json"):
        raise UserError(key, got=f"{name}, which does not exist", expected=BASELINE)
    files = [f"report/{file}" for file in (REPORT, SAMPLES)]
    snapshot = fetch(repository, key=key, expected=BASELINE, revision=revision, patterns=files)
    if not (snapshot / files[0]).is_file():
        raise UserError(key, got=f"{name}, a repository without {files[0]}", expected=BASELINE)
    return Evidence(*read_report(snapshot / "report", key))


def judge(rules: Sequence[Rule], evidence: Evidence, baseline: Evidence | None = None) -> dict[str, Any]:
    """The report with its gate decided and, where there is a baseline, what changed since. Raises as `decide`."""
    report = {name: part for name, part in evidence.report.items() if name != "baseline"}
    if baseline is not None:
        report["baseline"] = changes(evidence, baseline)
    return {**report, "gate": decide(rules, evidence, baseline)}


def decide(rules: Sequence[Rule], evidence: Evidence, baseline: Evidence | None = None) -> dict[str, Any]:
    """The report's `gate` section. Raises UserError when a `max_regression` rule meets a baseline that measured something else.

    The report of a run that was cut short gets one failed rule more, `incomplete`.
    """
    results = [_decide(rule, estimate(rule, evidence, baseline)) for rule in rules]
    if evidence.report.get("incomplete"):
        reason = evidence.report["not_measured"].get("incomplete", "what it left out could say otherwise")
        cut_short = _decide(Rule("incomplete", "equals", False), Estimate(True))
        results.insert(0, {**cut_short, "reason": f"the run was cut short: {reason}"})
    return {"passed": all(result["passed"] or result["severity"] == "warn" for result in results), "rules": results}


def _decide(rule: Rule, found: Estimate) -> dict[str, Any]:
    passed, reason = (False, f"no evidence: {found.reason}") if found.reason else holds(rule, found)
    return {
        "metric": rule.metric,
        "scope": dict(rule.scope),
        "requirement": {rule.requirement: rule.threshold},
        "confidence": rule.confidence,
        "severity": rule.severity,
        "value": found.value,
        "ci95": list(found.interval) if found.interval and rule.confidence == DEFAULT_CONFIDENCE else None,
        "passed": passed,
        "reason": reason,
    }


def estimate(rule: Rule, evidence: Evidence, baseline: Evidence | None) -> Estimate:
    """The rule's metric in a row of the report, elsewhere in it, or as a change since the baseline."""
    if rule.requirement == "max_regression":
        return regression(rule, evidence, baseline)
    return _row_metric(rule, evidence) if rule.metric in row_metrics() else _document_metric(rule, evidence.report)


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
    *path, name = rule.metric.split(".")
    section = functools.reduce(lambda part, key: part.get(key) or {}, path, report)
    value, ci95 = section.get(name), section.get(f"{name}_ci95")
    if value is None:
        reasons = (reason for name, reason in report["not_measured"].items() if rule.metric.startswith(name))
        return Estimate(reason=next(reasons, "it was not measured"))
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
    rows = []
    for name, run, side in (("the report", "the run", evidence), ("the baseline", "the baseline's run", baseline)):
        row = find_row(side.report, rule.scope)
        if side.report.get("incomplete"):
            return Estimate(reason=f"{run} was cut short")
        if row is None:
            return Estimate(reason=f"{name} has no row for {_scope(rule)}")
        if not row.get(rule.metric):  # a change from 0 has no size
            why = row["not_measured"].get(rule.metric, f"it is {row.get(rule.metric, 'absent')}")
            return Estimate(reason=f"not measured in {name}: {why}")
        rows.append(row)
    metric = METRICS[rule.metric]
    place, old_place = (
        f"{side.report['hardware']['name']} by {side.report.get('engine', {}).get('name', 'specdistill')}"
        for side in (evidence, baseline)
    )
    if metric.is_timed and place != old_place:
        return Estimate(reason=f"timed elsewhere: the report on {place}, the baseline on {old_place}")
    records, old_records = _paired_records(rows[0], rows[1], evidence, baseline)
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
    only = [("the report", sorted(new.keys() - earlier)), ("the baseline", sorted(earlier.keys() - new))]
    differences = [
        f"{len(ids)} only in {side} ({', '.join([*ids[:NUM_IDS_SHOWN], *['…'] * (len(ids) > NUM_IDS_SHOWN)])})"
        for side, ids in only
        if ids
    ]
    if differences:
        raise UserError("baseline", got=f"other prompts: {'; '.join(differences)}", expected="a report of the same prompts")
    return list(new.values()), [earlier[id] for id in new]


def changes(evidence: Evidence, baseline: Evidence) -> dict[str, Any]:
    """The report's `baseline` section. A baseline that measured something else has no changes, and a `reason`."""
    old = baseline.report
    section = {
        **{name: old[name] for name in ("created", "git_revision") if name in old},
        "draft": {name: old["draft"].get(name) for name in ("model", "revision", "method")},
        "changes": [],
    }
    categories = [row["category"] for row in main_rows(evidence.report) if row["category"] != ALL]
    asked = [(metric, ALL) for metric in METRICS_SHOWN] + [("mean_acceptance_length", category) for category in categories]
    try:
        return {**section, "changes": [_change(metric, category, evidence, baseline) for metric, category in asked]}
    except UserError as error:  # the report is shown all the same, with the reason
        return {**section, "reason": str(error)}


def _change(metric: str, category: str, evidence: Evidence, baseline: Evidence) -> dict[str, Any]:
    """Old and new value, the relative change (new / old - 1) and its interval, or the `reason` why one is absent."""
    scope = {"category": category}
    rows = {"old": find_row(baseline.report, scope), "new": find_row(evidence.report, scope)}
    values = {name: row[metric] for name, row in rows.items() if row is not None and metric in row}
    change = {"metric": metric, "category": category, "better": METRICS[metric].better, **values}
    if len(values) < 2:
        lacking = "both" if not values else "the report" if "old" in values else "the baseline"
        return {**change, "reason": f"not measured in {lacking}"}
    estimate = regression(Rule(metric, "max_regression", 0.0, scope), evidence, baseline)
    found = {"change": estimate.value, "ci95": estimate.interval and list(estimate.interval), "reason": estimate.reason}
    return change | {name: part for name, part in found.items() if part is not None}


def holds(rule: Rule, estimate: Estimate) -> tuple[bool, str]:
    """Whether a rule's requirement holds for an estimate with a value, and why."""
    if rule.requirement == "equals":
        return estimate.value == rule.threshold, f"{scalar(estimate.value)}, required {scalar(rule.threshold)}"
    low, high = estimate.interval or (estimate.value, estimate.value)
    threshold, at = float(rule.threshold), f" {rule.confidence:.0%} bound " if estimate.interval else ""
    lower, upper = (f"{side}{at}" if at else "" for side in ("lower", "upper"))
    if rule.requirement == "min":
        return low >= threshold, f"{lower}{scalar(low)}, required at least {scalar(rule.threshold)}"
    if rule.requirement == "max":
        return high <= threshold, f"{upper}{scalar(high)}, required at most {scalar(rule.threshold)}"
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
