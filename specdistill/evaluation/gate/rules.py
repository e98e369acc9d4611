"""Read the rules of a gate: a YAML list that says what a report must show.

Each rule has:

- a `metric`: a field of a result row, or a dotted path into report.json.
- optionally a `scope`: keys of SCOPES, which select the result row. Without a scope the rule is
  about the first row, the whole suite.
- exactly one requirement: `min`, `max`, `equals`, or `max_regression`. The last one is the largest
  loss relative to a baseline report, as a share.
- optionally a `confidence`: the confidence level of the interval that is compared. The default is
  0.95. With 0 the number itself is compared, whatever its interval.
- optionally `severity: warn`: the rule is then a warning, which is reported and does not decide.

For example, `{metric: speedup, min: 1.0}` asks that no part of the speedup's interval is below 1.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from specdistill.common.documents import read_yaml
from specdistill.common.errors import UserError, convert_errors, find_nearest
from specdistill.common.project import GATES, ROOT
from specdistill.evaluation.report.files import list_document_metrics, list_row_metrics
from specdistill.evaluation.report.phrases import DEFAULT_CONFIDENCE
from specdistill.evaluation.statistics.metrics import METRICS

# The keys of a rule that state a requirement, and the keys of a scope.
REQUIREMENTS = ("min", "max", "equals", "max_regression")
SCOPES = (
    "suite",
    "category",
    "temperature",
    "context_bucket",
    "num_speculative_tokens",
    "batch_size",
    "tree",
)


@dataclass(frozen=True)
class Rule:
    """A rule of a gate (see the docstring of the module).

    Attributes:
        metric: a field of a result row, or a dotted path into report.json.
        requirement: `min`, `max`, `equals` or `max_regression`.
        threshold: the value that the metric is compared with.
        scope: key -> value of the result row that the metric is taken from; empty for the row of
            the whole suite.
        confidence: the confidence level of the interval that is compared; 0 compares the number
            itself.
        severity: whether a rule that is not met fails the gate, or only warns.
    """

    metric: str
    requirement: str
    threshold: float | bool | str
    scope: Mapping[str, object] = field(default_factory=dict)
    confidence: float = DEFAULT_CONFIDENCE
    severity: Literal["fail", "warn"] = "fail"


def load_gate(name: str, key: str = "gate") -> list[Rule]:
    """Load the rules of a gate, which a report must meet, from a YAML file.

    Args:
        name: the name of a gate that comes with the package, or the path of a YAML file. A path
            must end with `.yaml` or `.yml`.
        key: the key of the recipe or command, with which error messages begin.

    Raises:
        UserError: for an unknown gate, key or metric, and for a rule without exactly one
            requirement.
    """
    # Find the file of the gate. A path may be relative to the working directory or to the project.
    places = [GATES / f"{name}.yaml"]
    if name.endswith((".yaml", ".yml")):
        places = [Path(name), ROOT / name]
    existing = [place for place in places if place.is_file()]
    if not existing:
        gate_names = sorted(path.stem for path in GATES.glob("*.yaml"))
        raise UserError(
            key,
            got=name,
            expected=f"one of {', '.join(gate_names)}, or the path of a YAML file",
            nearest=find_nearest(name, gate_names),
        )
    path = existing[0]

    # Read its rules.
    with convert_errors((ValueError, OSError), key, path, "a readable YAML file"):
        entries = read_yaml(path)
    if not isinstance(entries, list) or not entries:
        raise UserError(key, got=f"{path}, which holds no list", expected="a YAML list of rules")
    return [
        read_rule(f"{path.name} rule {number}", entry)
        for number, entry in enumerate(entries, start=1)
    ]


def read_rule(place: str, entry: Any) -> Rule:
    """Read a rule from its entry in a gate's YAML, and check all parts of it.

    Args:
        place: the file and the number of the rule, which errors name.
        entry: the entry, as YAML reads it.

    Raises:
        UserError: for an entry that is not a valid rule.
    """
    # Check that the rule has exactly one requirement: `min`, `max`, `equals` or `max_regression`.
    _check_keys(place, entry, ("metric", "scope", *REQUIREMENTS, "confidence", "severity"))
    requirements = [name for name in REQUIREMENTS if name in entry]
    if len(requirements) != 1:
        raise UserError(
            place,
            got=" and ".join(requirements) or "no requirement",
            expected=f"exactly one of {', '.join(REQUIREMENTS)}",
        )
    (requirement,) = requirements

    # Take the other parts of the rule, or their defaults.
    metric = entry.get("metric")
    threshold = entry[requirement]
    scope = entry.get("scope") or {}
    confidence = entry.get("confidence", DEFAULT_CONFIDENCE)
    severity = entry.get("severity", "fail")

    # Check each part, because gates are written by hand. The metric must be one that a report has.
    _check_choice(
        f"{place}: metric",
        metric,
        (*list_row_metrics(), *list_document_metrics()),
        "a metric of the report",
    )
    # A regression is computed from prompts, so the metric must be known for each prompt. The
    # allowed loss is a share below 1. Other thresholds are numbers, except that `equals` may
    # compare with true or false.
    if requirement == "max_regression":
        if metric not in METRICS:
            raise UserError(
                f"{place}: max_regression",
                got=f"metric {metric}",
                expected=f"one of {', '.join(METRICS)}, which can be compared prompt by prompt",
            )
        _check_number(f"{place}: max_regression", threshold, share=True)
    elif requirement != "equals" or not isinstance(threshold, bool):
        _check_number(f"{place}: {requirement}", threshold)
    _check_keys(f"{place}: scope", scope, SCOPES)
    # A context bucket (the length to which prompts were cut) is a string in the report, but YAML
    # reads it as a number.
    if "context_bucket" in scope:
        scope = {**scope, "context_bucket": str(scope["context_bucket"])}
    _check_number(f"{place}: confidence", confidence, share=True)
    _check_choice(f"{place}: severity", severity, ("fail", "warn"), "fail or warn")
    return Rule(metric, requirement, threshold, scope, confidence, severity)


def _check_keys(place: str, entry: object, known_keys: Sequence[str]) -> None:
    """Raise UserError if an entry of the YAML is not a dict, or has an unknown key.

    Args:
        place: the file and the rule, which the error names.
        entry: the entry, as YAML reads it.
        known_keys: the keys that the entry may have.
    """
    if not isinstance(entry, dict):
        raise UserError(place, got=repr(entry), expected=f"a dict of {', '.join(known_keys)}")
    for key in entry:
        _check_choice(
            f"{place}: {key}",
            key,
            known_keys,
            f"one of {', '.join(known_keys)}",
            got="an unknown key",
        )


def _check_choice(
    place: str, value: object, choices: Sequence[str], expected: str, got: str | None = None
) -> None:
    """Raise UserError if a value is not one of the choices. The error suggests the nearest choice.

    Args:
        place: the file, rule and key, which the error names.
        value: the value to check.
        choices: the valid values.
        expected: a phrase for the valid values in the error.
        got: a phrase for the invalid value in the error; None for the value itself.
    """
    if value not in choices:
        raise UserError(
            place, got=got or value, expected=expected, nearest=find_nearest(str(value), choices)
        )


def _check_number(place: str, value: Any, *, share: bool = False) -> None:
    """Raise UserError if a value is not a finite number.

    Args:
        place: the file, rule and key, which the error names.
        value: the value to check.
        share: whether the value must also be at least 0 and below 1.
    """
    # In Python a bool is an int, too, but `min: true` must be refused.
    is_number = (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    )
    if not is_number or (share and not 0 <= value < 1):
        raise UserError(
            place, got=repr(value), expected="a number from 0 to below 1" if share else "a number"
        )
