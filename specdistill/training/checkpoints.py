"""Write and find the checkpoints of a run, so that a run that was killed at any moment resumes.

A checkpoint is complete or it does not exist. All processes write `checkpoint-N` into another
folder, and it is moved to its place when the last process is done. Its manifest is written just
before. The manifest lists every file with its size, and the launch with which the checkpoint can be
resumed. A checkpoint that later lost a file, or a part of one, is skipped.
"""

import json
import math
import os
import re
import shutil
import socket
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from specdistill.common.documents import read_json
from specdistill.common.errors import UserError, logger
from specdistill.common.processes import all_gather_object
from specdistill.data.rows.files import is_first_here, on_disk
from specdistill.training.arguments import is_launched_with

MANIFEST = "manifest.json"  # the list of files of a checkpoint
STATE = "trainer_state.json"  # the Trainer's own file
# The folder of a run in which files are written before they are moved to their place. The Trainer
# searches for `checkpoint-*`, which this name does not match.
STAGING_DIR = "saving"

# A context manager for writing files: a full disk becomes a ResourceError that says what to do.
saving = partial(
    on_disk, next_step="free the disk, then repeat the command: it resumes from the last checkpoint"
)


def find_checkpoint(run: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return run / f"checkpoint-{step}"


def list_steps(run: Path) -> list[int]:
    """Return the steps of a run's checkpoints, complete or not, in ascending order."""
    matches = [re.fullmatch(r"checkpoint-(\d+)", path.name) for path in run.glob("checkpoint-*")]
    return sorted(int(match[1]) for match in matches if match)


def publish_checkpoint(folder: Path, run: Path, launch: dict[str, object], seconds: float) -> None:
    """Write the manifest of a checkpoint, and move the checkpoint to its place in the run.

    All processes must have written their files before.

    Args:
        folder: the folder in which the checkpoint was written.
        run: the run's folder.
        launch: facts about the processes that saved it, as `describe_launch` returns them.
        seconds: the time that training took so far; NaN if unknown.
    """
    # DeepSpeed finds its parts by a file `latest`, which names their folder. DeepSpeed writes this
    # file on the first machine only, so it is written here on every machine.
    for parts in folder.glob("global_step*"):
        (folder / "latest").write_text(parts.name, encoding="utf-8")

    # Write the manifest, which lists every file with its size in bytes.
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest: dict[str, object] = {"files": files, "launch": launch}
    if not math.isnan(seconds):
        manifest["seconds"] = seconds
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")

    # Move the folder. There may be a damaged checkpoint of this step, which it replaces.
    shutil.rmtree(run / folder.name, ignore_errors=True)
    os.replace(folder, run / folder.name)


def prune(run: Path, limit: int | None, kept_folders: set[Path]) -> None:
    """Remove a run's oldest checkpoints, so that at most `limit` are left.

    Args:
        run: the run's folder.
        limit: the most checkpoints; None or 0 for no limit.
        kept_folders: checkpoints that are never removed: the newest and the best.
    """
    folders = [find_checkpoint(run, step) for step in list_steps(run)]
    num_surplus = max(0, len(folders) - limit) if limit else 0
    removable_folders = [folder for folder in folders if folder not in kept_folders]
    for folder in removable_folders[:num_surplus]:
        shutil.rmtree(folder)


def describe_launch(arguments: Any) -> dict[str, object]:
    """Return the facts of this launch that decide which checkpoints it can resume.

    Args:
        arguments: the Trainer's arguments.

    Returns:
        `sharding`: how weights are divided between processes. `processes`: their number. `rows`:
        the rows of one optimizer step.
    """
    # accelerate says in the environment how weights are sharded.
    sharding = "none"
    if is_launched_with("DEEPSPEED"):
        sharding = f"zero{arguments.deepspeed_plugin.zero_stage}"
    elif is_launched_with("FSDP"):
        sharding = "fsdp"
    return {
        "sharding": sharding,
        "processes": arguments.world_size,
        "rows": (
            arguments.train_batch_size
            * arguments.gradient_accumulation_steps
            * arguments.world_size
        ),
    }


def check_launch(folder: Path, arguments: TrainingArguments) -> None:
    """Raise UserError if this launch cannot resume a complete checkpoint.

    Shards of weights can only be loaded by as many processes as saved them. Without sharding, any
    number of processes can resume, as long as an optimizer step has as many rows as before.

    Args:
        folder: the checkpoint's folder.
        arguments: the Trainer's arguments.
    """
    saved = read_json(folder / MANIFEST)["launch"]
    now = describe_launch(arguments)
    # Compare the facts that must be equal.
    names = ["sharding", "rows"]
    if saved["sharding"] != "none":
        names.append("processes")
    if any(saved[name] != now[name] for name in names):
        description = "sharding {sharding}, {processes} processes, {rows} rows per step"
        raise UserError(
            "accelerate launch",
            got=description.format(**now),
            expected=f"{description.format(**saved)}, as when {folder} was saved",
        )

    # Another number of processes resumes with other random numbers. This is allowed, with a warning
    # by one process of each machine.
    if saved["processes"] != now["processes"]:
        if is_first_here():
            logger.warning(
                f"{folder} was saved by {saved['processes']} processes, and this launch has"
                f" {now['processes']}. Training resumes with other random numbers for noise and"
                " dropout, and sums are rounded differently."
            )
        return

    # Each process needs its own state of the random numbers, which may be on one machine only.
    # Without the file the Trainer would continue with other random numbers.
    state = (
        f"rng_state_{arguments.process_index}.pth" if arguments.world_size > 1 else "rng_state.pth"
    )
    problem = None
    if not (folder / state).exists():
        problem = f"{folder} on {socket.gethostname()}, which has no {state}"
    for process_problem in all_gather_object(problem):
        if process_problem:
            raise UserError(
                "accelerate launch --machine_rank",
                got=process_problem,
                expected="the machine_rank that each machine had when the checkpoint was saved",
            )


def find_complete_steps(run: Path) -> list[int]:
    """Return the steps whose checkpoints are complete, newest first; a run can resume from them.

    Damaged checkpoints are skipped. A damaged checkpoint that is newer than every complete one is
    worth a warning, because the run would have resumed from it.
    """
    complete_steps: list[int] = []
    for step in reversed(list_steps(run)):
        flaw = find_corruption(find_checkpoint(run, step))
        if flaw is None:
            complete_steps.append(step)
        elif not complete_steps and is_first_here():
            logger.warning(f"{find_checkpoint(run, step)} is skipped: {flaw}")
    return complete_steps


def find_corruption(folder: Path, *, is_best: bool = False) -> str | None:
    """Describe what is wrong with a checkpoint, or with the best checkpoint that it refers to.

    Args:
        folder: the checkpoint's folder.
        is_best: whether another checkpoint refers to this one as the best. Then only its own files
            are checked.

    Returns:
        A description for a message; None if the checkpoint is complete.
    """
    # The manifest must have its keys, and every file in it must exist with its size.
    file_name = MANIFEST
    try:
        manifest = read_json(folder / file_name)
        files = manifest["files"]
        _ = float(manifest.get("seconds", 0))  # raises an error if it is no number
        missing_keys = {"sharding", "processes", "rows"} - {*manifest["launch"]}
        if missing_keys:
            return f"its {file_name} has no {min(missing_keys)}"
        for name, size in files.items():
            num_bytes = (folder / name).stat().st_size
            if num_bytes != size:
                return f"{name} has {num_bytes} of {size} bytes"

        # The Trainer's state names the best checkpoint so far.
        file_name = STATE
        state = read_json(folder / file_name, allow_nan=True)
        best_name = Path(state["best_model_checkpoint"] or folder).name
    except FileNotFoundError as error:
        return f"it has no {Path(error.filename).relative_to(folder)}"
    # The file is no JSON, or other JSON than expected.
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {file_name} cannot be read ({error})"

    # The best checkpoint must be intact, too, because it is loaded at the end of the run.
    if is_best or best_name == folder.name:
        return None
    flaw = find_corruption(folder.parent / best_name, is_best=True)
    return flaw and f"its best checkpoint, {best_name}, is damaged: {flaw}"
