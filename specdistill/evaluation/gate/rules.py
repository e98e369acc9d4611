"""The rules of a gate, as data: a YAML list that says what a report must show.

Each rule has:

- a `metric`: a field of a result row, or a dotted path into report.json.
- optionally a `scope`: keys of SCOPES. Without it the rule is about the first row, the whole suite.
- exactly one requirement: `min`, `max`, `equals`, or `max_regression` (a share, relative to a
  baseline report).
- optionally a `confidence`: that of the interval whose bound is compared. The default is 0.95, and
  0 compares the number itself.
- optionally `severity: warn`: the rule is then a warning, which is reported and does not decide.
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
    """A rule of a gate, as the module describes it.

    Attributes:
        metric: a field of a result row, or a dotted path into report.json.
        requirement: `min`, `max`, `equals` or `max_regression`.
        threshold: the value that the requirement compares with.
        scope: the row that the metric is taken from; empty for the whole suite.
        confidence: that of the interval whose bound is compared; 0 compares the number itself.
        severity: whether a rule that is not met fails the gate, or warns.
    """

    metric: str
    requirement: str
    threshold: float | bool | str
    scope: Mapping[str, object] = field(default_factory=dict)
    confidence: float = DEFAULT_CONFIDENCE
    severity: Literal["fail", "warn"] = "fail"


def load_gate(name: str, key: str = "gate") -> list[Rule]:
    """Load the rules of a gate, by name or path.

    A name without an ending is always that of a gate that ships with the package, whatever lies in
    the working directory.

    Raises:
        UserError: for an unknown gate, key or metric, and for a rule without exactly one
            requirement.
    """
    places = (
        (Path(name), ROOT / name) if name.endswith((".yaml", ".yml")) else (GATES / f"{name}.yaml",)
    )
    path = next((path for path in places if path.is_file()), None)
    if path is None:
        gate_names = sorted(path.stem for path in GATES.glob("*.yaml"))
        raise UserError(
            key,
            got=name,
            expected=f"one of {', '.join(gate_names)}, or a gate YAML",
            nearest=find_nearest(name, gate_names),
        )
    with convert_errors((ValueError, OSError), key, path, "a readable YAML file"):
        entries = read_yaml(path)
    if not isinstance(entries, list) or not entries:
        raise UserError(key, got=f"{path}, which holds no list", expected="a YAML list of rules")
    return [
        read_rule(f"{path.name} rule {number}", entry)
        for number, entry in enumerate(entries, start=1)
    ]


def read_rule(place: str, entry: Any) -> Rule:
    """Read a rule from its entry in a gate's YAML.

    Raises:
        UserError: naming the place, for an entry that is no rule.
    """
    # A rule has a metric and exactly one requirement.
    _check_keys(place, entry, ("metric", "scope", *REQUIREMENTS, "confidence", "severity"))
    requirements = [name for name in REQUIREMENTS if name in entry]
    if len(requirements) != 1:
        raise UserError(
            place,
            got=" and ".join(requirements) or "no requirement",
            expected=f"exactly one of {', '.join(REQUIREMENTS)}",
        )
    (requirement,) = requirements
    metric = entry.get("metric")
    threshold = entry[requirement]
    scope = entry.get("scope") or {}
    confidence = entry.get("confidence", DEFAULT_CONFIDENCE)
    severity = entry.get("severity", "fail")

    # Check each part of the rule, because a gate is often written by hand.
    _check_choice(
        f"{place}: metric",
        metric,
        (*list_row_metrics(), *list_document_metrics()),
        "a metric of the report",
    )
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
    # A bucket is a name, but YAML reads it as a number.
    if "context_bucket" in scope:
        scope = {**scope, "context_bucket": str(scope["context_bucket"])}
    _check_number(f"{place}: confidence", confidence, share=True)
    _check_choice(f"{place}: severity", severity, ("fail", "warn"), "fail or warn")
    return Rule(metric, requirement, threshold, scope, confidence, severity)


def _check_keys(place: str, entry: object, known_keys: Sequence[str]) -> None:
    if not isinstance(entry, dict):
        raise UserError(place, got=repr(entry), expected=f"keys of {', '.join(known_keys)}")
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
    if value not in choices:
        raise UserError(
            place, got=got or value, expected=expected, nearest=find_nearest(str(value), choices)
        )


def _check_number(place: str, value: Any, *, share: bool = False) -> None:
    is_number = (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    )
    if not is_number or (share and not 0 <= value < 1):
        raise UserError(
            place, got=repr(value), expected="a share from 0 to below 1" if share else "a number"
        )
