"""Measured configurations: kept on disk, so that a measurement that was interrupted resumes with the next one, and made into a report.

Each is a file, named by a hash of all that it depends on: another draft, target, suite, setting or machine is measured again.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from specdistill import __version__
from specdistill.decoding.proposer import Proposer
from specdistill.errors import logger
from specdistill.measurement.configurations import MeasurementPlan, Settings
from specdistill.measurement.hardware import hardware, software
from specdistill.measurement.losslessness import Divergences, summary
from specdistill.measurement.measure import Journal
from specdistill.methods.load import locate
from specdistill.project import git_revision
from specdistill.report.build import build_report, context_rows, headline, result_rows, theory
from specdistill.report.files import staged
from specdistill.statistics.records import PromptRecord, records_of
from specdistill.statistics.theory import RoundCost
from specdistill.suites.suite import Suite
from specdistill.targets.files import content_hash
from specdistill.targets.frozen import FrozenTarget

FINGERPRINT_DIGITS = 32
FINISHED = re.compile(rf"[0-9a-f]{{{FINGERPRINT_DIGITS}}}\.jsonl?")


@dataclass(frozen=True)
class MeasuredConfiguration:
    """The records of a configuration, and what measuring it took (see `resources_used`).

    compared: see `greedy_check`; empty where greedy decoding was not checked.
    """

    records: list[PromptRecord]
    compared: Divergences
    took: dict[str, Any]


@dataclass(frozen=True)
class Measurement:
    """All configurations, the main one first, and of that its settings, the test of sampling or why there is none, what rounds cost at
    every K' up to K; and what all of it took (see `resources_used`).

    weights: sha256 of several targets' weights. Processes but the first of a launch have no more than the settings and configurations.
    """

    settings: Settings
    measured: Sequence[MeasuredConfiguration]
    tested: dict[str, Any] | str = ""
    costs: Sequence[RoundCost] = ()
    took: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None

    @property
    def records(self) -> list[PromptRecord]:
        return [record for entry in self.measured for record in entry.records]


@dataclass(frozen=True)
class FinishedConfigurations:
    """The files of a folder. identity: what a measurement depends on in addition to its plan, as JSON."""

    folder: Path
    identity: Mapping[str, Any]

    def measured(
        self, plan: MeasurementPlan, measure: Callable[[Journal], MeasuredConfiguration]
    ) -> MeasuredConfiguration:
        """As an earlier run has finished it, or measured now, with what that had decoded, and kept whole or not at all.

        Raises ResourceError when the disk fails.
        """
        path = self.folder / f"{fingerprint(plan, self.identity)}.json"
        if path.exists():
            return TypeAdapter(MeasuredConfiguration).validate_json(path.read_bytes())
        journal = Journal(path.with_suffix(".jsonl"))
        if journal.known:
            logger.info(
                f"Resuming: {len(journal.known)} batches were decoded before the measurement was interrupted"
            )
        made = measure(journal)
        made.took["seconds"] += journal.seconds
        with staged(self.folder) as staging:
            (staging / path.name).write_text(json.dumps(asdict(made)), encoding="utf-8")
        journal.path.unlink(missing_ok=True)
        return made


def discard_finished(folder: Path) -> None:
    """Remove the files of finished configurations, and their folder if it holds nothing else."""
    for path in folder.glob("*.json*"):
        if FINISHED.fullmatch(path.name):
            path.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def measurement_identity(
    target: FrozenTarget, proposer: Proposer, suite: Suite, *, method: str, draft: str | None
) -> dict[str, Any]:
    """What records depend on in addition to a plan. draft: the folder or Hub id; None for a method without weights."""
    files = (
        (path for path in locate(draft, key="eval.draft").rglob("*") if path.is_file())
        if draft
        else ()
    )
    return {
        "specdistill": [__version__, git_revision()],
        "target": [
            target.identity.weights,
            target.quantization,
            target.dtype,
            target.config._attn_implementation,
        ],
        "draft": [
            method,
            content_hash(files),
            dict(proposer.settings),
            proposer.vocabulary is None,
        ],
        "suite": [suite.name, suite.version, suite.sha256],
        "machine": [hardware(target.device), software()],
    }


def fingerprint(plan: MeasurementPlan, identity: Mapping[str, Any]) -> str:
    """A hash of all that the plan's records depend on."""
    prompts = [(prompt.id, prompt.category, prompt.token_ids) for prompt in plan.prompts]
    content = json.dumps([identity, asdict(plan.settings), prompts], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def draft_report(
    target: FrozenTarget,
    proposer: Proposer,
    suite: Suite,
    found: Measurement,
    draft: Mapping[str, Any],
) -> dict[str, Any]:
    """The report of the main configuration, with rows for the others. draft: see `describe_draft`."""
    settings, tested = found.settings, not isinstance(found.tested, str)
    rows = [
        result_rows(entry.records, suite, entry.records[0].configuration, seed=settings.seed)
        for entry in found.measured
    ]
    if "draft_length" in proposer.settings:
        for entry, of_configuration in zip(found.measured, rows, strict=True):
            for row in of_configuration:
                lengths = [
                    round.num_drafted
                    for record in records_of(row, entry.records)
                    for round in record.rounds
                ]
                row["num_rounds_per_length"] = [
                    lengths.count(k) for k in range(row["num_speculative_tokens"] + 1)
                ]
    weights = found.weights or (target.identity.weights if target.files else None)
    stated = {"weights": weights, "quantization": target.quantization}
    described = {"model": target.name, "revision": target.revision, "dtype": target.dtype}
    described |= {name: value for name, value in stated.items() if value}
    return build_report(
        target={**described, "parameters": target.num_parameters},
        draft={**draft, "parameters": proposer.num_parameters, "bytes": proposer.num_bytes},
        hardware=hardware(target.device),
        software=software(),
        settings={
            **settings.described,
            "compile": settings.compile,
            "draft_sampling": "probabilistic"
            if proposer.draws(settings.sampling, settings.tree)
            else "greedy",
            "drafting": dict(proposer.settings),
        },
        suite=suite,
        results=[row for of_configuration in rows for row in of_configuration],
        context=context_rows(found.measured[0].records),
        headline=headline(rows[0], found.measured[0].records),
        theory=theory(
            rows[0][0], found.costs, proposer.passes, depends_on_width=proposer.depends_on_width
        ),
        lossless={
            **summary([one for entry in found.measured for one in entry.compared]),
            **({"sampling_test": found.tested} if tested else {}),
        },
        not_measured={} if tested else {"lossless.sampling_test": str(found.tested)},
        measurement=dict(found.took),
        git_revision=git_revision(),
    )
