"""The gate: rules as data, decided from a report alone.

A gate is a YAML list of rules: a `metric` (a field of a result row, or a dotted path into report.json), optionally a `scope`
(one of SCOPES; by default the first row, the whole suite), and exactly one requirement: `min`, `max`, `equals`, or
`max_regression` (a share, against a baseline report). A number that has an interval passes only if the unfavourable end of it
does, at `confidence` (default 0.95; at 0 the interval is the number itself). A rule with `severity: warn` is an alarm: it is
reported and does not decide. Absent evidence fails, and so does a run that was cut short.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from specdistill.errors import UserError, nearest, one_line
from specdistill.project import GATES, ROOT
from specdistill.report.schema import document_metrics, row_metrics
from specdistill.statistics.interim import corrected_confidence
from specdistill.statistics.intervals import Interval, interval, relative_change
from specdistill.statistics.metrics import METRICS
from specdistill.statistics.prompt_sums import prompt_sums
from specdistill.statistics.records import PromptRecord, records_of

REQUIREMENTS = ("min", "max", "equals", "max_regression")
SCOPES = ("suite", "category", "temperature", "context_bucket", "num_speculative_tokens", "batch_size", "tree")
SEVERITIES = ("fail", "warn")
KEYS = ("metric", "scope", *REQUIREMENTS, "confidence", "severity")
DEFAULT_CONFIDENCE = 0.95
# Beside the row's own configuration, what two measurements must share to be compared: settings that change what is accepted or timed.
SHARED_SETTINGS = ("top_p", "top_k", "max_new_tokens")
NUM_SHOWN_IDS = 3


@dataclass(frozen=True)
class Rule:
    metric: str
    requirement: str
    threshold: float | bool | str
    scope: Mapping[str, Any] = field(default_factory=dict)
    confidence: float = DEFAULT_CONFIDENCE
    severity: str = "fail"


@dataclass(frozen=True)
class Evidence:
    """A report and the prompts it was made from."""

    report: Mapping[str, Any]
    records: Sequence[PromptRecord]


@dataclass(frozen=True)
class Finding:
    """What the evidence says about a rule's metric: its value and interval, or the reason why there is none."""

    value: Any = None
    ends: Interval | None = None
    reason: str | None = None
    num_prompts: int | None = None  # compared, for a regression


def load_gate(name: str) -> list[Rule]:
    """Rules of a gate by name or path. Raises UserError for an unknown gate, key or metric, and for a rule that says too much
    or little.
    """
    path = _find(name)
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise UserError("gate", got=f"{path}: {one_line(str(error))}", expected="a readable YAML file") from error
    if not isinstance(entries, list) or not entries:
        raise UserError("gate", got=f"{path}, which holds no list", expected="a YAML list of rules")
    return [_rule(f"{path.name} rule {number}", entry) for number, entry in enumerate(entries, start=1)]


def decide(rules: Sequence[Rule], evidence: Evidence, baseline: Evidence | None = None) -> dict[str, Any]:
    """The report's `gate` section. Raises UserError when a `max_regression` rule meets a baseline that measured something else.

    A report of a run that was cut short gets one failed rule more, `incomplete`.
    """
    results = [_decide(rule, evidence, baseline) for rule in rules]
    if evidence.report.get("incomplete"):
        why = evidence.report["not_measured"].get("incomplete", "what it left out could say otherwise")
        results = [
            _result(Rule("incomplete", "equals", False), Finding(True), False, f"the run was cut short: {why}"),
            *results,
        ]
    return {"passed": all(result["passed"] or result["severity"] == "warn" for result in results), "rules": results}


def _find(name: str) -> Path:
    for candidate in (Path(name), GATES / f"{name}.yaml", ROOT / name):
        if candidate.is_file():
            return candidate
    known = sorted(path.stem for path in GATES.glob("*.yaml"))
    raise UserError("gate", got=name, expected=f"one of {', '.join(known)}, or a gate YAML", nearest=nearest(name, known))


def _rule(place: str, entry: Any) -> Rule:
    if not isinstance(entry, dict):
        raise UserError(place, got=repr(entry), expected=f"keys of {', '.join(KEYS)}")
    _check_keys(place, entry, KEYS)
    requirements = [name for name in REQUIREMENTS if name in entry]
    if len(requirements) != 1:
        raise UserError(
            place, got=" and ".join(requirements) or "no requirement", expected=f"exactly one of {', '.join(REQUIREMENTS)}"
        )
    requirement, metric = requirements[0], entry.get("metric")
    known = [*row_metrics(), *document_metrics()]
    if metric not in known:
        raise UserError(f"{place}: metric", got=metric, expected="a metric of the report", nearest=nearest(str(metric), known))
    if requirement == "max_regression" and metric not in METRICS:
        expected = f"one of {', '.join(METRICS)}, which can be compared prompt by prompt"
        raise UserError(f"{place}: max_regression", got=f"metric {metric}", expected=expected)
    threshold = entry[requirement]
    if requirement != "equals" and not _is_number(threshold):
        raise UserError(f"{place}: {requirement}", got=repr(threshold), expected="a number")
    if requirement == "max_regression" and not 0 <= threshold < 1:
        raise UserError(f"{place}: max_regression", got=threshold, expected="a share from 0 to below 1")
    scope = entry.get("scope") or {}
    if not isinstance(scope, dict):
        raise UserError(f"{place}: scope", got=repr(scope), expected=f"keys of {', '.join(SCOPES)}")
    _check_keys(f"{place}: scope", scope, SCOPES)
    confidence = entry.get("confidence", DEFAULT_CONFIDENCE)
    if not _is_number(confidence) or not 0 <= confidence < 1:
        raise UserError(f"{place}: confidence", got=repr(confidence), expected="a share from 0 to below 1")
    severity = entry.get("severity", "fail")
    if severity not in SEVERITIES:
        raise UserError(f"{place}: severity", got=severity, expected="fail or warn", nearest=nearest(str(severity), SEVERITIES))
    return Rule(metric, requirement, threshold, scope, confidence, severity)


