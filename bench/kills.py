"""Whether a killed training resumes to the same draft: a run of two processes, killed (SIGKILL) at random moments and repeated.

    python bench/kills.py target=path/to/model source=path/to/texts.jsonl [num_kills=30]    # writes bench/results/kills.json

Each run is killed three times, then left to end; its draft and its last step must be, bit for bit, those of a run that was left alone.
A third of the moments are drawn over the length of a whole run, start-up included, a third over its steps, and a third lie inside the
writing of a checkpoint. All processes are killed, launcher and workers, or one of the workers. Random numbers are part of the run: EAGLE
heads with noise, on several epochs, a checkpoint and an evaluation at every other step.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from specdistill.command import run
from specdistill.errors import ExitCode
from specdistill.project import ROOT
from specdistill.recipe.fields import Section, option

RESULTS = Path(__file__).with_name("results") / "kills.json"
KILLS_OF_A_RUN = 3
KINDS = ("write", "steps", "any")
NUM_STEPS = 24
KEYS = (
    "method=eagle",
    "loss.noise=0.1",
    "data.max_length=64",
    "data.validation_fraction=0.1",
    "draft.ttt_steps=2",
    f"train.max_steps={NUM_STEPS}",
    "train.per_device_train_batch_size=4",
    "train.learning_rate=1e-3",
    "train.eval_strategy=steps",
    "train.eval_steps=2",
    "train.save_steps=2",
    "train.save_total_limit=2",
    "train.load_best_model_at_end=true",
    "train.metric_for_best_model=acceptance_length",
    "train.report_to=none",
)


class Options(Section):
    target: str = option(..., "a small target: the runs are about processes and files")
    source: str = option(..., "texts to train on")
    num_kills: int = option(30, "moments", ge=1)
    seed: int = option(0, "of the moments", ge=0)
    output_dir: str = option("runs/kills", "folder of the runs, emptied first")


def main(options: Options) -> ExitCode:
    folder = Path(options.output_dir)
    shutil.rmtree(folder, ignore_errors=True)
    keys = [f"target.model={options.target}", f"data.source={options.source}", f"data.cache_dir={folder / 'cache'}"]
    kills, same = trial(folder, keys, options.num_kills, random.Random(options.seed))
    summary = {
        "kills": len(kills),
        "inside a checkpoint write": sum(kill["writing"] for kill in kills),
        "of": dict(Counter(kill["killed"] for kill in kills)),
        "runs": len(same),
        "identical to the one left alone": sum(same),
    }
    RESULTS.write_text(json.dumps({**summary, "each": kills}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary))
    return ExitCode.DONE if all(same) else ExitCode.CHECK_FAILED


def trial(folder: Path, keys: list[str], num_kills: int, moments: random.Random) -> tuple[list[dict[str, Any]], list[bool]]:
    """What each kill met, and whether each killed run ended as the one that was left alone."""
    start = time.monotonic()
    assert wait(launch(folder / "whole", keys)) == 0, output(folder / "whole")
    seconds = time.monotonic() - start
    kills: list[dict[str, Any]] = []
    same = []
    while len(kills) < num_kills:
        place = folder / f"killed-{len(same)}"
        for _ in range(min(KILLS_OF_A_RUN, num_kills - len(kills))):
            if kill := killed(place, keys, KINDS[len(kills) % len(KINDS)], seconds, moments):
                kills.append(kill)
        if not (place / "draft").exists():
            assert wait(launch(place, keys)) == 0, output(place)
        same.append(outcome(place) == outcome(folder / "whole"))
    return kills, same


def killed(place: Path, keys: list[str], kind: str, seconds: float, moments: random.Random) -> dict[str, Any] | None:
    """Start or resume a run and kill it at a moment of a kind; None: it had ended before."""
    start, before = time.monotonic(), steps(place)
    process = launch(place, keys)
    if kind == "any":
        pause = moments.uniform(0, seconds)
    else:
        wait_for_write(process, place, number=moments.choice((1, 2)))
        pause = moments.uniform(0, 0.01 if kind == "write" else 1.0)
    with suppress(subprocess.TimeoutExpired):
        process.wait(pause)
    if process.poll() is not None:
        return None
    launcher = psutil.Process(process.pid)
    workers = launcher.children()
    one = bool(workers) and moments.random() < 0.5
    was_writing = writing(place)
    for victim in [moments.choice(workers)] if one else [launcher, *launcher.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            victim.kill()
    met = {"moment": kind, "seconds": round(time.monotonic() - start, 2), "killed": "a worker" if one else "all"}
    wait(process)
    return {**met, "writing": was_writing, "saved": [step for step in steps(place) if step not in before]}


def wait_for_write(process: subprocess.Popen[bytes], place: Path, number: int) -> None:
    """Until the run is inside the writing of a checkpoint for so many times, or has ended."""
    for nth in range(number):
        while process.poll() is None and nth > 0 and writing(place):
            time.sleep(0.0005)
        while process.poll() is None and not writing(place):
            time.sleep(0.0005)


def launch(place: Path, keys: list[str]) -> subprocess.Popen[bytes]:
    config = [f"--config_file={ROOT / 'accelerate_configs' / 'ddp.yaml'}", "--main_process_port=0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{place}.log", "ab") as log:
        script = [str(ROOT / "train" / "eagle.py"), *KEYS, *keys, f"train.output_dir={place}"]
        return subprocess.Popen(
            [sys.executable, "-m", "accelerate.commands.launch", *config, *script],
            env=environment,
            stdout=log,
            stderr=log,
        )


def wait(process: subprocess.Popen[bytes]) -> int:
    return process.wait(300)


def writing(place: Path) -> bool:
    return any(place.glob("saving/checkpoint-*"))


def steps(place: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in place.glob("checkpoint-*"))


def outcome(place: Path) -> list[bytes]:
    """The draft, and weights, optimizer and random states of the last step."""
    last = place / f"checkpoint-{NUM_STEPS}"
    names = ("model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth")
    return [path.read_bytes() for path in (place / "draft" / "model.safetensors", *(last / name for name in names))]


def output(place: Path) -> str:
    return Path(f"{place}.log").read_text(encoding="utf-8", errors="replace")


if __name__ == "__main__":
    sys.exit(run(main, Options))
