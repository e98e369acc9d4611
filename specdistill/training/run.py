"""A training run from its recipe to its best draft: the steps that all training scripts share.

Its folder holds `draft/`, `report/`, the trainer's checkpoints, and `run/`: the record of its inputs (resolved recipe, command, versions,
revision, data fingerprint), which is written before the first step.
"""

import hashlib
import itertools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainingArguments, set_seed

from specdistill import __version__
from specdistill.credentials import without_places
from specdistill.errors import UserError, logger
from specdistill.files.documents import parse_yaml, read_json, read_keys
from specdistill.files.folders import alone, check_writable
from specdistill.processes import agree, collectives, of_all
from specdistill.project import git_revision
from specdistill.recipe import data_sources
from specdistill.recipe.load import flattened, recipe_yaml
from specdistill.recipe.sections import FROM_HUB
from specdistill.terminal import result
from specdistill.training.arguments import check_precision, training_arguments
from specdistill.training.checkpoints import (
    ASIDE,
    MANIFEST,
    check_launch,
    checkpoint,
    launch,
    saving,
    whole_steps,
)
from specdistill.training.history import Bar, ProgressLines, save_history
from specdistill.training.resumable import ResumableTrainer
from specdistill.training.trainer import DraftTrainer

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors")
RECIPE, PROVENANCE = "recipe.yaml", "provenance.json"
LOCK = ".lock"
SEEN_WITHIN = (
    60.0  # seconds in which a network file system shows all machines what one of them wrote
)
# Places of each machine, whatever they are called.
PLACES = (
    "train.output_dir",
    "train.logging_dir",
    "data.cache_dir",
    "hidden_states.path",
)
# Keys of `train:` that say how processes share a step's rows. A run resumes with other values, as long as a step has as many rows.
SHARE_OUT = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "per_device_eval_batch_size",
    "ddp_timeout",
)
LENGTHS = (
    "max_steps",
    "num_train_epochs",
)  # keys of `train:` by which a finished run is trained further


@dataclass(frozen=True)
class TrainingRun:
    """arguments: of transformers' Trainer; path: the run's folder; checkpoint: what it resumes from, None: a new run."""

    recipe: Any
    arguments: TrainingArguments
    path: Path
    checkpoint: Path | None = None
    writer: ExitStack = field(
        default_factory=ExitStack
    )  # from the record to the draft, one process writes the folder

    @classmethod
    def open(
        cls, recipe: Any, *, target_dtype: str | None = None, **defaults: Any
    ) -> "TrainingRun":
        """A new run, an interrupted one, or a finished one that is trained further: join the processes of the launch and seed the
        run; writes nothing.

        target_dtype: of the frozen target, if there is one. defaults: for fields that `train:` leaves out. Raises UserError for a
        section or a dtype that cannot be used, for machines that differ in their recipe, for a folder that cannot be written or holds
        other files, another run or a finished one, and for a checkpoint that this launch cannot resume.
        """
        arguments = training_arguments(
            recipe.train, **{"disable_tqdm": not sys.stderr.isatty(), **defaults}
        )
        agree(
            {
                **recipe_keys(recipe.model_dump()),
                "accelerate launch": f"sharding {launch(arguments)['sharding']}",
            }
        )
        if target_dtype is not None:
            check_precision(arguments, target_dtype)
        path = Path(str(arguments.output_dir))
        check_writable(path, "train.output_dir")
        # All processes look before any of them writes.
        own = whole_steps(path)
        obstacles, whole = zip(*of_all((_obstacle(path, recipe, own), own)), strict=True)
        if obstacle := next(filter(None, obstacles), None):
            expected = "a new folder, an interrupted run, or a larger train.max_steps to train a finished run further"
            raise UserError(
                "train.output_dir", got=f"{path}, which holds {obstacle}", expected=expected
            )
        step = max(set(whole[0]).intersection(*whole), default=None)
        if step is None and any(whole):
            raise UserError(
                "train.output_dir",
                got=f"{path}, whose checkpoints not every machine has",
                expected="a new folder",
            )
        run = cls(recipe, arguments, path, None if step is None else checkpoint(path, step))
        if run.checkpoint is not None:
            check_launch(run.checkpoint, arguments)
            arguments.eval_on_start = False  # it is not at its start
        set_seed(arguments.seed)
        if arguments.process_index == 0:
            for warning in left_open(recipe):
                logger.warning(warning)
        return run

    def record(self, **facts: Any) -> None:
        """Write the record, before the first step: the resolved recipe, command, versions, git revision and the facts given.

        Raises UserError when the facts are not those of the run that is resumed, and where machines that share no folder keep no
        checkpoints of their own.
        """
        folder, aside, facts = self.path / "run", self.path / ASIDE / "run", without_places(facts)
        if self.arguments.should_save:
            self.writer.enter_context(alone(self.path / LOCK, "train.output_dir", self.path))
        of_all(None)
        there = (
            read_keys(folder / PROVENANCE, "train.output_dir", "an interrupted run")
            if self.checkpoint
            else {}
        )
        old = without_places(there)
        other = next((name for name, now in facts.items() if old.get(name, now) != now), None)
        if other := next(
            filter(None, of_all(other)), None
        ):  # all have read it before it is written again
            got = f"{self.path}, an interrupted run with {other} {old.get(other)}"
            raise UserError(
                "train.output_dir", got=got, expected=f"a new folder, or {other} {facts[other]}"
            )
        provenance = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "recipe": hashlib.sha256(recipe_yaml(self.recipe, public=True).encode()).hexdigest(),
            "command": without_places(sys.argv),
            "python": sys.version.split()[0],
            "packages": {"specdistill": __version__, **{name: version(name) for name in PACKAGES}},
            "git_revision": git_revision(),
            **facts,
        }
        if self.arguments.should_save:
            with saving(folder):
                self._keep_finished()
                aside.mkdir(parents=True, exist_ok=True)
                (aside / RECIPE).write_text(recipe_yaml(self.recipe), encoding="utf-8")
                (aside / PROVENANCE).write_text(
                    json.dumps(provenance, indent=2) + "\n", encoding="utf-8"
                )
                if not folder.exists():
                    os.replace(aside, folder)
                else:
                    for path in aside.iterdir():
                        os.replace(path, folder / path.name)
        of_all(None)
        end = time.monotonic() + SEEN_WITHIN
        while not (folder / RECIPE).exists():
            if time.monotonic() > end:
                got = f"false, and process {self.arguments.process_index} does not see {folder}"
                raise UserError(
                    "train.save_on_each_node",
                    got=got,
                    expected="true, or a folder that all machines share",
                )
            time.sleep(1)

    def _keep_finished(self) -> None:
        """Of a finished run that is trained further: the draft and its report get names of their own."""
        if self.checkpoint is None or not (self.path / "draft").exists():
            return
        step = self.checkpoint.name.removeprefix("checkpoint-")
        kept = self.path
        for name in ("report", "draft"):  # without a draft the run is an interrupted one
            if (self.path / name).exists():
                names = (
                    f"{name}-{step}{f'-{number}' if number > 1 else ''}"
                    for number in itertools.count(1)
                )
                kept = next(self.path / each for each in names if not (self.path / each).exists())
                os.replace(self.path / name, kept)
        logger.info(
            f"{self.path} is trained further from step {step}, with the learning rates of a run of the new length; "
            f"its draft so far is kept in {kept}"
        )

    def train(self, trainer: ResumableTrainer) -> None:
        """Train, or resume where an interrupted run stopped; save the best draft, which a DraftTrainer has loaded back by then."""
        with self.writer:
            for verbose in (
                PrinterCallback,
                ProgressCallback,
            ):  # they print every log as a dictionary
                trainer.remove_callback(verbose)
            for callback in (
                [ProgressLines()] if self.arguments.disable_tqdm else [Bar(), ProgressLines()]
            ):
                trainer.add_callback(callback)
            # Last: on a save it may end the run, before others are told
            trainer.callback_handler.callbacks.sort(
                key=lambda callback: callback is trainer.stopping
            )
            if self.checkpoint is not None:
                trainer.begun -= read_json(self.checkpoint / MANIFEST).get("seconds", math.nan)
            if self.arguments.should_save:
                shutil.rmtree(self.path / ASIDE, ignore_errors=True)
            of_all(None)
            with (
                trainer.stopping.caught(),
                collectives("the same command resumes from the last checkpoint"),
            ):
                trainer.train(
                    resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint)
                )
            if not isinstance(trainer, DraftTrainer):
                return
            with saving(self.path / "draft"):
                trainer.save_draft(self.path / ASIDE / "draft")
                if self.arguments.should_save:
                    seconds, has_best = (
                        time.monotonic() - trainer.begun,
                        self.arguments.load_best_model_at_end,
                    )
                    save_history(trainer.state, self.path, seconds, has_best=has_best)
                    if (self.path / ASIDE / "draft").exists():
                        os.replace(self.path / ASIDE / "draft", self.path / "draft")
                    shutil.rmtree(
                        self.path / ASIDE, ignore_errors=True
                    )  # not there where another machine writes the draft
            state = trainer.state
            reached = {
                "steps": state.global_step,
                "best": state.best_metric,
                "log": state.log_history,
            }
            result({"draft": self.path / "draft", **reached})


