"""The cache of a measurement on disk, with which an interrupted one resumes.

The folder holds a file for each configuration that is finished, and one with the decoded batches of
the configuration that is under way. Both are named by a hash of everything that the records depend
on. So a measurement with another draft, target, suite, setting or machine starts afresh.
"""

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from specdistill import __version__
from specdistill.common.errors import logger
from specdistill.common.project import read_git_revision
from specdistill.decoding.proposer import Proposer
from specdistill.evaluation.measurement.configurations import MeasurementPlan
from specdistill.evaluation.measurement.hardware import describe_hardware, list_software
from specdistill.evaluation.measurement.prompt_runs import BatchGenerations
from specdistill.evaluation.measurement.results import ConfigurationResult
from specdistill.evaluation.report.files import stage_files
from specdistill.evaluation.suites.suite import Suite
from specdistill.methods.load import locate
from specdistill.targets.files import hash_contents
from specdistill.targets.frozen import FrozenTarget

CACHE_FOLDER = "configurations"  # next to the files of a report or comparison
FINGERPRINT_DIGITS = 32
CACHE_FILE = re.compile(rf"[0-9a-f]{{{FINGERPRINT_DIGITS}}}\.jsonl?")

BATCH_GENERATIONS = TypeAdapter(BatchGenerations)
CONFIGURATION_RESULT = TypeAdapter(ConfigurationResult)


class MeasurementCache:
    """A folder that keeps the batches and configurations that a measurement has decoded.

    The fingerprint of a configuration, which `compute_fingerprint` computes from its plan,
    identifies it.

    Args:
        folder: None keeps nothing.
        identity: what the records depend on in addition to their plan, as JSON (see
            `identify_draft`).
    """

    def __init__(self, folder: Path | None, identity: object = None) -> None:
        self.folder = folder
        self.identity = identity

    def compute_fingerprint(self, plan: MeasurementPlan) -> str:
        """Return a hash of everything that the records of a plan depend on."""
        settings = [asdict(settings) for settings in (plan.settings, *plan.settings_each)]
        prompts = [(prompt.id, prompt.category, prompt.token_ids) for prompt in plan.prompts]
        content = json.dumps([self.identity, settings, prompts], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:FINGERPRINT_DIGITS]

    def load_result(self, fingerprint: str) -> ConfigurationResult | None:
        """Return the result of a configuration that was finished before, or None."""
        if self.folder is None:
            return None
        path = self.folder / f"{fingerprint}.json"
        if not path.exists():
            return None
        return CONFIGURATION_RESULT.validate_json(path.read_bytes())

    def save_result(self, fingerprint: str, result: ConfigurationResult) -> None:
        """Keep the result of a configuration in place of its batches.

        The file is written as a whole or not at all.

        Raises:
            ResourceError: when the disk fails.
        """
        if self.folder is None:
            return
        with stage_files(self.folder) as staging:
            (staging / f"{fingerprint}.json").write_text(
                json.dumps(asdict(result)), encoding="utf-8"
            )
        (self.folder / f"{fingerprint}.jsonl").unlink(missing_ok=True)

    def load_batches(self, fingerprint: str) -> list[BatchGenerations]:
        """Return the batches that were decoded before a configuration was interrupted.

        They are in the order in which they were decoded, which follows from the plan and from the
        batches before.
        """
        if self.folder is None:
            return []
        path = self.folder / f"{fingerprint}.jsonl"
        if not path.exists():
            return []
        # The interruption may have cut the last line. It is removed, so that lines can be appended.
        content = path.read_bytes()
        whole_lines = content[: content.rfind(b"\n") + 1]
        if content != whole_lines:
            path.write_bytes(whole_lines)
        batches = [BATCH_GENERATIONS.validate_json(line) for line in whole_lines.splitlines()]
        if batches:
            logger.info(
                f"Resuming: {len(batches)} batches were decoded before the measurement was"
                " interrupted"
            )
        return batches

    def append_batch(self, fingerprint: str, generations: BatchGenerations) -> None:
        """Keep a batch that was decoded."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{fingerprint}.jsonl").open("ab") as file:
            file.write(BATCH_GENERATIONS.dump_json(generations) + b"\n")


def discard_cache(folder: Path) -> None:
    """Remove the files of a cache, and their folder if it holds nothing else."""
    for path in folder.glob("*.json*"):
        if CACHE_FILE.fullmatch(path.name):
            path.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def identify_draft(
    target: FrozenTarget, proposer: Proposer, suite: Suite, *, method: str, draft: str | None
) -> dict[str, object]:
    """Return what the records of a draft depend on in addition to a plan, as JSON.

    `draft` is its folder or Hub id, or None for a method without weights.
    """
    draft_files: list[Path] = []
    if draft:
        draft_files = [
            path for path in locate(draft, key="eval.draft").rglob("*") if path.is_file()
        ]
    return {
        "specdistill": [__version__, read_git_revision()],
        "target": [
            target.identity.weights,
            target.quantization,
            target.dtype,
            target.config._attn_implementation,
        ],
        "draft": [
            method,
            hash_contents(draft_files),
            dict(proposer.settings),
            proposer.vocabulary is None,
        ],
        "suite": [suite.name, suite.version, suite.sha256],
        "machine": [describe_hardware(target.device), list_software()],
    }
