"""The gate's decision, from a report and its records alone, and what changed since a baseline report, prompt by prompt.

A number with an interval passes when all of the interval meets the requirement, fails when none of it does, and is inconclusive in between:
more prompts would decide. A regression passes when the interval excludes a loss as large as the margin, and fails when a loss is certain
and such a one possible. So with prompts enough a true loss of the margin fails and no change passes; where the interval excludes neither,
the evidence cannot tell. Missing evidence fails, and so does a run that was cut short. Inconclusive is not passed.

A gate's `max_regression` rules decide on changes; the report's `baseline` section shows them to a reader.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specdistill.errors import ExitCode, UserError
from specdistill.gate.rules import SCOPES, Rule, load_gate
from specdistill.recipe.fields import Section, like, option
from specdistill.recipe.sections import EvalConfig
from specdistill.report.files import (
    REPORT,
    SAMPLES,
    check_replaceable,
    digest,
    read_report,
    row_metrics,
    write_report,
)
from specdistill.report.phrases import DEFAULT_CONFIDENCE, about, scalar
from specdistill.report.tables import CHANGED, main_rows
from specdistill.repositories import fetch, split_revision
from specdistill.statistics.intervals import Interval, interval, relative_change
from specdistill.statistics.metrics import METRICS, prompt_sums
from specdistill.statistics.records import ALL, PromptRecord, records_of

# Settings that change what is accepted or timed: two measurements share them and the row's configuration, or are not compared.
SHARED_SETTINGS = ("top_p", "top_k", "max_new_tokens", "compile")
NUM_IDS_SHOWN = 3
BASELINE = "a report.json, its folder, or a Hub id with its revision, as org/name@v1.2"
FIRST_RELEASE = "none"  # in place of a baseline: there is no earlier report to compare with

Verdict = Literal["passed", "failed", "inconclusive"]
EXIT_CODES = {
    "passed": ExitCode.DONE,
    "failed": ExitCode.CHECK_FAILED,
    "inconclusive": ExitCode.INCONCLUSIVE,
}


class GateOptions(Section):
    report: str = option(..., "report.json or its folder")
    gates: str = option("default", "gate: a name or a YAML file")
    baseline: str | None = like(EvalConfig, "baseline")
    output_dir: str | None = option(
        None, "folder of the judged report; null: named after the gate, inside the report's folder"
    )


@dataclass(frozen=True)
class Evidence:
    """A report and the records it was made from."""

    report: Mapping[str, Any]
    records: Sequence[PromptRecord]

    @property
    def is_edited(self) -> bool:
        """Whether it is not what its digest was taken of; a report that is being made has none yet."""
        stated = self.report.get("digest")
        return stated is not None and stated != digest(self.report, self.records)


@dataclass(frozen=True)
class Estimate:
    """A rule's metric in the evidence: its value and interval, or the reason why there is none.

    num_prompts: that the interval comes from.
    """

    value: Any = None
    interval: Interval | None = None
    reason: str | None = None
    num_prompts: int | None = None


def read_baseline(
    name: str | None, rules: Sequence[Rule], key: str = "baseline"
) -> Evidence | None:
    """The report that a draft is compared with, and its records; of a Hub repository, those in its folder `report` are fetched.

    None for None and for FIRST_RELEASE. Raises UserError when no rule would use it, and when there is no report or it is not what it
    should be; ResourceError when the Hub fails.
    """
    if name is None:
        return None
    if not any(rule.requirement == "max_regression" for rule in rules):
        text = f"{key}: the gate has no max_regression rules, so {key}={name} has no effect: remove it, or use the gate `release`"
        raise UserError(key, got=name, text=text)
    if name == FIRST_RELEASE:
        return None
    evidence = Evidence(*read_report(_baseline_at(name, key), key))
    if evidence.is_edited:
        raise UserError(
            key,
            got=f"{name}, which was changed after it was measured",
            expected="a report as it was written",
        )
    return evidence


def _baseline_at(name: str, key: str) -> Path:
    if Path(name).exists():
        return Path(name)
    repository, revision = split_revision(name)
    if (
        repository.startswith((".", "/", "~"))
        or repository.count("/") != 1
        or repository.endswith(".json")
    ):
        raise UserError(key, got=f"{name}, which does not exist", expected=BASELINE)
    files = [f"report/{file}" for file in (REPORT, SAMPLES)]
    snapshot = fetch(repository, key=key, expected=BASELINE, revision=revision, patterns=files)
    if not (snapshot / files[0]).is_file():
        raise UserError(key, got=f"{name}, a repository without {files[0]}", expected=BASELINE)
    return snapshot / "report"


def judge(
    rules: Sequence[Rule],
    evidence: Evidence,
    baseline: Evidence | None = None,
    *,
    first_release: bool = False,
) -> dict[str, Any]:
    """The report with its gate decided and, where there is a baseline, what changed since. Raises as `decide`."""
    report = {name: part for name, part in evidence.report.items() if name != "baseline"}
    if baseline is not None:
        report["baseline"] = changes(evidence, baseline)
    return {**report, "gate": decide(rules, evidence, baseline, first_release=first_release)}


def judge_again(options: GateOptions) -> dict[str, Any]:
    """The report with the verdict of a gate, written into a folder of its own next to the one that is judged, or into `output_dir`."""
    rules, report, baseline = load_gate(options.gates), Path(options.report), options.baseline
    judged = report if report.is_dir() else report.parent
    folder = Path(options.output_dir or judged / Path(options.gates).stem)
    if folder.resolve() == judged.resolve():
        raise UserError(
            "output_dir", got=f"{folder}, the report that is judged", expected="another folder"
        )
    check_replaceable(folder, "output_dir")
    evidence = Evidence(*read_report(report))
    if "digest" not in evidence.report:
        raise UserError(
            "report",
            got=f"{report}, without a digest",
            expected="a report as `specdistill eval` writes it",
        )
    verdict = judge(
        rules, evidence, read_baseline(baseline, rules), first_release=baseline == FIRST_RELEASE
    )
    write_report(folder, verdict, evidence.records)
    return verdict


def decide(
    rules: Sequence[Rule],
    evidence: Evidence,
    baseline: Evidence | None = None,
    *,
    first_release: bool = False,
) -> dict[str, Any]:
    """The report's `gate` section. Raises UserError when a `max_regression` rule meets a baseline that measured something else.

    The report of a run that was cut short gets one failed rule more, `incomplete`; one that is not as it was written, `digest`. Of a first
    release regressions are not asked.
    """
    asked = [rule for rule in rules if not (first_release and rule.requirement == "max_regression")]
    results = [_decide(rule, estimate(rule, evidence, baseline)) for rule in asked]
    if evidence.report.get("incomplete"):
        reason = evidence.report["not_measured"].get(
            "incomplete", "what it did not measure could change the verdict"
        )
        results.insert(
            0,
            _decide(
                Rule("incomplete", "equals", False),
                Estimate(reason=f"the run was cut short: {reason}"),
            ),
        )
    if evidence.is_edited:
        changed = "the report or its records were changed after they were measured"
        results.insert(0, _decide(Rule("digest", "equals", True), Estimate(reason=changed)))
    verdicts = {result["verdict"] for result in results if result["severity"] != "warn"}
    verdict = next((name for name in ("failed", "inconclusive") if name in verdicts), "passed")
    return {
        "verdict": verdict,
        "passed": verdict == "passed",
        "first_release": first_release,
        "rules": results,
    }


def _decide(rule: Rule, found: Estimate) -> dict[str, Any]:
    verdict, reason, needed = (
        ("failed", f"no evidence: {found.reason}", None) if found.reason else holds(rule, found)
    )
    return {
        "metric": rule.metric,
        "scope": dict(rule.scope),
        "requirement": {rule.requirement: rule.threshold},
        "confidence": rule.confidence,
        "severity": rule.severity,
        "value": found.value,
        "ci95": list(found.interval)
        if found.interval and rule.confidence == DEFAULT_CONFIDENCE
        else None,
        "verdict": verdict,
        "passed": verdict == "passed",
        "reason": reason,
        "prompts_needed": needed,
    }


def estimate(rule: Rule, evidence: Evidence, baseline: Evidence | None) -> Estimate:
    """The rule's metric in a row of the report, elsewhere in it, or as a change since the baseline."""
    if rule.requirement == "max_regression":
        return regression(rule, evidence, baseline)
    return (
        _row_metric(rule, evidence)
        if rule.metric in row_metrics()
        else _document_metric(rule, evidence.report)
    )


