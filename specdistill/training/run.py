"""Open, record, train and resume a training run: the steps that all training scripts share.

The folder of a run holds `draft/`, `report/`, the trainer's checkpoints, and `run/`. The folder
`run/` is the record of the run's inputs (resolved recipe, command, versions, revision, data
fingerprint). It is written before the first step.
"""

import hashlib
import itertools
import json
import math
import os
import shlex
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
from specdistill.common.credentials import remove_places
from specdistill.common.documents import parse_yaml, read_json, read_keys
from specdistill.common.errors import UserError, logger
from specdistill.common.folders import check_writable, exclusive_lock
from specdistill.common.processes import (
    all_gather_object,
    check_ranks_agree,
    report_failed_collectives,
)
from specdistill.common.project import read_git_revision
from specdistill.common.terminal import print_result
from specdistill.recipe import data_sources
from specdistill.recipe.fields import Section, format_value, list_every_key
from specdistill.recipe.load import flatten_keys, format_recipe
from specdistill.recipe.sections import TARGET_IS_ON_HUB
from specdistill.targets.memory import map_large_tensors
from specdistill.training.arguments import build_training_arguments, check_precision
from specdistill.training.checkpoints import (
    MANIFEST,
    STAGING_DIR,
    check_launch,
    describe_launch,
    find_checkpoint,
    find_complete_steps,
    saving,
)
from specdistill.training.history import Bar, ProgressLines, save_history
from specdistill.training.resumable import ResumableTrainer
from specdistill.training.trainer import DistillationTrainer

# The packages whose versions are recorded, because they influence the numbers of a training.
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors")
# The files of the record, and the file that one process locks while it writes the run's folder.
RECIPE = "recipe.yaml"
PROVENANCE = "provenance.json"
LOCK = ".lock"
# Seconds to wait for a network file system to show a file of another machine. A longer wait would
# delay machines that share no folder.
VISIBILITY_WAIT_S = 10
# Keys that name paths. They may differ between the machines of a run.
PATH_KEYS = (
    "train.output_dir",
    "train.logging_dir",
    "data.cache_dir",
    "hidden_states.path",
)
# Keys of `train:` that say how processes share a step's rows. A run can be resumed with other
# values, as long as a step has as many rows.
BATCH_KEYS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "per_device_eval_batch_size",
    "ddp_timeout",
)
# Keys of `train:` by which a finished run is trained further.
DURATION_KEYS = ("max_steps", "num_train_epochs")


MAX_SHOWN_KEYS = 3  # keys of another recipe that an error names
START_OVER_HINT = "To start over, name another train.output_dir, or remove the folder."
# The facts that a run records of its inputs, and how errors call them.
FACTS = {
    "target": "target.model",
    "target_revision": "target.revision",
    "target_weights": "the hash of the weights of target.model",
    "data_fingerprint": "the fingerprint of the rows from data.source",
    "rows": "the number of rows from data.source",
}


