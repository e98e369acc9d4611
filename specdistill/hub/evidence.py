"""Whether the report of a finished run is evidence for exactly the weights beside it.

A run's folder holds the draft, the record of its training and the report of its measurement: four files that anybody can edit, and that can
come from different runs. So nothing that a report says of itself is taken for granted. Its draft and target are told by the hashes of their
files, its numbers are computed again from its records, its records are held against the tokenizer, the suite and some prompts that are
decoded again, and the gate is decided again, by the rules that the recipe names, those that the report was measured under, and those that
every release must pass.

What speaks against a release is a refusal. All of them are collected, so that `force` can list what it overrode. Whoever rewrites records
and digest with this package's own code on their own machine can still claim times that were never measured.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdistill.errors import UserError
from specdistill.gate.decide import Evidence, judge
from specdistill.gate.rules import Rule, load_gate
from specdistill.methods.load import draft_files, draft_hash
from specdistill.methods.recipe import Recipe
from specdistill.recipe.load import load_recipe
from specdistill.report.files import digest, read_report
from specdistill.statistics.records import PromptRecord

DRAFT, RECIPE, PROVENANCE, REPORT = "draft", "run/recipe.yaml", "run/provenance.json", "report"
FINISHED = "the folder of a run that was trained and measured: draft/, run/ and report/"
EVERY_RELEASE = {"specdistill": "default"}  # the gate that any release passes, by what measured it; of servers `server`
SPOT_CHECK = 8  # prompts that are decoded again


@dataclass(frozen=True)
class Refusal:
    """Why a run is not released. name: the kind, as `other weights`; why: what was found and what was expected, in one line."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@dataclass(frozen=True)
class Release:
    """A run, and what there is to publish of it.

    draft: its files, which are published as they are. report, records: judged again; to be written by `write_report`, so that its pages
    are rendered from them. provenance: of the training. refusals: none for a release; with `force` they are listed on the card.
    notes: what a reader should know and what is no reason to refuse.
    """

    run: Path
    recipe: Recipe
    provenance: dict[str, Any]
    draft: tuple[Path, ...]
    report: dict[str, Any]
    records: list[PromptRecord]
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...] = ()

    @property
    def recipe_file(self) -> Path:
        return self.run / RECIPE

    @property
    def provenance_file(self) -> Path:
        return self.run / PROVENANCE


def check_evidence(
    run: Path,
    *,
    baseline: Evidence | None = None,
    first_release: bool = False,
    suite: str | None = None,
    spot_check: int = SPOT_CHECK,
) -> Release:
    """The release of a run's folder, with all that speaks against it.

    baseline: the repository's last release (`releases.last_release`). first_release: there is none, and regressions are not asked.
    suite: what was measured, where the recipe names no suite. spot_check: prompts to decode again.

    Raises UserError for a folder that is no finished run, and for a report or a recipe that cannot be read.
    """
    for part in (DRAFT, RECIPE, PROVENANCE, REPORT):
        if not (run / part).exists():
            raise UserError("run", got=f"{run}, which has no {part}", expected=FINISHED)
    recipe = load_recipe(Recipe, [f"recipe={run / RECIPE}"])
    provenance = json.loads((run / PROVENANCE).read_text(encoding="utf-8"))
    report, records = read_report(run / REPORT, "run")
    measured = Evidence(report, records)
    judged = judge(rules_of(recipe, report), measured, baseline, first_release=first_release)
    refusals = [*_other_weights(run, report), *_edited(measured), *_not_passed(judged)]
    return Release(run, recipe, provenance, tuple(draft_files(run / DRAFT)), judged, records, tuple(refusals))


def rules_of(recipe: Recipe, report: dict[str, Any]) -> list[Rule]:
    """What is asked of a release: by the recipe's gate, by the rules that the report was measured under, and of every release."""
    names = [recipe.gate, EVERY_RELEASE.get(report.get("engine", {}).get("name", "specdistill"), "server")]
    rules = [rule for name in names for rule in load_gate(name)]
    return [rule for index, rule in enumerate(rules) if rule not in rules[:index]]


def _other_weights(run: Path, report: dict[str, Any]) -> Iterator[Refusal]:
    measured, found = report["draft"].get("weights"), draft_hash(run / DRAFT)
    if measured != found:
        said = f"those with hash {measured[:8]}" if measured else "unknown ones"
        yield Refusal("other weights", f"the report measured {said}, and {run / DRAFT} has {found[:8]}; measure this draft")


def _edited(measured: Evidence) -> Iterator[Refusal]:
    stated = measured.report.get("digest")
    if stated != digest(measured.report, measured.records):
        yield Refusal("edited report", "report.json and samples.jsonl are not as they were measured; measure again")


def _not_passed(report: dict[str, Any]) -> Iterator[Refusal]:
    for rule in report["gate"]["rules"]:
        if rule["verdict"] != "passed" and rule["severity"] != "warn":
            yield Refusal(f"gate {rule['verdict']}", f"{rule['metric']}: {rule['reason']}")