def find_row(report: Mapping[str, Any], scope: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The first row in a scope; without a category or context bucket in it, the whole suite's (`all`)."""
    wanted = {"category": "all", "context_bucket": "all", **scope}
    return next(
        (
            row
            for row in report["results"]
            if all(row.get(name) == value for name, value in wanted.items())
        ),
        None,
    )


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
        return Estimate(
            value,
            tuple(ci95) if ci95 else None,
            f"no interval ({why})" if why else None,
            row["num_prompts"],
        )
    records, seed = records_of(row, evidence.records), evidence.report["settings"]["seed"]
    if not records:
        return Estimate(value, reason="no record is of this row")
    bounds = interval(
        METRICS[rule.metric], prompt_sums(records), confidence=rule.confidence, seed=seed
    )
    return Estimate(
        value, bounds, None if bounds else "too few prompts for an interval", row["num_prompts"]
    )


def _document_metric(rule: Rule, report: Mapping[str, Any]) -> Estimate:
    *path, name = rule.metric.split(".")
    section = functools.reduce(lambda part, key: part.get(key) or {}, path, report)
    value, ci95 = section.get(name), section.get(f"{name}_ci95")
    if value is None:
        reasons = (
            reason
            for name, reason in report["not_measured"].items()
            if rule.metric.startswith(name)
        )
        return Estimate(reason=next(reasons, "it was not measured"))
    if ci95 is None or rule.confidence == 0:
        return Estimate(value)
    if rule.confidence != DEFAULT_CONFIDENCE:
        return Estimate(value, reason=f"its interval is known at {DEFAULT_CONFIDENCE:.0%} only")
    return Estimate(value, tuple(ci95))


def regression(rule: Rule, evidence: Evidence, baseline: Evidence | None) -> Estimate:
    """The paired relative change, metric / baseline's metric - 1. Raises UserError when the two did not measure the same."""
    if baseline is None:
        return Estimate(
            reason=f"no baseline report was given (baseline={FIRST_RELEASE} for a first release)"
        )
    rows = []
    for name, run, side in (
        ("the report", "the run", evidence),
        ("the baseline", "the baseline's run", baseline),
    ):
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
        return Estimate(
            reason=f"timed elsewhere: the report on {place}, the baseline on {old_place}"
        )
    records, old_records = _paired_records(rows[0], rows[1], evidence, baseline)
    change, bounds = relative_change(
        metric,
        prompt_sums(records),
        prompt_sums(old_records),
        confidence=rule.confidence,
        seed=evidence.report["settings"]["seed"],
    )
    missing = None if bounds else "too few prompts measured in both reports for an interval"
    return Estimate(change, bounds, missing, len(records))


def _paired_records(
    row: Mapping[str, Any], old_row: Mapping[str, Any], evidence: Evidence, baseline: Evidence
) -> tuple[list[PromptRecord], list[PromptRecord]]:
    """The records of both rows, in the same order of prompts. Raises UserError that names the first difference."""
    report, old = evidence.report, baseline.report
    weights, old_weights = (side["target"].get("weights") for side in (report, old))
    if weights and old_weights and weights != old_weights:
        named, other = (
            f"{it['target']['model']} (weights {it['target']['weights'][:8]})"
            for it in (report, old)
        )
        raise UserError(
            "baseline", got=f"a report on {other}", expected=f"one on {named}, as the report is"
        )
    compared = {
        **{name: (row.get(name), old_row.get(name)) for name in ("suite_version", *SCOPES)},
        **{
            name: tuple(it["settings"].get(name, False) for it in (report, old))
            for name in SHARED_SETTINGS
        },
        "suite.sha256": (report["suite"]["sha256"], old["suite"]["sha256"]),
        **{
            f"target.{name}": (report["target"].get(name), old["target"].get(name))
            for name in ("parameters", "dtype", "quantization")
        },
    }
    for name, (value, old_value) in compared.items():
        if value != old_value:
            raise UserError(
                "baseline", got=f"{name} {old_value}", expected=f"{value}, as in the report"
            )
    new = {record.id: record for record in records_of(row, evidence.records)}
    earlier = {record.id: record for record in records_of(old_row, baseline.records)}
    only = [
        ("the report", sorted(new.keys() - earlier)),
        ("the baseline", sorted(earlier.keys() - new)),
    ]
    differences = [
        f"{len(ids)} only in {side} ({', '.join([*ids[:NUM_IDS_SHOWN], *['…'] * (len(ids) > NUM_IDS_SHOWN)])})"
        for side, ids in only
        if ids
    ]
    if differences:
        raise UserError(
            "baseline",
            got=f"other prompts: {'; '.join(differences)}",
            expected="a report of the same prompts",
        )
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
    asked = [(metric, ALL) for metric in CHANGED] + [
        ("mean_acceptance_length", category) for category in categories
    ]
    try:
        return {
            **section,
            "changes": [
                _change(metric, category, evidence, baseline) for metric, category in asked
            ],
        }
    except UserError as error:  # the report is shown anyway, with the reason
        return {**section, "reason": str(error)}


def _change(metric: str, category: str, evidence: Evidence, baseline: Evidence) -> dict[str, Any]:
    """Old and new value, the relative change (new / old - 1) and its interval, or the `reason` why one is absent."""
    scope = {"category": category}
    rows = {"old": find_row(baseline.report, scope), "new": find_row(evidence.report, scope)}
    values = {name: row[metric] for name, row in rows.items() if row is not None and metric in row}
    change = {"metric": metric, "category": category, "better": METRICS[metric].better, **values}
    estimate = regression(Rule(metric, "max_regression", 0.0, scope), evidence, baseline)
    found = {
        "change": estimate.value,
        "ci95": estimate.interval and list(estimate.interval),
        "reason": estimate.reason,
    }
    return change | {name: part for name, part in found.items() if part is not None}


def holds(rule: Rule, found: Estimate) -> tuple[Verdict, str, int | None]:
    """What an estimate with a value says of a rule, why, and, where it is inconclusive, how many prompts could decide."""
    if rule.requirement == "equals":
        reason = f"{scalar(found.value)}, required {scalar(rule.threshold)}"
        return "passed" if found.value == rule.threshold else "failed", reason, None
    (low, high), threshold, point = (
        found.interval or (found.value, found.value),
        float(rule.threshold),
        found.value,
    )
    if rule.requirement == "max_regression":
        worse = -1 if METRICS[rule.metric].better == "higher" else 1
        least, most = sorted((worse * low, worse * high))  # the loss
        passed, failed = most <= threshold, least > 0 and most > threshold
        side, decisive, asked = (
            "lower" if worse < 0 else "upper",
            f"{worse * most:+.1%}",
            f"allowed {worse * threshold:+.1%}",
        )
        open_end, edge = (
            (worse * most, worse * threshold) if worse * point < threshold else (worse * least, 0.0)
        )
    else:
        sign = 1 if rule.requirement == "min" else -1  # of a max everything the other way round
        least, most = sorted((sign * low, sign * high))
        passed, failed = least >= sign * threshold, most < sign * threshold
        side = "lower" if (sign > 0) != failed else "upper"
        decisive = scalar(low if side == "lower" else high)
        asked = f"required at {'least' if sign > 0 else 'most'} {scalar(rule.threshold)}"
        open_end, edge = sign * (least if sign * point >= sign * threshold else most), threshold
    reason = (
        f"{f'{side} {rule.confidence:.0%} bound ' if found.interval else ''}{decisive}, {asked}"
    )
    if passed or failed:
        return "passed" if passed else "failed", reason, None
    needed = _prompts_needed(found, open_end, edge)
    return "inconclusive", f"{reason}; {needed[0]}", needed[1]


def _prompts_needed(found: Estimate, open_end: float, edge: float) -> tuple[str, int | None]:
    """How many prompts could decide: as many as bring the interval's open end to the edge that it now lies beyond.

    An interval narrows with the square root of the number of prompts.
    """
    if not found.num_prompts or math.isclose(edge, found.value):
        return "the interval includes both", None
    needed = math.ceil(found.num_prompts * ((open_end - found.value) / (edge - found.value)) ** 2)
    return f"{found.num_prompts} prompts cannot tell, {about(needed)} could", needed


def _scope(rule: Rule) -> str:
    return ", ".join(f"{name}={value}" for name, value in rule.scope.items()) or "the whole suite"