@dataclass(frozen=True)
class TrainingRun:
    """A training run and its folder.

    Attributes:
        recipe: what is trained.
        arguments: the arguments of transformers' Trainer.
        path: the run's folder.
        checkpoint: what the run resumes from; None for a new run.
        writer: in the process that writes the folder, holds the folder's lock from the record of
            the inputs until the draft is saved.
    """

    recipe: Section
    arguments: TrainingArguments
    path: Path
    checkpoint: Path | None = None
    writer: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def open(
        cls, recipe: Any, *, target_dtype: str | None = None, **defaults: object
    ) -> "TrainingRun":
        """Open a new run, an interrupted one, or a finished one that is trained further.

        This joins the processes of the launch and seeds the run. It writes nothing.

        Args:
            recipe: the recipe of the run.
            target_dtype: the dtype of the frozen target; None without a target.
            defaults: values for fields of `train:` that the recipe leaves out.

        Raises:
            UserError: for a recipe that cannot be used or differs between machines, for a folder
                that cannot be written or holds something else, and for a checkpoint that this
                launch cannot resume.
        """
        # Build the Trainer's arguments.
        arguments = build_training_arguments(
            recipe.train, **{"disable_tqdm": not sys.stderr.isatty(), **defaults}
        )

        # All machines must have the same recipe and launch. The nested values of the recipe are
        # compared key by key (`train.seed`). Keys of paths are left out: they may differ.
        recipe_values = list_every_key(recipe)
        check_ranks_agree(
            {
                **list_recipe_keys(recipe_values),
                "accelerate launch": f"sharding {describe_launch(arguments)['sharding']}",
            }
        )
        if target_dtype is not None:
            check_precision(arguments, target_dtype)

        # Refuse a folder in which some process finds another run or other files. All processes look
        # before any of them writes.
        path = Path(str(arguments.output_dir))
        check_writable(path, "train.output_dir")
        local_steps = find_complete_steps(path)
        local_obstacle = _describe_obstacle(path, recipe, local_steps)
        gathered = all_gather_object((local_obstacle, local_steps))
        for obstacle, _ in gathered:
            if obstacle:
                raise UserError(
                    "train.output_dir",
                    got=f"{path}, which holds {obstacle}",
                    text=f"train.output_dir: {path} holds {obstacle}. {START_OVER_HINT}",
                )

        # Resume from the newest checkpoint that every process finds complete.
        complete_steps = [set(steps) for _, steps in gathered]
        step = max(set.intersection(*complete_steps), default=None)
        if step is None and any(complete_steps):
            raise UserError(
                "train.output_dir",
                got=f"{path}, whose checkpoints are missing on some machines",
                expected="a new folder, or one that all machines share",
            )
        run = cls(recipe, arguments, path, None if step is None else find_checkpoint(path, step))
        if run.checkpoint is not None:
            check_launch(run.checkpoint, arguments)
            arguments.eval_on_start = False  # A run that resumes is not at its start.

        # Seed the run, and warn about inputs that may change.
        set_seed(arguments.seed)
        if arguments.process_index == 0:
            for warning in warn_unpinned_revisions(recipe):
                logger.warning(warning)
        return run

    def record(self, **facts: object) -> None:
        """Write the record of the run's inputs, before the first step.

        The record has the resolved recipe, command, versions, git revision and the given facts.

        Args:
            facts: facts about the target and the data, such as the target's revision; see FACTS.

        Raises:
            UserError: if the run is resumed, and was started with other facts.
        """
        # Lock the folder, because only one run may write into it. One process locks the folder, and
        # the others wait for it at the barrier. If an earlier run was killed in this folder, a
        # warning suggests lowering the batch size, whose key is passed as `saves_memory`.
        if self.arguments.should_save:
            self.writer.enter_context(
                exclusive_lock(
                    self.path / LOCK,
                    "train.output_dir",
                    self.path,
                    saves_memory="train.per_device_train_batch_size",
                )
            )
        all_gather_object(None)  # a barrier

        # Compare the facts with the old record, and write the new one. The record may be published,
        # so `remove_places` takes folders and host names of this machine out of it.
        facts = remove_places(facts)
        self._check_same_facts(facts)
        provenance = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "recipe": hashlib.sha256(format_recipe(self.recipe, public=True).encode()).hexdigest(),
            "command": remove_places(sys.argv),
            "python": sys.version.split()[0],
            "packages": {"specdistill": __version__, **{name: version(name) for name in PACKAGES}},
            "git_revision": read_git_revision(),
            **facts,
        }
        if self.arguments.should_save:
            with saving(self.path / "run"):
                self._rename_finished()
                self._write_record(provenance)
        all_gather_object(None)  # a barrier
        self._wait_for_record()

    def _check_same_facts(self, facts: Mapping[str, object]) -> None:
        """Raise UserError if the run that is resumed had another target or other data.

        Args:
            facts: facts about the target and the data of this run.
        """
        # A new run has no record to compare with. Facts that an earlier version did not record are
        # taken as equal.
        old_record: dict[str, Any] = {}
        if self.checkpoint:
            path = self.path / "run" / PROVENANCE
            old_record = read_keys(path, "train.output_dir", "an interrupted run")
        # `facts` are without folders and host names of a machine. A record that an earlier version
        # wrote may still have them, so they are removed here, too.
        old_facts = remove_places(old_record)
        local_differing_keys = [
            name for name, value in facts.items() if old_facts.get(name, value) != value
        ]

        # Every process must have read the old record before the first one overwrites it, and
        # gathering waits for every process.
        differing_keys = list(
            itertools.chain.from_iterable(all_gather_object(local_differing_keys))
        )
        if differing_keys:
            key = differing_keys[0]
            raise UserError(
                "train.output_dir",
                got=f"{self.path}, an interrupted run with {key} {old_facts.get(key)}",
                text=(
                    f"train.output_dir: {self.path} holds an interrupted run, in which"
                    f" {FACTS.get(key, key)} is {old_facts.get(key)}; now it is {facts[key]}."
                    f" {START_OVER_HINT}"
                ),
            )

    def _write_record(self, provenance: Mapping[str, object]) -> None:
        """Write the recipe and the provenance of the run, in place of an earlier start's files.

        The files are written into the staging folder first, so that they are never half written.
        """
        folder = self.path / "run"
        staging_folder = self.path / STAGING_DIR / "run"
        staging_folder.mkdir(parents=True, exist_ok=True)
        (staging_folder / RECIPE).write_text(format_recipe(self.recipe), encoding="utf-8")
        (staging_folder / PROVENANCE).write_text(
            json.dumps(provenance, indent=2) + "\n", encoding="utf-8"
        )
        # A new folder is moved as a whole, so that other processes never see a part of it. In a
        # folder that exists, the files are replaced one by one.
        if not folder.exists():
            os.replace(staging_folder, folder)
        else:
            for path in staging_folder.iterdir():
                os.replace(path, folder / path.name)

    def _wait_for_record(self) -> None:
        """Wait until this process sees the record of the run, and warn if it does not appear.

        A network file system may show a new folder late, in some cases after a minute. So a record
        that does not appear is no error.
        """
        folder = self.path / "run"
        end = time.monotonic() + VISIBILITY_WAIT_S
        while not (folder / RECIPE).exists() and time.monotonic() < end:
            time.sleep(1)
        if not (folder / RECIPE).exists():
            logger.warning(
                f"Process {self.arguments.process_index} does not see {folder}, so an interrupted"
                " run could not be resumed. If the machines share no folder, set"
                " train.save_on_each_node=true."
            )

    def _rename_finished(self) -> None:
        """Rename the draft and the report of a finished run that is trained further.

        The step of the checkpoint that training continues from is added to their names, e.g.
        `draft-500`. A run without a draft is not finished, and nothing is renamed.
        """
        if self.checkpoint is None or not (self.path / "draft").exists():
            return
        step = self.checkpoint.name.removeprefix("checkpoint-")
        new_path = self.path
        # The draft comes last. While it is there, a run that was killed in between still counts as
        # finished, and the same command renames the rest.
        for name in ("report", "draft"):
            if (self.path / name).exists():
                new_path = _find_free_path(self.path / f"{name}-{step}")
                os.replace(self.path / name, new_path)
        logger.info(
            f"Training in {self.path} continues from step {step}, with the learning-rate schedule"
            f" of the new length. The previous draft is kept in {new_path}."
        )

    def train(self, trainer: ResumableTrainer) -> None:
        """Train, or resume where an interrupted run stopped, and save the draft.

        The draft of the last step is saved, or the best draft if the recipe asks the Trainer to
        load it at the end. Only a DistillationTrainer has a draft.
        """
        # `writer` holds the lock of the run's folder, and releases it at the end of this block.
        with self.writer:
            # The Trainer's own callbacks print each log as a dictionary. Replace them by callbacks
            # that print short lines.
            for callback_class in (PrinterCallback, ProgressCallback):
                trainer.remove_callback(callback_class)
            if not self.arguments.disable_tqdm:
                trainer.add_callback(Bar())
            trainer.add_callback(ProgressLines())
            # `stopping` comes last: on a save it may end the run, and callbacks after it would not
            # be called.
            trainer.callback_handler.callbacks.sort(
                key=lambda callback: callback is trainer.stopping
            )

            # A resumed run has trained for some seconds before (NaN if unknown). Move its beginning
            # back by them, so that its wall time includes them.
            if self.checkpoint is not None:
                trainer.begun -= read_json(self.checkpoint / MANIFEST).get("seconds", math.nan)

            # Remove what an interrupted save left, before any process saves. Then train. With a
            # large vocabulary, `map_large_tensors` keeps freed logits from filling the memory.
            if self.arguments.should_save:
                shutil.rmtree(self.path / STAGING_DIR, ignore_errors=True)
            all_gather_object(None)  # a barrier
            vocab_size = (
                trainer.target.vocab_size if isinstance(trainer, DistillationTrainer) else 0
            )
            with (
                trainer.stopping.handle_signals(),
                report_failed_collectives("the same command resumes from the last checkpoint"),
                map_large_tensors(vocab_size),
            ):
                trainer.train(
                    resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint)
                )
            if not isinstance(trainer, DistillationTrainer):
                return

            self._save_draft(trainer)
            print_result(
                {
                    "draft": self.path / "draft",
                    "steps": trainer.state.global_step,
                    "best": trainer.state.best_metric,
                    "log": trainer.state.log_history,
                }
            )

    def _save_draft(self, trainer: DistillationTrainer) -> None:
        """Save the draft and the history of a training that has ended.

        The draft is moved to its place last, because a run with a draft counts as finished.
        """
        staging_folder = self.path / STAGING_DIR
        with saving(self.path / "draft"):
            trainer.save_draft(staging_folder / "draft")
            if self.arguments.should_save:
                save_history(
                    trainer.state,
                    self.path,
                    time.monotonic() - trainer.begun,
                    has_best=self.arguments.load_best_model_at_end,
                )
                if (staging_folder / "draft").exists():
                    os.replace(staging_folder / "draft", self.path / "draft")
                # On a machine that does not write the draft, the folder does not exist.
                shutil.rmtree(staging_folder, ignore_errors=True)


