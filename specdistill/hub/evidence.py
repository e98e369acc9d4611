"""Whether the report of a finished run is evidence for the draft next to it.

A run's folder holds files that can come from different trainings and measurements. So the report must be as it was written, by its digest;
it must have measured this draft on this target, by the hashes of their files; and the gate is decided again, by the rules that the run's
recipe names. What speaks against a release is a refusal. All of them are collected, so that `force` can list what it overrides.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdistill.errors import UserError
from specdistill.files.documents import read_keys
from specdistill.gate.decide import Evidence, changes, judge
from specdistill.gate.rules import load_gate
from specdistill.methods.load import draft_files, draft_hash
from specdistill.methods.recipe import Recipe
from specdistill.methods.target_record import recorded_target
from specdistill.report.files import digest, read_report
from specdistill.report.phrases import evidence, rule_name
from specdistill.statistics.records import PromptRecord
from specdistill.targets.files import SHOWN, TargetFiles, TargetIdentity

DRAFT, RECIPE, PROVENANCE, REPORT = "draft", "run/recipe.yaml", "run/provenance.json", "report"
FINISHED = "the folder of a run that was trained and measured: draft/, run/ and report/"


@dataclass(frozen=True)
class Release:
    """A run, and what there is to publish of it.

    draft: its files, which are published as they are. report, records: judged again; to be written by `write_report`, so that its pages
    are rendered from them. provenance: of the training. made_for: the target that the draft records, or else the recipe's.
    refusals: none for a release; with `force` they are listed on the card.
    """

    run: Path
    recipe: Recipe
    provenance: dict[str, Any]
    draft: tuple[Path, ...]
    report: dict[str, Any]
    records: Sequence[PromptRecord]
    made_for: TargetIdentity
    refusals: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        return str(self.report["draft"]["method"])


def check_finished(run: Path) -> None:
    """Raises UserError for a folder that is no finished run."""
    if missing := [
        part for part in (DRAFT, RECIPE, PROVENANCE, REPORT) if not (run / part).exists()
    ]:
        raise UserError(
            "run", got=f"{run}, which has no {', no '.join(missing)}", expected=FINISHED
        )


def read_release(run: Path, recipe: Recipe, last: Evidence | None = None) -> Release:
    """The release of a finished run's folder, with all that speaks against it.

    last: the repository's last release; None where there is none, and regressions are not asked. Raises UserError for a report or a target
    that cannot be read, ResourceError when the Hub fails.
    """
    report, records = read_report(run / REPORT, "run")
    if not records:
        raise UserError(
            "run", got=f"{run / REPORT}, whose samples.jsonl holds no record", expected=FINISHED
        )
    recorded, named = recorded_target(run / DRAFT, "run"), recipe.target
    revision = named.revision or (
        recorded.revision if recorded and not Path(named.model).is_dir() else None
    )
    target = TargetFiles(named.model, revision, named.adapter).identity
    judged, refused = _judged(recipe, Evidence(report, records), last)
    return Release(
        run=run,
        recipe=recipe,
        provenance=read_keys(run / PROVENANCE, "run", FINISHED),
        draft=tuple(draft_files(run / DRAFT)),
        report=judged,
        records=records,
        made_for=recorded or target,
        refusals=(*_other_files(run, report, records, target), *refused),
    )


def _other_files(
    run: Path, report: Mapping[str, Any], records: Sequence[PromptRecord], target: TargetIdentity
) -> Iterator[str]:
    if report.get("digest") != digest(report, records):
        yield "edited report: report.json and samples.jsonl are not as they were measured: measure again"
    if (measured := report["draft"].get("weights")) != (found := draft_hash(run / DRAFT)):
        stated = measured[:SHOWN] if measured else "not stated"
        yield f"other weights: the measured draft's hash is {stated}, that of {run / DRAFT} {found[:SHOWN]}: measure this one"
    if (measured := report["target"].get("weights")) != target.weights:
        stated = measured[:SHOWN] if measured else "not stated"
        file = (
            "it was measured in llama.cpp with another file; "
            if report.get("engine", {}).get("name") == "llama.cpp"
            else ""
        )
        yield f"another target: {file}the hash of the measured one's weights is {stated}, and the recipe's is {target}"


def _judged(
    recipe: Recipe, measured: Evidence, last: Evidence | None
) -> tuple[dict[str, Any], list[str]]:
    """The report with its gate decided again, and the rules that it does not pass."""
    rules = load_gate(recipe.gate)
    try:
        judged = judge(rules, measured, last, first_release=last is None)
        decided, refusals = judged, []
    except UserError as error:  # the two measured different things
        assert last is not None
        judged = {
            **judge(rules, measured),
            "baseline": changes(measured, last),
        }  # which says why there are none
        decided = judge([rule for rule in rules if rule.requirement != "max_regression"], measured)
        refusals = [f"not compared: {error}"]
    for rule in decided["gate"]["rules"]:
        if rule["verdict"] != "passed" and rule["severity"] != "warn":
            elsewhere = (
                last is not None
                and "max_regression" in rule["requirement"]
                and rule["value"] is None
            )
            # e.g. on another machine: nobody has measured both alike
            name = "not compared" if elsewhere else f"gate {rule['verdict']}"
            refusals.append(f"{name}: {rule_name(rule)}: {evidence(rule)}")
    return judged, refusals
