"""A training run from its recipe to its best draft: the steps that all training scripts share."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed

from specdistill.targets.frozen import FrozenTarget
from specdistill.training.arguments import check_precision, training_arguments
from specdistill.training.history import TrainingCurve
from specdistill.training.optimizer import build_optimizer
from specdistill.training.progress import ProgressLines
from specdistill.training.run_directory import RunDirectory
from specdistill.training.trainer import Batch, DraftTrainer


@dataclass(frozen=True)
class TrainingRun:
    """arguments: of transformers' Trainer; directory: of the run's record, checkpoints, curve and draft."""

    arguments: TrainingArguments
    directory: RunDirectory

    @classmethod
    def open(cls, recipe: Any, *, target_dtype: str | None = None, **defaults: Any) -> "TrainingRun":
        """Check the recipe's `train:` section and its folder, join the processes of the launch and seed the run; writes nothing.

        target_dtype: of the frozen target, if there is one. defaults: for fields that `train:` leaves out. Raises UserError for a
        section, a folder or a dtype that cannot be used.
        """
        arguments = training_arguments(recipe.train, **{"disable_tqdm": not sys.stderr.isatty(), **defaults})
        if target_dtype is not None:
            check_precision(arguments, target_dtype)
        directory = RunDirectory.open(str(arguments.output_dir), recipe)
        set_seed(arguments.seed)
        return cls(arguments, directory)

    @property
    def seed(self) -> int:
        return int(self.arguments.seed)

    def record(self, target: FrozenTarget, train_set: Dataset) -> None:
        """Record the run's inputs, before its first step."""
        if self.arguments.process_index == 0:
            self.directory.record(
                target=target.name,
                target_revision=target.revision,
                data_fingerprint=train_set._fingerprint,
                rows=len(train_set),
            )

    def trainer(
        self,
        draft: nn.Module,
        objective: nn.Module,
        target: FrozenTarget,
        train_set: Dataset,
        eval_set: Dataset,
        *,
        optimizer: str,
        save: Callable[[Path], None],
        on_policy: Callable[[Batch, int], Batch] | None = None,
    ) -> DraftTrainer:
        """The trainer of a draft; `optimizer` is its name in the recipe, the rest is as `DraftTrainer` takes it."""
        return DraftTrainer(
            objective,
            target,
            self.arguments,
            train_set,
            eval_set,
            save=save,
            optimizer=build_optimizer(optimizer, draft, self.arguments),
            on_policy=on_policy,
            callbacks=[TrainingCurve(self.directory.path / "training_curve.png")],
        )

    def train(self, trainer: Trainer) -> None:
        """Train, or resume where an interrupted run stopped; save the best draft, which a DraftTrainer has loaded back by then."""
        if self.arguments.disable_tqdm:
            trainer.remove_callback(PrinterCallback)  # it prints every log as a dictionary
            trainer.add_callback(ProgressLines())
        trainer.train(resume_from_checkpoint=self.directory.last_checkpoint())
        if isinstance(trainer, DraftTrainer) and trainer.is_world_process_zero():
            trainer.save_draft(self.directory.draft)