def _find_free_path(path: Path) -> Path:
    """Return a path that does not exist yet: the path itself, or the path with `-2`, `-3`, …."""
    free_path = path
    number = 1
    while free_path.exists():
        number += 1
        free_path = path.with_name(f"{path.name}-{number}")
    return free_path


def warn_unpinned_revisions(recipe: Section) -> Iterator[str]:
    """Yield warnings about inputs on the Hub that are not pinned to a commit, so they may change.

    The inputs are the target and the sources of the data.
    """
    # The recipe that trains the small target pico has neither section.
    target = getattr(recipe, "target", None)
    data = getattr(recipe, "data", None)
    if target is not None and TARGET_IS_ON_HUB.holds(target) and target.revision is None:
        yield (
            f"target.revision: {target.model} is not pinned, so its weights may change:"
            " set target.revision=COMMIT"
        )
    if data is not None:
        yield from data_sources.warn_unpinned_sources(data.source)


def list_recipe_keys(values: Mapping[str, object]) -> dict[str, str]:
    """Return each dotted key of a recipe with its value as text, except keys that name paths.

    For example, {"train": {"seed": 1}} gives {"train.seed": "1"}.
    """
    return {key: str(value) for key, value in flatten_keys(values) if key not in PATH_KEYS}


def _describe_obstacle(path: Path, recipe: Section, complete_steps: list[int]) -> str | None:
    """Describe why a run cannot use a folder: it holds other files, or a run that does not fit.

    A folder can be used if it is empty, if it holds an interrupted run of the same recipe, or if it
    holds a finished run that is now trained for more steps or epochs.

    Args:
        path: the folder.
        recipe: the recipe of the new run.
        complete_steps: the steps of the complete checkpoints in the folder.

    Returns:
        What the folder holds, for an error; None if the run can use the folder.
    """
    # A folder without a run must hold nothing else.
    entries = {entry.name for entry in path.iterdir()} if path.exists() else set()
    record = path / "run" / RECIPE
    if not record.exists():
        return "other files" if entries - {STAGING_DIR, LOCK} else None

    # With only a record and a tracker's log, a run died before its first checkpoint. It may be
    # started again, with any recipe.
    if entries <= {"run", "runs", STAGING_DIR, LOCK}:
        return None

    # Compare the recipes, without the keys in which they may differ.
    recorded = read_keys(record, "train.output_dir", "a new folder, or an interrupted run")
    recipe_keys = parse_yaml(format_recipe(recipe))
    is_finished = "draft" in entries
    old = dict(flatten_keys(_remove_irrelevant_keys(recorded, is_finished)))
    new = dict(flatten_keys(_remove_irrelevant_keys(recipe_keys, is_finished)))
    differing_keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if differing_keys:
        # Show the first differences, and how to type a command with the old values.
        differences = [
            f"{key} is {format_value(old.get(key))} there and {format_value(new.get(key))} here"
            for key in differing_keys[:MAX_SHOWN_KEYS]
        ]
        old_values = [f"{key}={format_value(old.get(key))}" for key in differing_keys]
        has_few = len(old_values) <= MAX_SHOWN_KEYS
        arguments = shlex.join(old_values) if has_few else f"recipe={record}"
        return f"a run of another recipe: {'; '.join(differences)}. To resume it, type {arguments}"
    if not is_finished:
        return None

    # A finished run can only be trained further, for more steps or epochs. A number of steps that
    # replaces epochs must be above the steps that were taken.
    old_steps, old_epochs = [recorded["train"].get(key) or 0 for key in DURATION_KEYS]
    new_steps, new_epochs = [recipe_keys["train"].get(key) or 0 for key in DURATION_KEYS]
    if new_steps > 0:
        is_longer = new_steps > max(old_steps, *complete_steps, 0)
    else:
        is_longer = old_steps <= 0 and new_epochs > old_epochs
    if not is_longer:
        key = "train.max_steps" if old_steps > 0 else "train.num_train_epochs"
        return f"a finished run. To train it further, raise {key}"
    if not complete_steps:
        return "a finished run that kept no complete checkpoint, so it cannot be trained further"
    return None


def _remove_irrelevant_keys(recipe: dict[str, Any], is_finished: bool) -> dict[str, object]:
    """Return a recipe without the keys that may be changed when its run is resumed.

    These are the keys that say how processes share the rows of a step, `target.cache` and
    `publish`. For a finished run, the keys of its length are left out, too, because training
    further means to raise them.
    """
    # The recorded recipe is read from a file, which may have been edited. So `train` need not be a
    # mapping, and `target` may be missing or empty.
    train = recipe.get("train")
    if isinstance(train, dict):
        irrelevant_keys = (*BATCH_KEYS, *DURATION_KEYS) if is_finished else BATCH_KEYS
        train = {name: value for name, value in train.items() if name not in irrelevant_keys}
    target = dict(recipe.get("target") or {})
    target.pop("cache", None)
    # `publish` is null in every returned recipe, so it never differs.
    return {**recipe, "target": target, "train": train, "publish": None}
