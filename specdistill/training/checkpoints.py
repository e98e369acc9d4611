"""Checkpoints of a run on disk: whole or not there, so that a run that was killed at any moment resumes.

`checkpoint-N` is written under another name by all processes and renamed when the last of them is done. Its manifest, written just before,
lists every file with its size, and the launch that it can be resumed by; one that later lost a file, or a part of one, is skipped.
"""

import json
import os
import re
import shutil
import socket
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from specdistill.errors import UserError, logger
from specdistill.files.documents import read_json
from specdistill.processes import of_all
from specdistill.rows.files import is_first_here, on_disk
from specdistill.training.arguments import launched_with

MANIFEST = "manifest.json"
STATE = "trainer_state.json"
ASIDE = "saving"  # folder of a run that holds what is not whole yet; no pattern of the Trainer matches it

saving = partial(
    on_disk, next_step="free the disk, then repeat the command: it resumes from the last checkpoint"
)


def checkpoint(run: Path, step: int) -> Path:
    return run / f"checkpoint-{step}"


def steps(run: Path) -> list[int]:
    """The steps of a run's checkpoints, whole or not, in order."""
    names = [re.fullmatch(r"checkpoint-(\d+)", path.name) for path in run.glob("checkpoint-*")]
    return sorted(int(match[1]) for match in names if match)


def publish(folder: Path, run: Path, launch: dict[str, Any], seconds: float) -> None:
    """Give a checkpoint that all processes have written its manifest, and its place in the run. seconds: that its steps took."""
    for parts in folder.glob(
        "global_step*"
    ):  # DeepSpeed's, which are looked up by a file that only its first machine writes
        (folder / "latest").write_text(parts.name, encoding="utf-8")
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {"files": files, "launch": launch, "seconds": seconds}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(run / folder.name, ignore_errors=True)  # a damaged one of this step
    os.replace(folder, run / folder.name)


def prune(run: Path, limit: int | None, kept: set[Path]) -> None:
    """Remove the oldest checkpoints beyond `limit`, but none of those `kept`: the newest and the best."""
    folders = [checkpoint(run, step) for step in steps(run)]
    surplus = len(folders) - limit if limit else 0
    for folder in [folder for folder in folders if folder not in kept][: max(0, surplus)]:
        shutil.rmtree(folder)


def launch(arguments: Any) -> dict[str, Any]:
    """What of this launch a checkpoint depends on. rows: of one optimizer step."""
    zero = launched_with("DEEPSPEED")
    return {
        "sharding": f"zero{arguments.deepspeed_plugin.zero_stage}"
        if zero
        else "fsdp"
        if launched_with("FSDP")
        else "none",
        "processes": arguments.world_size,
        "rows": arguments.train_batch_size
        * arguments.gradient_accumulation_steps
        * arguments.world_size,
    }


def check_launch(folder: Path, arguments: TrainingArguments) -> None:
    """Raises UserError when a whole checkpoint cannot be resumed by this launch: shards fit only as many processes as saved them, and what
    a machine keeps for itself only its own processes.
    """
    saved, now = read_json(folder / MANIFEST)["launch"], launch(arguments)
    fixed = (
        ("sharding", "rows") if saved["sharding"] == "none" else ("sharding", "rows", "processes")
    )
    if any(saved[name] != now[name] for name in fixed):
        got, expected = (
            "sharding {sharding}, {processes} processes, {rows} rows per step".format(**it)
            for it in (now, saved)
        )
        raise UserError(
            "accelerate launch", got=got, expected=f"{expected}, by which {folder} was saved"
        )
    if saved["processes"] != now["processes"]:
        change = f"{saved['processes']} processes, now {now['processes']}"
        if is_first_here():
            logger.warning(
                f"{folder} was saved by {change}: sums round differently, and noise and dropout are drawn again"
            )
        return
    state = (
        f"rng_state_{arguments.process_index}.pth" if arguments.world_size > 1 else "rng_state.pth"
    )
    lacking = (
        None
        if (folder / state).exists()
        else f"{folder} on {socket.gethostname()}, which has no {state}"
    )
    if lacking := next(
        filter(None, of_all(lacking)), None
    ):  # the Trainer would go on with other random numbers
        raise UserError(
            "accelerate launch --machine_rank",
            got=lacking,
            expected="each machine's number when it was saved",
        )


def whole_steps(run: Path) -> list[int]:
    """The steps that a run can resume from, newest first; says which newer ones are damaged, and how."""
    whole: list[int] = []
    for step in reversed(steps(run)):
        if (flaw := damage(checkpoint(run, step))) is None:
            whole.append(step)
        elif not whole and is_first_here():
            logger.warning(f"{checkpoint(run, step)} is skipped: {flaw}")
    return whole


def damage(folder: Path, *, is_best: bool = False) -> str | None:
    """What a checkpoint, or the best one that it refers to, lacks; None: it is whole. is_best: of that one the best is not asked."""
    read = MANIFEST
    try:
        manifest = read_json(folder / read)
        files, _ = manifest["files"], float(manifest.get("seconds", 0))
        if lacking := {"sharding", "processes", "rows"} - {*manifest["launch"]}:
            return f"its {read} has no {min(lacking)}"
        for name, size in files.items():
            if (found := (folder / name).stat().st_size) != size:
                return f"{name} has {found} of {size} bytes"
        read = STATE
        best = Path(
            read_json(folder / read, allow_nan=True)["best_model_checkpoint"] or folder
        ).name
    except FileNotFoundError as error:
        return f"it has no {Path(error.filename).relative_to(folder)}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # no JSON, or other JSON
        return f"its {read} cannot be read ({error})"
    if is_best or best == folder.name:
        return None
    flaw = damage(folder.parent / best, is_best=True)
    return flaw and f"of its best, {best}: {flaw}"
