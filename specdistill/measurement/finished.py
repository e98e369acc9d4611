"""Finished configurations on disk, so that a measurement that was interrupted resumes with the next one.

Each is a file, named by a hash of all that it depends on: another draft, target, suite, setting or machine is measured anew.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdistill import __version__
from specdistill.decoding.proposer import Proposer
from specdistill.errors import ResourceError
from specdistill.measurement.configurations import Plan
from specdistill.measurement.hardware import hardware, software
from specdistill.methods.load import locate
from specdistill.project import git_revision
from specdistill.statistics.records import PromptRecord, read_record
from specdistill.suites.suite import Suite
from specdistill.targets.frozen import FrozenTarget

FINGERPRINT_DIGITS = 32


@dataclass(frozen=True)
class MeasuredConfiguration:
    """The records of a configuration, and what measuring it took (see `resources_used`).

    lossless: the greedy part of the report's `lossless`; None where greedy decoding was not checked.
    """

    records: list[PromptRecord]
    lossless: dict[str, Any] | None
    took: dict[str, Any]


@dataclass(frozen=True)
class FinishedConfigurations:
    """The files of a folder. identity: what a measurement depends on besides its plan, as JSON."""

    folder: Path
    identity: Mapping[str, Any]

    def read(self, plan: Plan) -> MeasuredConfiguration | None:
        path = self._path(plan)
        if not path.exists():
            return None
        stored = json.loads(path.read_text(encoding="utf-8"))
        return MeasuredConfiguration([read_record(row) for row in stored["records"]], stored["lossless"], stored["took"])

    def write(self, plan: Plan, measured: MeasuredConfiguration) -> MeasuredConfiguration:
        """Whole or not at all; returns it as `read` would. Raises ResourceError when the disk fails."""
        path = self._path(plan)
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(asdict(measured)), encoding="utf-8")
            os.replace(unfinished, path)
        except OSError as error:
            raise ResourceError(
                f"could not write {path} ({error.strerror})", next_step="free the disk and start again"
            ) from error
        stored = self.read(plan)
        assert stored is not None
        return stored

    def _path(self, plan: Plan) -> Path:
        return self.folder / f"{fingerprint(plan, self.identity)}.json"


def measurement_identity(
    target: FrozenTarget, proposer: Proposer, suite: Suite, *, method: str, draft: str | None
) -> dict[str, Any]:
    """What records depend on besides a plan. draft: the folder or Hub id; None for a method without weights."""
    return {
        "specdistill": [__version__, git_revision()],
        "target": [target.fingerprint(), target.dtype, target.config._attn_implementation],
        "draft": [
            method,
            draft and folder_fingerprint(locate(draft, key="eval.draft")),
            dict(proposer.settings),
            proposer.vocabulary is None,
        ],
        "suite": [suite.name, suite.version, suite.sha256],
        "machine": [hardware(target.device), software()],
    }


def fingerprint(plan: Plan, identity: Mapping[str, Any]) -> str:
    """A hash of all that the plan's records depend on."""
    prompts = [(prompt.id, prompt.category, prompt.token_ids) for prompt in plan.prompts]
    content = json.dumps([identity, asdict(plan.settings), plan.target_precision, prompts], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def folder_fingerprint(folder: Path) -> str:
    """A hash of the names and contents of a folder's files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            digest.update(f"{path.relative_to(folder)} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:FINGERPRINT_DIGITS]
