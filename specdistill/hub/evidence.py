"""Check that the report of a finished run belongs to the draft, and that the draft passes.

The folder of a run may hold files from different trainings and measurements. So three things are
checked:

- The report must be as it was written, by its digest.
- It must have measured this draft on this target, by the hashes of their files.
- The gate is decided again, by the rules that the run's recipe names.

Each reason against a release is a refusal. All refusals are collected, so that `force` can list
what it overrides.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdistill.common.documents import read_keys
from specdistill.common.errors import UserError
from specdistill.evaluation.gate.decide import Evidence, build_changes, judge
from specdistill.evaluation.gate.rules import load_gate
from specdistill.evaluation.report.files import compute_digest, read_report
from specdistill.evaluation.report.phrases import Report, format_evidence, name_rule
from specdistill.evaluation.statistics.records import PromptRecord
from specdistill.methods.load import draft_files, draft_hash
from specdistill.methods.recipe import Recipe
from specdistill.methods.target_record import read_target_record
from specdistill.targets.files import NUM_SHOWN_HASH_DIGITS, TargetFiles, TargetIdentity

# The parts of a run's folder.
DRAFT = "draft"
RECIPE = "run/recipe.yaml"
PROVENANCE = "run/provenance.json"
REPORT = "report"
FINISHED_RUN_HINT = "the folder of a run that was trained and measured: draft/, run/ and report/"


@dataclass(frozen=True)
class Release:
    """A finished run, with the files that are published and the reasons against it.

    Attributes:
        run: the folder of the run.
        recipe: its recipe.
        provenance: the record of the training.
        draft: the files of the draft, which are published as they are.
        report: the report, judged again. It is published with pages that are rendered anew from it
            and from `records`.
        records: the records of the report.
        made_for: the target that the draft records; if it records none, the recipe's target.
        refusals: what speaks against a release. With `force` they are listed on the card.
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
        """The method of the draft."""
        return str(self.report["draft"]["method"])


def check_finished(run: Path) -> None:
    """Raise UserError if a folder is not a run that was trained and measured."""
    missing = [part for part in (DRAFT, RECIPE, PROVENANCE, REPORT) if not (run / part).exists()]
    if missing:
        raise UserError(
            "run", got=f"{run}, which has no {', no '.join(missing)}", expected=FINISHED_RUN_HINT
        )


def read_release(run: Path, recipe: Recipe, last: Evidence | None = None) -> Release:
    """Read the draft, the report and the target of a finished run, and judge the report again.

    Args:
        run: the folder of the run.
        recipe: the recipe of the run.
        last: the report of the last release in the repository. None if there is no release; then
            the gate's rules about regressions do not apply.

    Returns:
        The run as a release, with the reasons against publishing it in `refusals`.

    Raises:
        UserError: for a report or a target that cannot be read.
        ResourceError: when the Hub fails.
    """
    # Read the report.
    report, records = read_report(run / REPORT, "run")
    if not records:
        raise UserError(
            "run",
            got=f"{run / REPORT}, whose samples.jsonl holds no record",
            expected=FINISHED_RUN_HINT,
        )

    # Identify the target. If the recipe names a Hub id without a revision, take the commit that the
    # draft's record states, because the Hub may have a newer one now. A folder has no revisions.
    recorded_target = read_target_record(run / DRAFT, "run")
    recipe_target = recipe.target
    revision = recipe_target.revision
    if not revision and recorded_target and not Path(recipe_target.model).is_dir():
        revision = recorded_target.revision
    target = TargetFiles(recipe_target.model, revision, recipe_target.adapter).identity

    # Decide the gate again, and collect the reasons against the release.
    mismatches = _find_mismatches(run, report, records, target)
    judged, failures = _judge_again(recipe, Evidence(report, records), last)
    return Release(
        run=run,
        recipe=recipe,
        provenance=read_keys(run / PROVENANCE, "run", FINISHED_RUN_HINT),
        draft=tuple(draft_files(run / DRAFT)),
        report=judged,
        records=records,
        made_for=recorded_target or target,
        refusals=(*mismatches, *failures),
    )


def _find_mismatches(
    run: Path, report: Report, records: Sequence[PromptRecord], target: TargetIdentity
) -> Iterator[str]:
    """Yield a reason if the report was edited, and if it is of another draft or another target.

    Args:
        run: the folder of the run, which holds the draft.
        report: the report of the measurement.
        records: the records of the report, one for each prompt.
        target: the identity of the recipe's target.
    """
    # Neither the report nor its records may have been edited.
    if report.get("digest") != compute_digest(report, records):
        yield (
            "edited report: report.json and samples.jsonl are not as they were measured: measure"
            " again"
        )

    # The report must be of the draft that is now in the folder.
    measured_draft = report["draft"].get("weights")
    current_hash = draft_hash(run / DRAFT)
    if measured_draft != current_hash:
        measured_text = measured_draft[:NUM_SHOWN_HASH_DIGITS] if measured_draft else "not stated"
        yield (
            f"other weights: the hash of the measured draft is {measured_text}, and that of"
            f" {run / DRAFT} is {current_hash[:NUM_SHOWN_HASH_DIGITS]}: measure that draft"
        )

    # The report must be of the recipe's target. A measurement in llama.cpp may have loaded a GGUF
    # file that was converted from the target. Such a file has another hash, as the note explains.
    measured_target = report["target"].get("weights")
    if measured_target != target.weights:
        measured_text = measured_target[:NUM_SHOWN_HASH_DIGITS] if measured_target else "not stated"
        is_llama_cpp = report.get("engine", {}).get("name") == "llama.cpp"
        note = "it was measured in llama.cpp with another file; " if is_llama_cpp else ""
        yield (
            f"another target: {note}the hash of the measured target's weights is {measured_text},"
            f" and the recipe's target is {target}"
        )


def _judge_again(
    recipe: Recipe, measured: Evidence, last: Evidence | None
) -> tuple[dict[str, Any], list[str]]:
    """Decide the gate of a report again, and list a refusal for each rule that is not passed.

    Args:
        recipe: the recipe of the run, which names the gate.
        measured: the report and its records.
        last: the report and the records of the last release; None if there is no release.

    Returns:
        The report with the new verdicts, and the refusals.
    """
    rules = load_gate(recipe.gate)
    try:
        published_report = judge(rules, measured, last, first_release=last is None)
        report_for_refusals = published_report
        refusals = []
    except UserError as error:
        # The two reports measured different things, so rules about regressions cannot be decided.
        # The published report has these rules without a value. Its section `baseline` says why.
        assert last is not None
        changes = build_changes(measured, last)
        published_report = {**judge(rules, measured), "baseline": changes}

        # One refusal is enough for all rules about regressions. So judge once more without them:
        # the loop below then adds refusals for the other rules only.
        other_rules = [rule for rule in rules if rule.requirement != "max_regression"]
        report_for_refusals = judge(other_rules, measured)
        refusals = [f"not compared: {error}"]

    # Each rule that did not pass is a refusal, unless it only warns.
    for rule in report_for_refusals["gate"]["rules"]:
        if rule["verdict"] != "passed" and rule["severity"] != "warn":
            # A rule about regressions is here only if `judge` raised no error above. It may have no
            # value nevertheless: for example, times of different machines are not compared.
            is_regression = last is not None and "max_regression" in rule["requirement"]
            is_not_compared = is_regression and rule["value"] is None
            reason = "not compared" if is_not_compared else f"gate {rule['verdict']}"
            refusals.append(f"{reason}: {name_rule(rule)}: {format_evidence(rule)}")
    return published_report, refusals
