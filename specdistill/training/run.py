"""A training run from its recipe to its best draft: the steps that all training scripts share.

Its folder holds `draft/`, `report/`, the trainer's checkpoints, and `run/`: the record of its inputs (resolved recipe, command, versions,
revision, data fingerprint), which is written before the first step.
"""

import json
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed

from specdistill.command import check_writable
from specdistill.errors import UserError
from specdistill.project import git_revision
from specdistill.recipe.load import recipe_yaml, save_recipe
from specdistill.training.arguments import check_precision, training_arguments
from specdistill.training.history import ProgressLines, save_history
from specdistill.training.trainer import DraftTrainer

PACKAGES = ("specdistill", "torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors")


@dataclass(frozen=True)
class TrainingRun:
    """arguments: of transformers' Trainer; path: the run's folder."""

    recipe: Any
    arguments: TrainingArguments
    path: Path

    @classmethod
    def open(cls, recipe: Any, *, target_dtype: str | None = None, **defaults: Any) -> "TrainingRun":
        """A new run, or an interrupted one: join the processes of the launch and seed the run; writes nothing.

        target_dtype: of the frozen target, if there is one. defaults: for fields that `train:` leaves out. Raises UserError for a
        section or a dtype that cannot be used, and for a folder that cannot be written or holds other files, another run or a finished
        one.
        """
        arguments = training_arguments(recipe.train, **{"disable_tqdm": not sys.stderr.isatty(), **defaults})
        if target_dtype is not None:
            check_precision(arguments, target_dtype)
        run = cls(recipe, arguments, Path(str(arguments.output_dir)))
        check_writable(run.path, "train.output_dir")
        if obstacle := run._obstacle():
            expected = "a new folder, or an interrupted run"
            raise UserError("train.output_dir", got=f"{run.path}, which holds {obstacle}", expected=expected)
        set_seed(arguments.seed)
        return run

    def _obstacle(self) -> str | None:
        """The files in this folder that keep a run out of it, in words; None: there are none."""
        held = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
        record = self.path / "run" / "recipe.yaml"
        if held and not record.exists():
            return "other files"
        if held <= {"run", "runs"}:  # a record and a tracker's log: that run died before its first checkpoint
            return None
        if record.read_text(encoding="utf-8") != recipe_yaml(self.recipe):
            return "a run of another recipe"
        return "a finished run" if "draft" in held else None

    def record(self, **facts: Any) -> None:
        """Write the record, before the first step: the resolved recipe, command, versions, git revision and the facts given."""
        if self.arguments.process_index != 0:
            return
        provenance = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": sys.argv,
            "python": sys.version.split()[0],
            "packages": {name: version(name) for name in PACKAGES},
            "git_revision": git_revision(),
            **facts,
        }
        folder = self.path / "run"
        folder.mkdir(parents=True, exist_ok=True)
        save_recipe(self.recipe, folder / "recipe.yaml")
        (folder / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")

    def train(self, trainer: Trainer) -> None:
        """Train, or resume where an interrupted run stopped; save the best draft, which a DraftTrainer has loaded back by then."""
        if self.arguments.disable_tqdm:
            trainer.remove_callback(PrinterCallback)  # it prints every log as a dictionary
            trainer.add_callback(ProgressLines())
        # The newest that is whole: a checkpoint's state is written last, and one whose run was killed while it saved has none.
        whole = [state.parent for state in self.path.glob("checkpoint-*/trainer_state.json")]
        checkpoint = max(whole, key=lambda place: int(place.name.rpartition("-")[2]), default=None)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if isinstance(trainer, DraftTrainer) and trainer.is_world_process_zero():
            save_history(trainer.state, self.path, resumed=checkpoint is not None)
            trainer.save_draft(self.path / "draft")
