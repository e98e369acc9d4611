"""The folder a run leaves: `draft/`, `report/`, trainer checkpoints, and `run/`, the record of how it was made.

The record (resolved recipe, command, versions, revision, data fingerprint) is written before the first step.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

from specdistill.errors import UserError
from specdistill.project import ROOT
from specdistill.recipe import save_recipe

PACKAGES = ("specdistill", "torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors")


@dataclass(frozen=True)
class RunDirectory:
    path: Path

    @classmethod
    def create(cls, output_dir: str, recipe: Any) -> "RunDirectory":
        """Open a run's folder, new or interrupted. Raises UserError when it cannot be written or holds another or a finished run."""
        run = cls(Path(output_dir))
        try:
            (run.path / "run").mkdir(parents=True, exist_ok=True)
            (run.path / "run" / ".writable").touch()
            (run.path / "run" / ".writable").unlink()
        except OSError as error:
            raise UserError(
                "train.output_dir", got=f"{output_dir} ({error.strerror})", expected="a folder that can be written"
            ) from error
        record = run.path / "run" / "recipe.yaml"
        before = record.read_text(encoding="utf-8") if record.exists() else None
        if before is None and any(entry.name != "run" for entry in run.path.iterdir()):
            raise UserError("train.output_dir", got=f"{output_dir}, which holds other files", expected="a new or empty folder")
        fresh = run.path / "run" / ".recipe.yaml"
        save_recipe(recipe, fresh)
        same = before is None or before == fresh.read_text(encoding="utf-8")
        if not same or run.draft.exists():
            fresh.unlink()
            what = "a finished run" if same else "a run of another recipe"
            raise UserError(
                "train.output_dir", got=f"{output_dir}, which holds {what}", expected="a new folder, or an interrupted run"
            )
        fresh.replace(record)
        return run

    @property
    def draft(self) -> Path:
        return self.path / "draft"

    def last_checkpoint(self) -> str | None:
        """Where an interrupted run stopped, for `resume_from_checkpoint`."""
        checkpoint: str | None = get_last_checkpoint(str(self.path))
        return checkpoint

    def record_provenance(self, **facts: Any) -> None:
        """Write provenance.json: command, versions, git revision and the facts given (data fingerprint, target revision)."""
        provenance = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": sys.argv,
            "python": sys.version.split()[0],
            "packages": {name: version(name) for name in PACKAGES},
            "git_revision": git_revision(),
            **facts,
        }
        path = self.path / "run" / "provenance.json"
        path.write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")


def git_revision() -> str | None:
    """The checkout's commit, with `-dirty` for uncommitted changes; None outside a checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
