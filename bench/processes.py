"""What a second process gains: tokens a second of two processes on two cores, beside one process on one core.

    python bench/processes.py              # writes bench/results/processes.json and prints its table

The two ways run by turns. Both train pico's EAGLE-3 head as a user does, with as many tokens in a step, and one thread a process; start-up
is not counted. The runs are short: it is the step that is measured.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from specdistill.command import run
from specdistill.errors import ExitCode
from specdistill.recipe.fields import Section, option

RESULTS = Path(__file__).with_name("results") / "processes.json"
WAYS = {"cpu": 2, "cpu_processes": 1}  # launch configuration -> micro-batches that a process accumulates
EXPECTED = 1.6  # of two


class Options(Section):
    recipe: str = option("pico/eagle3", "what is trained")
    steps: int = option(12, "optimizer steps of a run", ge=2)
    repeats: int = option(3, "runs of each way", ge=1)
    output_dir: str = option("runs/processes", "folder of the runs; must not exist")


def main(options: Options) -> ExitCode:
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    for repeat in range(options.repeats):
        for name in WAYS:
            rates[name].append(rows_per_second(options, name, Path(options.output_dir) / f"{name}-{repeat}"))
    ratio = statistics.median(rates["cpu_processes"]) / statistics.median(rates["cpu"])
    RESULTS.write_text(json.dumps({"rows_per_second": rates, "ratio": ratio}, indent=1) + "\n", encoding="utf-8")
    for name, values in rates.items():
        print(f"{name:14} {statistics.median(values):7.2f} rows a second (of {', '.join(f'{value:.2f}' for value in values)})")
    print(f"ratio {ratio:.2f}; {EXPECTED} or more is expected")
    return ExitCode.DONE if ratio >= EXPECTED else ExitCode.CHECK_FAILED


def rows_per_second(options: Options, name: str, folder: Path) -> float:
    """Train for a few steps under a launch configuration; rows of equal length, so as tokens a second."""
    keys = [f"recipe={options.recipe}", f"launch={name}", f"train.output_dir={folder}", f"train.max_steps={options.steps}"]
    keys += [f"train.gradient_accumulation_steps={WAYS[name]}", "train.eval_strategy=no", "train.save_strategy=no"]
    keys += ["train.load_best_model_at_end=false", "train.logging_steps=1000", "data.regenerate=null"]
    command = [sys.executable, "-m", "specdistill", "train", *keys]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    history = json.loads((folder / "run" / "history.json").read_text(encoding="utf-8"))
    return float(history["log"][-1]["train_samples_per_second"])


if __name__ == "__main__":
    sys.exit(run(main, Options))
