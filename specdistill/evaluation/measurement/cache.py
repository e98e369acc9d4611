"""Cache a measurement on disk, so that it resumes after an interruption.

The folder holds two kinds of files:

- `<fingerprint>.json` has the result of a configuration that is finished.
- `<fingerprint>.jsonl` has the decoded batches of a configuration that is in progress.

The fingerprint is a hash of everything that the records depend on. So a measurement with another
draft, target, suite, setting or machine finds no such file, and starts afresh.
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
FINGERPRINT_DIGITS = 32  # hexadecimal digits, 128 bits: enough that no two hashes are equal
CACHE_FILE = re.compile(rf"[0-9a-f]{{{FINGERPRINT_DIGITS}}}\.jsonl?")

# pydantic's readers and writers of what the files hold.
BATCH_GENERATIONS = TypeAdapter(BatchGenerations)
CONFIGURATION_RESULT = TypeAdapter(ConfigurationResult)


class MeasurementCache:
    """A folder that keeps the decoded batches and finished configurations of a measurement.

    A configuration is identified by its fingerprint (see `compute_fingerprint`).

    Args:
        folder: the folder; None keeps nothing.
        identity: a JSON value that identifies everything, besides the plan, that the records depend
            on (see `identify_draft`).
    """

    def __init__(self, folder: Path | None, identity: object = None) -> None:
        self.folder = folder
        self.identity = identity

    def compute_fingerprint(self, plan: MeasurementPlan) -> str:
        """Return a hash of everything that the records of a configuration depend on.

        These are the draft, target, suite and machine (`self.identity`), and the settings and
        prompts of the plan. If any of them changes, so does the hash, and nothing that was cached
        before is reused.
        """
        # The settings of plain decoding, then those of each draft, if drafts have different ones.
        settings = [asdict(settings) for settings in (plan.settings, *plan.settings_each)]
        prompts = [(prompt.id, prompt.category, prompt.token_ids) for prompt in plan.prompts]
        content = json.dumps([self.identity, settings, prompts], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:FINGERPRINT_DIGITS]

    def load_result(self, fingerprint: str) -> ConfigurationResult | None:
        """Return the cached result of a configuration; None if it was not measured to the end.

        Args:
            fingerprint: the hash that identifies the configuration (see `compute_fingerprint`).
        """
        # Without a folder nothing is cached.
        if self.folder is None:
            return None
        path = self.folder / f"{fingerprint}.json"
        if not path.exists():
            return None
        return CONFIGURATION_RESULT.validate_json(path.read_bytes())

    def save_result(self, fingerprint: str, result: ConfigurationResult) -> None:
        """Save the result of a finished configuration, and delete the file of its batches.

        Args:
            fingerprint: the hash that identifies the configuration (see `compute_fingerprint`).
            result: the result.

        Raises:
            ResourceError: when the disk fails.
        """
        if self.folder is None:
            return
        # Write the file as a whole or not at all, so that no interruption leaves half a result. The
        # file of the batches is deleted last: until the result is saved, it is the only copy.
        with stage_files(self.folder) as staging:
            (staging / f"{fingerprint}.json").write_text(
                json.dumps(asdict(result)), encoding="utf-8"
            )
        (self.folder / f"{fingerprint}.jsonl").unlink(missing_ok=True)

    def load_batches(self, fingerprint: str) -> list[BatchGenerations]:
        """Return the batches that were decoded before a measurement was interrupted.

        They are in the order in which they were decoded. A resumed measurement decodes in the same
        order, so the cached batches are its first ones.

        Args:
            fingerprint: the hash that identifies the configuration (see `compute_fingerprint`).
        """
        if self.folder is None:
            return []
        path = self.folder / f"{fingerprint}.jsonl"
        if not path.exists():
            return []

        # Each line holds a batch. If the interruption cut the last line, remove that line, so that
        # further lines can be appended.
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
        """Append a decoded batch to the file of its configuration, as one line of JSON.

        Args:
            fingerprint: the hash that identifies the configuration (see `compute_fingerprint`).
            generations: the completions of each prompt of the batch: without a draft, then with
                each draft.
        """
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{fingerprint}.jsonl").open("ab") as file:
            file.write(BATCH_GENERATIONS.dump_json(generations) + b"\n")


def discard_cache(folder: Path) -> None:
    """Remove the files of a measurement's cache, and their folder if it is empty then.

    Other files in the folder stay: only names of the form `<fingerprint>.json` or
    `<fingerprint>.jsonl` belong to the cache.
    """
    for path in folder.glob("*.json*"):
        if CACHE_FILE.fullmatch(path.name):
            path.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def identify_draft(
    target: FrozenTarget, proposer: Proposer, suite: Suite, *, method: str, draft: str | None
) -> dict[str, object]:
    """Return a JSON value that identifies a draft, its target, the suite, software and machine.

    A cached measurement is reused only if this value is unchanged. The value leaves out the
    settings and prompts of a configuration, which `compute_fingerprint` adds.

    Args:
        target: the target model.
        proposer: the draft.
        suite: the suite that is measured.
        method: the method of the draft.
        draft: the folder or Hub id of the draft; None for a method without weights.
    """
    # A draft with weights is identified by the contents of its files.
    draft_files: list[Path] = []
    if draft:
        draft_files = [
            path for path in locate(draft, key="eval.draft").rglob("*") if path.is_file()
        ]

    # Another version of specdistill or of a library, or another machine, may change tokens or
    # times. The last entry of `draft` says whether the draft can propose every token of the target:
    # `vocabulary` is None unless the draft has only a part of the target's vocabulary.
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