def left_open(recipe: Any) -> Iterator[str]:
    """What may be another thing tomorrow: a target on the Hub without a revision, and what `data_sources.left_open` finds."""
    target, data = (getattr(recipe, name, None) for name in ("target", "data"))
    if target is not None and FROM_HUB.holds(target) and target.revision is None:
        yield f"target.revision: {target.model} is not pinned, and its weights are those of today: target.revision=COMMIT keeps them"
    if data is not None:
        yield from data_sources.left_open(data.source)


def recipe_keys(values: Mapping[str, Any]) -> dict[str, str]:
    """Each key of a recipe with its value, but for the places."""
    return {key: str(value) for key, value in flattened(values) if key not in PLACES}


def _obstacle(path: Path, recipe: Any, whole: list[int]) -> str | None:
    """The files in a folder that keep a run out of it, in words; None: there are none. whole: steps of its checkpoints."""
    held = {entry.name for entry in path.iterdir()} if path.exists() else set()
    record = path / "run" / RECIPE
    if not record.exists():
        return "other files" if held - {ASIDE, LOCK} else None
    if held <= {
        "run",
        "runs",
        ASIDE,
        LOCK,
    }:  # a record and a tracker's log: that run died before its first checkpoint
        return None
    recorded = read_keys(record, "train.output_dir", "a new folder, or an interrupted run")
    asked, is_finished = parse_yaml(recipe_yaml(recipe)), "draft" in held
    if _same_steps(recorded, is_finished) != _same_steps(asked, is_finished):
        return "a run of another recipe"
    if is_finished and not any(
        (asked["train"].get(key) or 0) > (recorded["train"].get(key) or 0) for key in LENGTHS
    ):
        return "a finished run"
    return "a finished run without a whole checkpoint" if is_finished and not whole else None


def _same_steps(recipe: dict[str, Any], is_finished: bool) -> Any:
    """A recipe without the keys that share out the rows of its steps, and of a finished one its length."""
    train, others = recipe.get("train"), SHARE_OUT + LENGTHS * is_finished
    steps = (
        {name: value for name, value in train.items() if name not in others}
        if isinstance(train, dict)
        else train
    )
    return {**recipe, "train": steps, "publish": None}