def _check_keys(place: str, entry: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in entry:
        if key not in known:
            raise UserError(
                f"{place}: {key}", got="an unknown key", expected=f"one of {', '.join(known)}", nearest=nearest(str(key), known)
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _decide(rule: Rule, evidence: Evidence, baseline: Evidence | None) -> dict[str, Any]:
    if rule.requirement == "max_regression":
        finding = regression(rule, evidence, baseline)
    elif rule.metric in row_metrics():
        finding = _row_metric(rule, evidence)
    else:
        finding = _document_metric(rule, evidence.report)
    passed, reason = (False, f"no evidence: {finding.reason}") if finding.reason else holds(rule, finding)
    return _result(rule, finding, passed, reason)


def _result(rule: Rule, finding: Finding, passed: bool, reason: str) -> dict[str, Any]:
    return {
        "metric": rule.metric,
        "scope": dict(rule.scope),
        "requirement": {rule.requirement: rule.threshold},
        "confidence": rule.confidence,
        "severity": rule.severity,
        "value": finding.value,
        "ci95": list(finding.ends) if finding.ends and rule.confidence == DEFAULT_CONFIDENCE else None,
        "passed": passed,
        "reason": reason,
    }


def _row_metric(rule: Rule, evidence: Evidence) -> Finding:
    row = find_row(evidence.report, rule.scope)
    if row is None:
        return Finding(reason=f"the report has no row for {_words(rule.scope)}")
    if row.get(rule.metric) is None:
        return Finding(reason=row["not_measured"].get(rule.metric, "it was not measured"))
    if rule.confidence == 0:
        return Finding(row[rule.metric])
    if rule.metric not in METRICS or rule.confidence == DEFAULT_CONFIDENCE:
        ends = row.get(f"{rule.metric}_ci95")
        return Finding(row[rule.metric], tuple(ends) if ends else None, _interval_is_missing(rule, row))
    seed = evidence.report["settings"]["seed"]
    found = interval(
        METRICS[rule.metric], prompt_sums(records_of(row, evidence.records)), confidence=_confidence(rule, evidence), seed=seed
    )
    return Finding(row[rule.metric], found, None if found else "too few prompts for an interval")


def _confidence(rule: Rule, *sides: Evidence) -> float:
    """The rule's, or a stricter one where a run looked at its intervals several times before it stopped."""
    return (
        corrected_confidence(rule.confidence)
        if any(side.report["settings"].get("target_precision") for side in sides)
        else rule.confidence
    )


def _interval_is_missing(rule: Rule, row: Mapping[str, Any]) -> str | None:
    """A number whose interval could not be made is no evidence either."""
    reason: str | None = row["not_measured"].get(f"{rule.metric}_ci95")
    return f"no interval ({reason})" if reason else None


def _document_metric(rule: Rule, report: Mapping[str, Any]) -> Finding:
    path, section = rule.metric, report
    found: Any = report
    for name in path.split("."):
        section, found = found, found.get(name) if isinstance(found, Mapping) else None
    if found is not None:
        ends = section.get(f"{name}_ci95")
        if ends is None or rule.confidence == 0:
            return Finding(found)
        if rule.confidence != DEFAULT_CONFIDENCE:
            return Finding(found, reason=f"its interval is known at {DEFAULT_CONFIDENCE:.0%} only")
        return Finding(found, tuple(ends))
    reasons: Mapping[str, str] = report["not_measured"]
    return Finding(reason=next((reason for name, reason in reasons.items() if path.startswith(name)), "it was not measured"))


def regression(rule: Rule, evidence: Evidence, baseline: Evidence | None) -> Finding:
    """value is the relative change, candidate / baseline - 1."""
    if baseline is None:
        return Finding(reason="no baseline report was given")
    for measured, whose in ((evidence, "the"), (baseline, "the baseline's")):
        if measured.report.get("incomplete"):
            return Finding(reason=f"{whose} run was cut short")
    row, old = find_row(evidence.report, rule.scope), find_row(baseline.report, rule.scope)
    if row is None or old is None:
        return Finding(reason=f"{'the report' if row is None else 'the baseline'} has no row for {_words(rule.scope)}")
    for side, found in (("the report", row), ("the baseline", old)):
        if not found.get(rule.metric):  # a change from 0 has no size
            why = found["not_measured"].get(rule.metric, f"it is {found.get(rule.metric, 'absent')}")
            return Finding(reason=f"not measured in {side}: {why}")
    metric = METRICS[rule.metric]
    places = [_place(side.report) for side in (evidence, baseline)]
    if metric.is_timed and places[0] != places[1]:
        return Finding(reason=f"timed elsewhere: the report on {places[0]}, the baseline on {places[1]}")
    new_records, old_records = _paired(row, old, evidence, baseline)
    change, ends = relative_change(
        metric,
        prompt_sums(new_records),
        prompt_sums(old_records),
        confidence=_confidence(rule, evidence, baseline),
        seed=evidence.report["settings"]["seed"],
    )
    missing = None if ends else "too few prompts measured in both reports for an interval"
    return Finding(change, ends, missing, len(new_records))


def _paired(
    row: Mapping[str, Any], old: Mapping[str, Any], evidence: Evidence, baseline: Evidence
) -> tuple[list[PromptRecord], list[PromptRecord]]:
    """The records of both rows, prompt by prompt. Raises UserError, with the difference, when the two did not measure the same."""
    report, before = evidence.report, baseline.report
    compared = {
        **{name: (row.get(name), old.get(name)) for name in ("suite_version", *SCOPES)},
        **{name: (report["settings"][name], before["settings"][name]) for name in SHARED_SETTINGS},
        "suite.sha256": (report["suite"]["sha256"], before["suite"]["sha256"]),
        "target.parameters": (report["target"].get("parameters"), before["target"].get("parameters")),
        "target.dtype": (report["target"].get("dtype"), before["target"].get("dtype")),
    }
    for name, (new_value, old_value) in compared.items():
        if new_value != old_value:
            raise UserError("baseline", got=f"{name} {old_value}", expected=f"{new_value}, as in the report")
    new, earlier = (
        {record.id: record for record in found}
        for found in (records_of(row, evidence.records), records_of(old, baseline.records))
    )
    if new.keys() != earlier.keys():
        parts = [
            _only("the report", sorted(new.keys() - earlier.keys())),
            _only("the baseline", sorted(earlier.keys() - new.keys())),
        ]
        raise UserError(
            "baseline", got=f"other prompts: {'; '.join(filter(None, parts))}", expected="a report of the same prompts"
        )
    return list(new.values()), [earlier[id] for id in new]


def _place(report: Mapping[str, Any]) -> str:
    """Where speed was measured. Engines differ by more than drafts do, so theirs is not compared either."""
    return f"{report['hardware']['name']} by {report.get('engine', {}).get('name', 'specdistill')}"


def _only(where: str, ids: Sequence[str]) -> str:
    """`3 only in the report (a, b, c)`; empty without any."""
    more = ", …" * (len(ids) > NUM_SHOWN_IDS)
    return f"{len(ids)} only in {where} ({', '.join(ids[:NUM_SHOWN_IDS])}{more})" if ids else ""


def holds(rule: Rule, finding: Finding) -> tuple[bool, str]:
    """Whether a rule's requirement holds for a finding with a value, and a sentence that says why."""
    if rule.requirement == "equals":
        return finding.value == rule.threshold, f"{_show(finding.value)}, required {_show(rule.threshold)}"
    low, high = finding.ends or (finding.value, finding.value)
    threshold = float(rule.threshold)
    end = f"unfavourable end at {rule.confidence:.0%}: " if finding.ends else ""
    if rule.requirement == "max_regression":
        change, sign = (low, -1) if METRICS[rule.metric].better == "higher" else (high, 1)
        said = f"{end}changed by {change:+.1%}, allowed {threshold:.1%} for the worse"
        passed = sign * change <= threshold
        return passed, said if passed else said + _too_few(finding, sign * finding.value, sign * change, threshold)
    if rule.requirement == "min":
        return low >= threshold, f"{end}{_show(low)}, required at least {_show(rule.threshold)}"
    return high <= threshold, f"{end}{_show(high)}, required at most {_show(rule.threshold)}"


def _too_few(finding: Finding, worse: float, worst: float, threshold: float) -> str:
    """Says how many prompts would have shown a change that is allowed (`worse`), where only the interval's end (`worst`) is not.

    An interval narrows with the square root of the number of prompts.
    """
    if finding.num_prompts is None or worse >= threshold:
        return ""
    needed = finding.num_prompts * ((worst - worse) / (threshold - worse)) ** 2
    return f"; {finding.num_prompts} prompts cannot tell the measured {finding.value:+.1%} from that, about {math.ceil(needed):,} could"


def find_row(report: Mapping[str, Any], scope: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The first row that fits a scope; what the scope leaves out is the whole suite's (category and context `all`)."""
    wanted = {"category": "all", "context_bucket": "all", **scope}
    return next((row for row in report["results"] if all(row.get(name) == value for name, value in wanted.items())), None)


def _words(scope: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in scope.items()) or "the whole suite"


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
