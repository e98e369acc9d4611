"""Whether other work on the machine changes a verdict: the same evaluation, quiet, with stalls, and beside a busy process.

    specdistill demo                       # leaves the draft that is evaluated
    python bench/noise.py [num_runs=10]    # writes bench/results/noise.json and prints its table

A stalled run is stopped (SIGSTOP) for five seconds at ten moments drawn over the length of the quiet run, as another guest of the machine,
a swapped page or a laptop's lid would. A busy run has a process beside it that computes from beginning to end.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specdistill.command import run
from specdistill.errors import ExitCode
from specdistill.recipe.fields import Section, option

RESULTS = Path(__file__).with_name("results") / "noise.json"
NUM_STOPS, STOP_SECONDS = 10, 5.0
ALLOWED = 0.05  # of the quiet run's speedup


class Options(Section):
    recipe: str = option("pico/eagle3", "whose draft is evaluated")
    draft: str = option("runs/demo/draft", "the draft")
    num_runs: int = option(10, "stalled runs, and as many busy ones", ge=1)
    output_dir: str = option("runs/noise", "folder of the reports")


def main(options: Options) -> ExitCode:
    quiet = evaluate(options, "quiet")
    rows = [quiet]
    for number in range(options.num_runs):
        rows.append(evaluate(options, f"stalled-{number}", stops=moments(quiet["seconds"], seed=number)))
        with busy_neighbour():
            rows.append(evaluate(options, f"busy-{number}"))
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    holds = [is_undisturbed(row, quiet) for row in rows]
    print(f"{sum(holds)} of {len(rows)} runs: the quiet run's verdict, and its speedup within {ALLOWED:.0%}, or inconclusive")
    return ExitCode.DONE if all(holds) else ExitCode.CHECK_FAILED


def is_undisturbed(row: dict[str, Any], quiet: dict[str, Any]) -> bool:
    near = abs(row["speedup"] / quiet["speedup"] - 1) <= ALLOWED
    return row["verdict"] == "inconclusive" or (near and row["verdict"] == quiet["verdict"])


def evaluate(options: Options, name: str, stops: tuple[float, ...] = ()) -> dict[str, Any]:
    """Run `specdistill eval`, stopped at the moments given, and return what its report says."""
    folder = Path(options.output_dir) / name
    keys = [f"recipe={options.recipe}", f"eval.draft={options.draft}", f"eval.output_dir={folder}"]
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "specdistill", "eval", *keys], stdout=subprocess.DEVNULL, start_new_session=True
    )
    for moment in stops:
        try:
            process.wait(max(0.0, start + moment - time.monotonic()))
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGSTOP)
            time.sleep(STOP_SECONDS)
            os.killpg(process.pid, signal.SIGCONT)
    if (code := process.wait()) not in (ExitCode.DONE, ExitCode.CHECK_FAILED):
        sys.exit(code)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    first = report["results"][0]
    shown = {key: first[key] for key in ("mean_acceptance_length", "speedup", "speedup_ci95", "num_disturbed_rounds")}
    row = {"run": name, "verdict": report["gate"]["verdict"], **shown, "seconds": round(time.monotonic() - start)}
    print(json.dumps(row), flush=True)
    return row


def moments(seconds: float, seed: int) -> tuple[float, ...]:
    """When to stop a run that takes so long undisturbed: each later stop comes after the pauses before it."""
    drawn = sorted(random.Random(seed).uniform(0, seconds) for _ in range(NUM_STOPS))
    return tuple(moment + number * STOP_SECONDS for number, moment in enumerate(drawn))


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """A process that keeps a core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(run(main, Options))
