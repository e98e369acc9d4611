"""A run's folder: `draft/`, `report/`, the trainer's checkpoints, and `run/`, the record of its inputs.

The record (resolved recipe, command, versions, revision, data fingerprint) is written before the first step.
"""

import json
import os
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

from specdistill.errors import UserError
from specdistill.project import git_revision
from specdistill.recipe import recipe_yaml, save_recipe

PACKAGES = ("specdistill", "torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors")


@dataclass(frozen=True)
class RunDirectory:
    path: Path
    recipe: Any

    @classmethod
    def open(cls, output_dir: str, recipe: Any) -> "RunDirectory":
        """A new run's folder, or an interrupted run's; writes nothing.

        Raises UserError for a folder that cannot be written, or that holds other files, another run or a finished one.
        """
        run = cls(Path(output_dir), recipe)
        place = next(path for path in (run.path, *run.path.absolute().parents) if path.exists())
        if not place.is_dir() or not os.access(place, os.W_OK):
            raise UserError("train.output_dir", got=output_dir, expected="a folder that can be written")
        if obstacle := run._obstacle():
            expected = "a new folder, or an interrupted run"
            raise UserError("train.output_dir", got=f"{output_dir}, which holds {obstacle}", expected=expected)
        return run

    def record(self, **facts: Any) -> None:
        """Write the record: the resolved recipe, and a provenance of command, versions, git revision and the facts given."""
        provenance = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": sys.argv,
            "python": sys.version.split()[0],
            "packages": {name: version(name) for name in PACKAGES},
            "git_revision": git_revision(),
            **facts,
        }
        (self.path / "run").mkdir(parents=True, exist_ok=True)
        save_recipe(self.recipe, self._recipe_file)
        (self.path / "run" / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")

    def _obstacle(self) -> str | None:
        """The files in this folder that keep a run out of it, in words; None: there are none."""
        if not self.path.exists() or not any(self.path.iterdir()):
            return None
        if not self._recipe_file.exists():
            return "other files"
        if self._recipe_file.read_text(encoding="utf-8") != recipe_yaml(self.recipe):
            return "a run of another recipe"
        return "a finished run" if self.draft.exists() else None

    @property
    def _recipe_file(self) -> Path:
        return self.path / "run" / "recipe.yaml"

    @property
    def draft(self) -> Path:
        return self.path / "draft"

    def last_checkpoint(self) -> str | None:
        """Where an interrupted run stopped, for `resume_from_checkpoint`."""
        checkpoint: str | None = get_last_checkpoint(str(self.path))
        return checkpoint
