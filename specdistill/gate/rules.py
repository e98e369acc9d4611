"""A gate's rules, as data: a YAML list that names what a report must show.

Each rule has a `metric` (a field of a result row, or a dotted path into report.json), optionally a `scope` (keys of SCOPES; without
it the first row, the whole suite), and exactly one requirement: `min`, `max`, `equals`, or `max_regression` (a share, against a
baseline report). `confidence` is that of the interval whose bound is compared (default 0.95; 0 compares the number itself). A rule with
`severity: warn` is a warning: it is reported and does not decide.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdistill.errors import UserError, nearest, refusing
from specdistill.files.documents import read_yaml
from specdistill.project import GATES, ROOT
from specdistill.report.files import document_metrics, row_metrics
from specdistill.report.phrases import DEFAULT_CONFIDENCE
from specdistill.statistics.metrics import METRICS

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
    metric: str
    requirement: str
    threshold: float | bool | str
    scope: Mapping[str, Any] = field(default_factory=dict)
    confidence: float = DEFAULT_CONFIDENCE
    severity: str = "fail"


def load_gate(name: str) -> list[Rule]:
    """The rules of a gate, by name or path. Raises UserError for an unknown gate, key or metric, and for a rule without exactly one
    requirement.

    A name without an ending is always that of a gate that ships, whatever lies in the working directory.
    """
    places = (
        (Path(name), ROOT / name) if name.endswith((".yaml", ".yml")) else (GATES / f"{name}.yaml",)
    )
    path = next((path for path in places if path.is_file()), None)
    if path is None:
        known = sorted(path.stem for path in GATES.glob("*.yaml"))
        raise UserError(
            "gate",
            got=name,
            expected=f"one of {', '.join(known)}, or a gate YAML",
            nearest=nearest(name, known),
        )
    with refusing((ValueError, OSError), "gate", path, "a readable YAML file"):
        entries = read_yaml(path)
    if not isinstance(entries, list) or not entries:
        raise UserError("gate", got=f"{path}, which holds no list", expected="a YAML list of rules")
    return [
        read_rule(f"{path.name} rule {number}", entry)
        for number, entry in enumerate(entries, start=1)
    ]


def read_rule(place: str, entry: Any) -> Rule:
    """A rule from its entry in a gate's YAML. Raises UserError, naming its place, for what is none."""
    _check_keys(place, entry, ("metric", "scope", *REQUIREMENTS, "confidence", "severity"))
    requirements = [name for name in REQUIREMENTS if name in entry]
    if len(requirements) != 1:
        got = " and ".join(requirements) or "no requirement"
        raise UserError(place, got=got, expected=f"exactly one of {', '.join(REQUIREMENTS)}")
    (requirement,) = requirements
    metric, threshold, scope = entry.get("metric"), entry[requirement], entry.get("scope") or {}
    confidence, severity = (
        entry.get("confidence", DEFAULT_CONFIDENCE),
        entry.get("severity", "fail"),
    )
    _check_choice(
        f"{place}: metric", metric, (*row_metrics(), *document_metrics()), "a metric of the report"
    )
    if requirement == "max_regression":
        if metric not in METRICS:
            expected = f"one of {', '.join(METRICS)}, which can be compared prompt by prompt"
            raise UserError(f"{place}: max_regression", got=f"metric {metric}", expected=expected)
        _check_number(f"{place}: max_regression", threshold, share=True)
    elif requirement != "equals" or not isinstance(threshold, bool):
        _check_number(f"{place}: {requirement}", threshold)
    _check_keys(f"{place}: scope", scope, SCOPES)
    if "context_bucket" in scope:  # a name, which YAML reads as a number
        scope = {**scope, "context_bucket": str(scope["context_bucket"])}
    _check_number(f"{place}: confidence", confidence, share=True)
    _check_choice(f"{place}: severity", severity, ("fail", "warn"), "fail or warn")
    return Rule(metric, requirement, threshold, scope, confidence, severity)


def _check_keys(place: str, entry: Any, known: Sequence[str]) -> None:
    if not isinstance(entry, dict):
        raise UserError(place, got=repr(entry), expected=f"keys of {', '.join(known)}")
    for key in entry:
        _check_choice(
            f"{place}: {key}", key, known, f"one of {', '.join(known)}", got="an unknown key"
        )


def _check_choice(
    place: str, value: Any, known: Sequence[str], expected: str, got: str | None = None
) -> None:
    if value not in known:
        raise UserError(
            place, got=got or value, expected=expected, nearest=nearest(str(value), known)
        )


def _check_number(place: str, value: Any, *, share: bool = False) -> None:
    is_number = (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    )
    if not is_number or (share and not 0 <= value < 1):
        raise UserError(
            place, got=repr(value), expected="a share from 0 to below 1" if share else "a number"
        )
