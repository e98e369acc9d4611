"""Decide whether a report passes a gate, and compare a report with that of a baseline.

Nothing is measured here: all evidence is in the report and its records.

- **A number with an interval** passes if the whole interval meets the requirement. It fails if no
  part of the interval does. In between it is inconclusive, and more prompts would decide.
- **A regression** passes if the interval excludes a loss beyond the allowed one. It fails if the
  interval excludes no loss at all, and includes a loss beyond the allowed one. Otherwise it is
  inconclusive. So with enough prompts, an unchanged draft passes, and a loss as large as the
  allowed one fails.
- **Missing evidence** fails, and so does a run that was cut short.

An inconclusive gate has not passed.

Changes since a baseline are computed from prompts that both reports measured, paired by prompt. The
gate's `max_regression` rules decide by them, and the report's `baseline` section shows them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specdistill.common.errors import ExitCode, UserError
from specdistill.common.repositories import fetch, split_revision
from specdistill.evaluation.gate.rules import SCOPES, Rule, load_gate
from specdistill.evaluation.report.files import (
    REPORT,
    SAMPLES,
    check_replaceable,
    compute_digest,
    list_row_metrics,
    read_report,
    write_report,
)
from specdistill.evaluation.report.phrases import (
    DEFAULT_CONFIDENCE,
    NO_EVIDENCE,
    Report,
    ResultRow,
    format_about,
    format_scalar,
)
from specdistill.evaluation.report.schema import (
    GateDocument,
    RuleDocument,
)
from specdistill.evaluation.report.tables import CHANGED_METRICS, select_main_rows
from specdistill.evaluation.statistics.intervals import (
    Interval,
    compute_interval,
    compute_relative_change,
)
from specdistill.evaluation.statistics.metrics import METRICS, collect_prompt_sums
from specdistill.evaluation.statistics.records import ALL_PROMPTS, PromptRecord, select_records
from specdistill.recipe.fields import Section, like, option
from specdistill.recipe.sections import EvalConfig

# Settings that change what is accepted or timed. Two reports are only compared if they agree in
# these and in the configuration of the row.
SHARED_SETTINGS = ("top_p", "top_k", "max_new_tokens", "compile")
NUM_IDS_SHOWN = 3  # the most ids of prompts in an error, so that it fits into one line
# What an error says was expected of the key `baseline`.
BASELINE = "a report.json, its folder, or a Hub id with its revision, as org/name@v1.2"
# The reason of undecided rules in the report of a quick look.
QUICK = "a quick look does not decide it"
FIRST_RELEASE = "none"  # the value of `baseline` if there is no earlier report to compare with

Verdict = Literal["passed", "failed", "inconclusive"]
EXIT_CODES = {
    "passed": ExitCode.DONE,
    "failed": ExitCode.CHECK_FAILED,
    "inconclusive": ExitCode.INCONCLUSIVE,
}


class GateOptions(Section):
    """The options of `specdistill gate`."""

    report: str = option(..., "report to judge: report.json or its folder")
    gates: str = option("default", "gate with the rules to meet: a name or a YAML file")
    baseline: str | None = like(EvalConfig, "baseline")
    output_dir: str | None = option(
        None,
        "folder for the judged report; null: a folder named after the gate, in the report's folder",
    )


@dataclass(frozen=True)
class Evidence:
    """A report and the records that it was made from."""

    report: Report
    records: Sequence[PromptRecord]

    @property
    def is_edited(self) -> bool:
        """Whether somebody changed the report or its records after the report was written.

        When a report is written, it gets a hash of itself and its records, the digest. Here the
        hash is computed again and compared. A report without a digest is still being built, and
        counts as unchanged.
        """
        digest = self.report.get("digest")
        return digest is not None and digest != compute_digest(self.report, self.records)


@dataclass(frozen=True)
class Estimate:
    """The value of a rule's metric in the evidence, or the reason why the evidence is missing.

    Attributes:
        value: the value; None if there is none.
        interval: the confidence interval of the value; None for a value without one.
        reason: why the evidence is missing; None if it is not missing.
        num_prompts: the number of prompts that the interval comes from.
    """

    value: Any = None
    interval: Interval | None = None
    reason: str | None = None
    num_prompts: int | None = None


def read_baseline(
    name: str | None, rules: Sequence[Rule], key: str = "baseline"
) -> Evidence | None:
    """Read the baseline: an earlier report, with which a new report is compared.

    Args:
        name: a report.json, its folder, or the Hub id of a draft whose repository has a folder
            `report`. None or FIRST_RELEASE for no baseline.
        rules: the rules of the gate. At least one must be about a regression since the baseline.
        key: the key of the recipe or command, with which error messages begin.

    Returns:
        The earlier report and its records; None for no baseline.

    Raises:
        UserError: if no rule would use the baseline, if there is no report, and if the report was
            edited.
        ResourceError: when the Hub fails.
    """
    if name is None:
        return None

    # If no rule uses the baseline, the command is probably a mistake.
    if not any(rule.requirement == "max_regression" for rule in rules):
        raise UserError(
            key,
            got=name,
            text=(
                f"{key}: the gate has no max_regression rules, so {key}={name} has no effect:"
                " remove it, or use the gate `release`"
            ),
        )
    if name == FIRST_RELEASE:
        return None

    # Read the report, and refuse one that was edited.
    evidence = Evidence(*read_report(_fetch_baseline(name, key), key))
    if evidence.is_edited:
        raise UserError(
            key,
            got=f"{name}, which was changed after it was measured",
            expected="a report that nobody edited",
        )
    return evidence


def _fetch_baseline(name: str, key: str) -> Path:
    """Return the local folder or file of a baseline; download it if it is on the Hub.

    Args:
        name: a report.json, its folder, or a Hub id, org/name or org/name@revision.
        key: the key of the recipe or command, with which error messages begin.
    """
    if Path(name).exists():
        return Path(name)

    # Otherwise it must be a Hub id: org/name. A name that looks like a path was meant as a path,
    # and nothing is there.
    repository, revision = split_revision(name)
    if (
        repository.startswith((".", "/", "~"))
        or repository.count("/") != 1
        or repository.endswith(".json")
    ):
        raise UserError(key, got=f"{name}, which does not exist", expected=BASELINE)

    # Fetch only the report and its records from the repository.
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
) -> Report:
    """Judge a report by the rules of a gate, and return a copy of it with the verdict.

    The verdict is in the section `gate`. With a baseline, the section `baseline` has the changes
    since that earlier report.

    Args:
        rules: the rules of the gate.
        evidence: the report and its records.
        baseline: the earlier report to compare with, and its records; None if there is none.
        first_release: whether this draft has no earlier release. Rules about regressions are then
            left out.

    Raises:
        UserError: if a rule about a regression is applied, and the baseline measured other prompts,
            settings or another target.
    """
    # Copy the report. It may have been judged before, with changes since another baseline.
    report: Report = {**evidence.report}
    report.pop("baseline", None)
    if baseline is not None:
        report["baseline"] = build_changes(evidence, baseline)
    report["gate"] = decide(rules, evidence, baseline, first_release=first_release)
    return report


def judge_again(options: GateOptions) -> Report:
    """Run `specdistill gate`: judge an existing report by a gate, and write the judged report.

    The judged report is written to `output_dir`. Without this option, it is written to a folder
    with the name of the gate, inside the folder of the original report.

    Returns:
        The report with the verdict.
    """
    # Choose the folder of the judged report, so that the original report is never overwritten. The
    # stem of `gates` is the gate's name, also if it is the path of a YAML file.
    rules = load_gate(options.gates, "gates")
    report = Path(options.report)
    baseline = options.baseline
    report_folder = report if report.is_dir() else report.parent
    folder = Path(options.output_dir or report_folder / Path(options.gates).stem)
    if folder.resolve() == report_folder.resolve():
        raise UserError(
            "output_dir",
            got=f"{folder}, which holds the report that is judged",
            expected="another folder",
        )
    check_replaceable(folder, "output_dir")

    # Read the report. A report without a digest (a hash of itself) is refused, because nobody can
    # tell whether it was edited.
    evidence = Evidence(*read_report(report))
    if "digest" not in evidence.report:
        raise UserError(
            "report",
            got=f"{report}, which has no `digest` (the hash that shows whether it was edited)",
            expected="a report as `specdistill eval` writes it",
        )

    # Judge it, and write it with its records.
    is_first_release = baseline == FIRST_RELEASE
    judged_report = judge(
        rules, evidence, read_baseline(baseline, rules), first_release=is_first_release
    )
    write_report(folder, judged_report, evidence.records)
    return judged_report


def decide(
    rules: Sequence[Rule],
    evidence: Evidence,
    baseline: Evidence | None = None,
    *,
    first_release: bool = False,
) -> GateDocument:
    """Decide whether a report passes a gate: each of its rules, and the gate as a whole.

    If the measurement was cut short, or if the report was edited, the gate fails whatever its rules
    say: a rule `incomplete` or `digest` is added, which has failed. After a quick look, rules of
    severity `fail` are undecided, except a failed rule about an exact value, such as 0 divergences.

    Args:
        rules: the rules of the gate.
        evidence: the report and its records.
        baseline: the earlier report to compare with, and its records; None if there is none.
        first_release: whether rules about regressions are left out.

    Returns:
        The section `gate` of report.json.

    Raises:
        UserError: if a rule about a regression is applied, and the baseline measured other prompts,
            settings or another target.
    """
    # Decide each rule. A first release has no baseline, so rules about regressions do not apply.
    applicable_rules = [
        rule for rule in rules if not (first_release and rule.requirement == "max_regression")
    ]
    results = [_decide_rule(rule, estimate(rule, evidence, baseline)) for rule in applicable_rules]

    # If this was only a quick look, leave rules undecided, except rules that only warn, and rules
    # about an exact value that failed: a few prompts are enough to show that such a value is wrong.
    is_quick = bool(evidence.report["settings"].get("quick"))
    for result in results:
        is_wrong = result["verdict"] == "failed" and "equals" in result["requirement"]
        if is_quick and result["severity"] != "warn" and not is_wrong:
            result["verdict"] = "inconclusive"
            result["passed"] = False
            result["reason"] = QUICK
            result["prompts_needed"] = None

    # Add a failed rule for a run that was cut short, and for a report that was edited.
    if evidence.report.get("incomplete"):
        reason = evidence.report["not_measured"].get(
            "incomplete", "what it did not measure could change the verdict"
        )
        results.insert(
            0,
            _decide_rule(
                Rule("incomplete", requirement="equals", threshold=False),
                Estimate(reason=f"the run was cut short: {reason}"),
            ),
        )
    if evidence.is_edited:
        results.insert(
            0,
            _decide_rule(
                Rule("digest", requirement="equals", threshold=True),
                Estimate(reason="the report or its records were changed after they were measured"),
            ),
        )

    # The gate has the worst verdict of its rules. Rules that only warn do not count. After a quick
    # look, a gate never passes.
    verdicts = {result["verdict"] for result in results if result["severity"] != "warn"}
    verdict: Verdict = "passed"
    if "failed" in verdicts:
        verdict = "failed"
    elif "inconclusive" in verdicts or is_quick:
        verdict = "inconclusive"
    return {
        "verdict": verdict,
        "passed": verdict == "passed",
        "first_release": first_release,
        "rules": results,
    }


def _decide_rule(rule: Rule, estimate: Estimate) -> RuleDocument:
    """Decide whether a rule is met, and return its entry for the report's section `gate`.

    Args:
        rule: the rule.
        estimate: the value of the rule's metric with its interval, or the reason why it is missing.
    """
    # Without evidence the rule fails. Otherwise the value is compared with the rule's threshold.
    verdict, reason, needed = (
        ("failed", f"{NO_EVIDENCE}{estimate.reason}", None)
        if estimate.reason
        else compare_with_threshold(rule, estimate)
    )

    # Describe the decision. The key `ci95` is for intervals at the default confidence, 95 %, only.
    return {
        "metric": rule.metric,
        "scope": dict(rule.scope),
        "requirement": {rule.requirement: rule.threshold},
        "confidence": rule.confidence,
        "severity": rule.severity,
        "value": estimate.value,
        "ci95": (
            list(estimate.interval)
            if estimate.interval and rule.confidence == DEFAULT_CONFIDENCE
            else None
        ),
        "verdict": verdict,
        "passed": verdict == "passed",
        "reason": reason,
        "prompts_needed": needed,
    }


def estimate(rule: Rule, evidence: Evidence, baseline: Evidence | None) -> Estimate:
    """Find the value of a rule's metric in a report, with its confidence interval.

    Args:
        rule: the rule. Its metric is either a change since the baseline, a field of a result row,
            or another number of the report.
        evidence: the report and its records.
        baseline: the earlier report to compare with, and its records; None if there is none.
    """
    if rule.requirement == "max_regression":
        return estimate_regression(rule, evidence, baseline)
    if rule.metric in list_row_metrics():
        return _estimate_row_metric(rule, evidence)
    return _estimate_document_metric(rule, evidence.report)


def find_row(report: Report, scope: Mapping[str, object]) -> ResultRow | None:
    """Return the result row of a report that a scope selects; None if there is none.

    Args:
        report: the report.
        scope: key -> the value that the row must have. Without the key `category`, the row must be
            about the whole suite; without `context_bucket`, about prompts that were not cut to a
            certain length. If several rows match, the first is returned.
    """
    filters = {"category": "all", "context_bucket": "all", **scope}
    rows: list[ResultRow] = report["results"]
    for row in rows:
        if all(row.get(name) == value for name, value in filters.items()):
            return row
    return None


def _estimate_row_metric(rule: Rule, evidence: Evidence) -> Estimate:
    """Find the value and the confidence interval of a metric that is a field of a result row.

    Args:
        rule: the rule, whose scope selects the row.
        evidence: the report and its records.

    Returns:
        The value with its interval, or the reason why one of them is missing.
    """
    # If the report lacks the row, or the row lacks the number, evidence is missing.
    row = find_row(evidence.report, rule.scope)
    if row is None:
        return Estimate(reason=f"the report has no row for {_format_scope(rule)}")
    if row.get(rule.metric) is None:
        return Estimate(reason=row["not_measured"].get(rule.metric, "it was not measured"))
    value = row[rule.metric]

    # With confidence 0, the number itself is compared, so no interval is needed.
    if rule.confidence == 0:
        return Estimate(value)

    # Take the interval from the report if the rule asks for the default confidence, at which
    # reports state intervals. Also take it from there if the metric cannot be computed from the
    # records of prompts.
    if rule.metric not in METRICS or rule.confidence == DEFAULT_CONFIDENCE:
        ci95 = row.get(f"{rule.metric}_ci95")
        missing_reason = row["not_measured"].get(f"{rule.metric}_ci95")
        return Estimate(
            value,
            tuple(ci95) if ci95 else None,
            f"no interval ({missing_reason})" if missing_reason else None,
            row["num_prompts"],
        )

    # Otherwise compute the interval at the rule's confidence from the records of the row.
    records = select_records(row, evidence.records)
    seed = evidence.report["settings"]["seed"]
    if not records:
        return Estimate(value, reason="this row has no records")
    bounds = compute_interval(
        METRICS[rule.metric], collect_prompt_sums(records), confidence=rule.confidence, seed=seed
    )
    return Estimate(
        value, bounds, None if bounds else "too few prompts for an interval", row["num_prompts"]
    )


def _estimate_document_metric(rule: Rule, report: Report) -> Estimate:
    """Find a number of the report outside its result rows, with its confidence interval.

    Args:
        rule: the rule. Its metric is a dotted path into report.json, such as
            `lossless.unexplained_divergences`.
        report: the report.

    Returns:
        The value with its interval, if it has one; or the reason why evidence is missing.
    """
    # Follow the path through the sections: all parts of the path but the last name sections. A
    # section that is absent counts as empty.
    *path, name = rule.metric.split(".")
    section: Mapping[str, Any] = report
    for key in path:
        section = section.get(key) or {}
    value = section.get(name)
    ci95 = section.get(f"{name}_ci95")

    # If the number is absent, the report states the reason under the number's path, or under the
    # path of a section that holds the number. With a dot after both paths, only whole names match:
    # the reason of `a` is one for `a.b`, but not for `ab`.
    if value is None:
        for missing_path, reason in report["not_measured"].items():
            if f"{rule.metric}.".startswith(f"{missing_path}."):
                return Estimate(reason=reason)
        return Estimate(reason="it was not measured")

    # If the number has no interval, or the rule asks for confidence 0, the number itself is
    # compared. The report has intervals at the default confidence only, and outside of the result
    # rows there are no records from which others could be computed.
    if ci95 is None or rule.confidence == 0:
        return Estimate(value)
    if rule.confidence != DEFAULT_CONFIDENCE:
        return Estimate(
            value, reason=f"the report has its interval at {DEFAULT_CONFIDENCE:.0%} only"
        )
    return Estimate(value, tuple(ci95))


def estimate_regression(rule: Rule, evidence: Evidence, baseline: Evidence | None) -> Estimate:
    """Estimate how much a metric has changed since an earlier report, the baseline.

    The relative change is new value / old value - 1. Its confidence interval is paired by prompt.

    Args:
        rule: the rule, with the metric and the scope that selects a result row in both reports.
        evidence: the report and its records.
        baseline: the baseline's report and its records; None if there is none.

    Returns:
        The change with its interval, or the reason why it cannot be computed.

    Raises:
        UserError: if the two reports differ in prompts, settings or target.
    """
    if baseline is None:
        return Estimate(
            reason=f"no baseline report was given (baseline={FIRST_RELEASE} for a first release)"
        )

    # Find the row in both reports. Both measurements must be complete, and both rows must have the
    # metric.
    rows = []
    for name, run, side in (
        ("the report", "the run", evidence),
        ("the baseline", "the baseline's run", baseline),
    ):
        row = find_row(side.report, rule.scope)
        if side.report.get("incomplete"):
            return Estimate(reason=f"{run} was cut short")
        if row is None:
            return Estimate(reason=f"{name} has no row for {_format_scope(rule)}")
        # A relative change from 0 is not defined, so 0 counts as absent.
        if not row.get(rule.metric):
            missing_reason = row["not_measured"].get(
                rule.metric, f"it is {row.get(rule.metric, 'absent')}"
            )
            return Estimate(reason=f"not measured in {name}: {missing_reason}")
        rows.append(row)

    # Do not compare times of different machines or engines: their difference does not come from the
    # draft. A place is a machine and an engine.
    metric = METRICS[rule.metric]
    place = _describe_place(evidence.report)
    old_place = _describe_place(baseline.report)
    if metric.is_timed and place != old_place:
        return Estimate(
            reason=f"times cannot be compared: measured on {place}, the baseline on {old_place}"
        )

    # Compute the change and its interval from the prompts, which are the same in both reports.
    row, old_row = rows
    records, old_records = _pair_records(row, old_row, evidence, baseline)
    change, bounds = compute_relative_change(
        metric,
        collect_prompt_sums(records),
        collect_prompt_sums(old_records),
        confidence=rule.confidence,
        seed=evidence.report["settings"]["seed"],
    )
    return Estimate(
        change,
        bounds,
        None if bounds else "too few prompts measured in both reports for an interval",
        len(records),
    )


def _describe_place(report: Report) -> str:
    """Return where a report was measured, as text: the machine and the engine.

    Without an engine, specdistill itself has decoded.
    """
    engine = report.get("engine", {}).get("name", "specdistill")
    return f"{report['hardware']['name']} by {engine}"


def _pair_records(
    row: ResultRow, old_row: ResultRow, evidence: Evidence, baseline: Evidence
) -> tuple[list[PromptRecord], list[PromptRecord]]:
    """Return the records of the same prompts from two reports, in the same order.

    Args:
        row: a result row of the report.
        old_row: the same row of the baseline's report.
        evidence: the report and its records.
        baseline: the baseline's report and its records.

    Raises:
        UserError: if the two rows differ in prompts, settings or target. The error says in what.
    """
    _check_same_weights(evidence.report, baseline.report)
    _check_same_settings(row, old_row, evidence.report, baseline.report)

    # Check that both measured the same prompts. The error shows the first ids of prompts that are
    # in one report only.
    new = {record.id: record for record in select_records(row, evidence.records)}
    old = {record.id: record for record in select_records(old_row, baseline.records)}
    differences = []
    for side, ids in (
        ("the report", sorted(new.keys() - old)),
        ("the baseline", sorted(old.keys() - new)),
    ):
        if ids:
            shown_ids = ids[:NUM_IDS_SHOWN] + ["…"] * (len(ids) > NUM_IDS_SHOWN)
            differences.append(f"{len(ids)} only in {side} ({', '.join(shown_ids)})")
    if differences:
        raise UserError(
            "baseline",
            got=f"other prompts: {'; '.join(differences)}",
            expected="a report on the same prompts",
        )
    return list(new.values()), [old[id] for id in new]


def _check_same_weights(report: Report, old: Report) -> None:
    """Check that two reports measured targets with the same weights, if both state their hashes.

    Args:
        report: the report.
        old: the report of the baseline.

    Raises:
        UserError: if the weights differ.
    """
    target = report["target"]
    old_target = old["target"]
    weights = target.get("weights")
    old_weights = old_target.get("weights")
    if weights and old_weights and weights != old_weights:
        raise UserError(
            "baseline",
            got=f"a report on {old_target['model']} (weights {old_weights[:8]})",
            expected=f"one on {target['model']} (weights {weights[:8]}), like the report",
        )


def _check_same_settings(row: ResultRow, old_row: ResultRow, report: Report, old: Report) -> None:
    """Check that two rows were measured with the same target, suite and settings.

    Args:
        row: a result row of the report.
        old_row: the same row of the baseline's report.
        report: the report.
        old: the baseline's report.

    Raises:
        UserError: if they differ, with the first difference.
    """
    # Collect the values that must be equal: name -> the value in the report and in the baseline.
    # A setting that is absent counts as false: reports from servers have no `compile`.
    settings = report["settings"]
    old_settings = old["settings"]
    compared = {name: (row.get(name), old_row.get(name)) for name in ("suite_version", *SCOPES)}
    compared |= {
        name: (settings.get(name, False), old_settings.get(name, False)) for name in SHARED_SETTINGS
    }
    compared["suite.sha256"] = (report["suite"]["sha256"], old["suite"]["sha256"])
    for name in ("parameters", "dtype", "quantization"):
        compared[f"target.{name}"] = (report["target"].get(name), old["target"].get(name))

    for name, (value, old_value) in compared.items():
        if value != old_value:
            raise UserError(
                "baseline", got=f"{name} {old_value}", expected=f"{value}, as in the report"
            )


def build_changes(evidence: Evidence, baseline: Evidence) -> dict[str, Any]:
    """Build the report's section `baseline`: which metrics changed since an earlier report.

    Args:
        evidence: the report and its records.
        baseline: the earlier report and its records.

    Returns:
        The section. If the two reports cannot be compared, its list `changes` is empty, and
        `reason` says why.
    """
    # Describe the baseline.
    old = baseline.report
    section: dict[str, Any] = {
        **{name: old[name] for name in ("created", "git_revision") if name in old},
        "draft": {name: old["draft"].get(name) for name in ("model", "revision", "method")},
        "changes": [],
    }

    # Compare the main metrics of the whole suite, and the acceptance length of each category.
    metrics = [(metric, ALL_PROMPTS) for metric in CHANGED_METRICS]
    for row in select_main_rows(evidence.report):
        if row["category"] != ALL_PROMPTS:
            metrics.append(("mean_acceptance_length", row["category"]))
    try:
        changes = [
            _build_change(metric, category, evidence, baseline) for metric, category in metrics
        ]
        return {**section, "changes": changes}
    except UserError as error:
        # The reports cannot be compared. That is no reason to fail here, so the section states the
        # reason.
        return {**section, "reason": str(error)}


def _build_change(
    metric: str, category: str, evidence: Evidence, baseline: Evidence
) -> dict[str, Any]:
    """Compare a metric of one category with the baseline.

    Args:
        metric: the name of the metric.
        category: the category of prompts; `all` for the whole suite.
        evidence: the report and its records.
        baseline: the earlier report and its records.

    Returns:
        The old and the new value, the relative change (new / old - 1) and its interval. If one of
        these is absent, the `reason` says why.
    """
    # Take the value from both reports, as far as they have it.
    scope = {"category": category}
    rows = {"old": find_row(baseline.report, scope), "new": find_row(evidence.report, scope)}
    values = {name: row[metric] for name, row in rows.items() if row is not None and metric in row}
    change = {"metric": metric, "category": category, "better": METRICS[metric].better, **values}

    # Estimate the change as for a rule about a regression. The threshold of the rule, 0, has no
    # effect.
    rule = Rule(metric, requirement="max_regression", threshold=0.0, scope=scope)
    estimate = estimate_regression(rule, evidence, baseline)
    change_document = {
        "change": estimate.value,
        "ci95": estimate.interval and list(estimate.interval),
        "reason": estimate.reason,
    }
    return change | {name: part for name, part in change_document.items() if part is not None}


def compare_with_threshold(rule: Rule, estimate: Estimate) -> tuple[Verdict, str, int | None]:
    """Decide whether a measured value meets the threshold of a rule.

    Args:
        rule: the rule.
        estimate: the value of the rule's metric, with its confidence interval.

    Returns:
        The verdict; a phrase that gives the reason in numbers; and, if the verdict is inconclusive,
        how many prompts could decide (None if unknown).
    """
    # `equals` compares the value itself, without its interval.
    if rule.requirement == "equals":
        reason = f"{format_scalar(estimate.value)}, required {format_scalar(rule.threshold)}"
        return "passed" if estimate.value == rule.threshold else "failed", reason, None

    # All other requirements compare the interval. If the interval is too wide, the rule is
    # inconclusive. More prompts would narrow the interval. The rule is decided once one end of the
    # interval, `open_end`, has moved to the value `edge`.
    compare = _compare_loss if rule.requirement == "max_regression" else _compare_bound
    verdict, reason, open_end, edge = compare(rule, estimate)
    if verdict != "inconclusive":
        return verdict, reason, None
    phrase, num_needed = _estimate_prompts_needed(estimate, open_end, edge)
    return verdict, f"{reason}; {phrase}", num_needed


def _compare_loss(rule: Rule, estimate: Estimate) -> tuple[Verdict, str, float, float]:
    """Compare the relative change of a metric with the largest loss that a rule allows.

    Args:
        rule: a `max_regression` rule. Its threshold is the allowed loss, as a share.
        estimate: the relative change and its interval.

    Returns:
        The verdict, the reason, and two numbers, `open_end` and `edge`. The numbers are used only
        if the rule is inconclusive. More prompts would then narrow the interval. `open_end` is the
        end of the interval that still prevents a decision, and `edge` is the value that this end
        must reach. For example, higher is better, a loss of 5 % is allowed, and the change is -3 %
        with the interval [-8 %, +2 %]. The end -8 % prevents a pass, and the rule passes once it
        has moved to -5 %. So `open_end` is -8 %, and `edge` is -5 %.
    """
    # Turn the change into a loss, which is positive if the metric became worse: loss = loss_sign *
    # change. The sign is -1 or 1, so also change = loss_sign * loss. E.g. if higher is better, the
    # sign is -1, and a change of -8 % to +2 % is a loss of -2 % to 8 %. A value without an interval
    # counts as an interval of length 0.
    threshold = float(rule.threshold)
    low, high = estimate.interval or (estimate.value, estimate.value)
    loss_sign = -1 if METRICS[rule.metric].better == "higher" else 1
    least_loss, greatest_loss = sorted((loss_sign * low, loss_sign * high))

    # The rule passes if even the greatest loss of the interval is allowed. It fails if the metric
    # has surely become worse (even the least loss is above 0), possibly by more than is allowed.
    verdict: Verdict = "inconclusive"
    if greatest_loss <= threshold:
        verdict = "passed"
    elif least_loss > 0:
        verdict = "failed"

    # If the rule is inconclusive, more prompts would narrow the interval around the value. If the
    # value is an allowed loss, the rule passes once the greatest loss is allowed, too. Otherwise
    # the rule fails once the least loss is above 0. `open_end` and `edge` are changes, not losses.
    if loss_sign * estimate.value < threshold:
        open_end = loss_sign * greatest_loss
        edge = loss_sign * threshold
    else:
        open_end = loss_sign * least_loss
        edge = 0.0

    # The reason shows the end of the interval with the greatest loss, written as a change of the
    # metric: if higher is better, a loss of 3 % is -3.0%.
    bound = _name_bound("lower" if loss_sign < 0 else "upper", rule, estimate)
    reason = f"{bound}{loss_sign * greatest_loss:+.1%}, allowed {loss_sign * threshold:+.1%}"
    return verdict, reason, open_end, edge


def _compare_bound(rule: Rule, estimate: Estimate) -> tuple[Verdict, str, float, float]:
    """Compare a value with the least (`min`) or the greatest (`max`) value that a rule allows.

    Args:
        rule: a rule with `min` or `max`.
        estimate: the value and its interval.

    Returns:
        The verdict, the reason, and two numbers, `open_end` and `edge`. The numbers are used only
        if the rule is inconclusive. More prompts would then narrow the interval. `open_end` is the
        end of the interval that still prevents a decision, and `edge` is the value that this end
        must reach. For example, 1.5 is the least value allowed, and the value is 1.6 with the
        interval [1.4, 1.8]. The end 1.4 prevents a pass, and the rule passes once it has moved to
        1.5. So `open_end` is 1.4, and `edge` is 1.5.
    """
    # For `max`, change the sign of all numbers, so that the rule is decided like one with `min`: x
    # is at most 5 if -x is at least -5. A value without an interval counts as an interval of
    # length 0.
    threshold = float(rule.threshold)
    low, high = estimate.interval or (estimate.value, estimate.value)
    sign = 1 if rule.requirement == "min" else -1
    least, most = sorted((sign * low, sign * high))

    # The rule passes if the whole interval meets the requirement, and fails if no part of it does.
    verdict: Verdict = "inconclusive"
    if least >= sign * threshold:
        verdict = "passed"
    elif most < sign * threshold:
        verdict = "failed"

    # If the rule is inconclusive, the value lies on one side of the threshold, and one end of the
    # interval (`open_end`) on the other side. It is the worse end if the value meets the
    # requirement, and else the better end.
    is_value_allowed = sign * estimate.value >= sign * threshold
    open_end = sign * (least if is_value_allowed else most)

    # The reason shows the worse end of the interval. If the rule failed, it shows the better end:
    # even that does not meet the requirement.
    worse_side, better_side = ("lower", "upper") if sign > 0 else ("upper", "lower")
    side = better_side if verdict == "failed" else worse_side
    bound = f"{_name_bound(side, rule, estimate)}{format_scalar(low if side == 'lower' else high)}"
    direction = "least" if sign > 0 else "most"
    reason = f"{bound}, required at {direction} {format_scalar(rule.threshold)}"
    return verdict, reason, open_end, threshold


def _name_bound(side: str, rule: Rule, estimate: Estimate) -> str:
    """Return text such as `lower 95% bound `, which a message puts before the bound's value.

    Args:
        side: which bound of the confidence interval is meant: `lower` or `upper`.
        rule: the rule, which states the confidence, e.g. 0.95.
        estimate: the estimate. If it has no interval, the text is empty.
    """
    return f"{side} {rule.confidence:.0%} bound " if estimate.interval else ""


def _estimate_prompts_needed(
    estimate: Estimate, open_end: float, edge: float
) -> tuple[str, int | None]:
    """Estimate how many prompts would decide a rule that is inconclusive.

    The interval is assumed to stay around the same value, and to narrow with the square root of the
    number of prompts. The rule is decided once one end of the interval has moved to a certain edge.

    Args:
        estimate: the value, whose interval is too wide to decide.
        open_end: the end of the interval that must move.
        edge: the value that this end must reach.

    Returns:
        A phrase for the reason, and the number of prompts; None if the number is not known.
    """
    # If the value itself lies on the edge, no number of prompts would decide.
    if not estimate.num_prompts or math.isclose(edge, estimate.value):
        return "the interval includes values on both sides of the limit", None
    # To be n times narrower, the interval needs n² times as many prompts.
    needed = math.ceil(
        estimate.num_prompts * ((open_end - estimate.value) / (edge - estimate.value)) ** 2
    )
    return f"{estimate.num_prompts} prompts cannot tell, {format_about(needed)} could", needed


def _format_scope(rule: Rule) -> str:
    """Return which result row a rule is about, as text: e.g. `category=code`, `the whole suite`."""
    return ", ".join(f"{name}={value}" for name, value in rule.scope.items()) or "the whole suite"
