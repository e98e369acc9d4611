"""Measure on a GPU: ceilings, tests, training and decoding of an 8B target, and a gated draft.

    make gpu  # all parts
    make gpu ARGS="short=true"  # the parts that matter most, on one GPU, within nine minutes
    make gpu ARGS="parts=[train,decoding]"  # some of them, added to what is already in the JSON
    python -m bench.gpu small=true  # tiny shapes, on a CPU: does it run?

Each part of bench/gpu_parts.py runs in a process of its own and is ended at its time limit. When it
ends, what it has measured is added to bench/results/gpu/<device>.json (short form:
<device>-short.json). If a part fails, crashes or is ended, the JSON says so, the next parts run,
and the exit code is 1. The tables of docs/performance.md are written from these files.

No network is needed: `make gpu-wheels` downloads the packages that the GPU machine lacks
(bench/gpu_wheels.py).
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Any

import psutil

from bench.pages import write_between
from specdistill.cli.command import run
from specdistill.common.errors import ExitCode, ResourceError, join_lines
from specdistill.common.project import ROOT
from specdistill.evaluation.report.text import format_table
from specdistill.recipe.fields import Section, allow_names, option

RESULTS = Path(__file__).parent / "results" / "gpu"
PAGE = ROOT / "docs" / "performance.md"
VISIBLE_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
# Nine minutes, minus INSTALL_LIMIT_S of bench/gpu_wheels.py, which runs before this, and minus the
# time to end the last part.
SHORT_BUDGET_S = 500

# Seconds to ask for the name of the GPU: the first import of torch on a fresh machine is slow.
DEVICE_LIMIT_S = 60
NUM_OUTPUT_LINES = 20  # the last lines of a failed part's output that the JSON keeps
# Seconds to wait for a killed process. A process in a broken driver never ends.
KILL_GRACE_S = 5


# The numbers that a part measured, by name, and when and how it ended. They are written as JSON.
PartResult = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A part of the benchmark.

    Attributes:
        measures: what it measures, in words.
        limit_s: its time limit in seconds.
        short_limit_s: its time limit in the short form; None for a part that the short form omits.
    """

    measures: str
    limit_s: int
    short_limit_s: int | None = None


# The order in which parts run: those that are needed to understand the rest come first, and those
# that take long or may hang come last.
PARTS = {
    "ceilings": Part(
        "Machine and versions; a product of bfloat16 matrices in TFLOP/s, a copy in GB/s", 120, 40
    ),
    "tests": Part(
        "Tests that need a GPU (short form: losslessness in float32, batches, trees, a training"
        " step)",
        900,
        120,
    ),
    "train": Part(
        "A training step at 8B shapes: tokens/s, peak memory, parts, waits, the largest kernels",
        300,
        150,
    ),
    "shapes": Part(
        "The same step with one long row, with the whole vocabulary, with recomputed activations",
        600,
    ),
    "variants": Part("The same step with Muon, and compiled", 900),
    "decoding": Part(
        "Decoding at 8B shapes: a round without a draft, with a chain, with a tree; batches",
        300,
        90,
    ),
    "compiled": Part(
        "Compiled decoding at 8B shapes: a round without a draft and with a chain", 600, 90
    ),
    "pico": Part("A draft for pico: trained, decoded with in float32, judged by its gate", 900),
    "store": Part("Training on stored features of pico", 600),
    "generation": Part("Tokens per second of the target's answers, in batches", 300),
}


PartName = Annotated[str, allow_names(lambda: list(PARTS))]


class Options(Section):
    """The options of this script."""

    parts: list[PartName] = option(
        [],
        "parts of the benchmark to run, e.g. [train,decoding]; empty: all parts, or with short=true"
        " all parts of the short form",
    )
    short: bool = option(
        False, "run the short form: fewer parts and smaller sizes, which take nine minutes"
    )
    small: bool = option(
        False,
        "use tiny models and sizes, to try the parts on a machine without a GPU; the numbers mean"
        " nothing",
    )
    output_dir: str = option(str(RESULTS), "folder for the results, one JSON file per device")


def main(options: Options) -> ExitCode:
    """Run each part of the benchmark in turn, and write the JSON after each one.

    Returns:
        CHECK_FAILED if a part has failed, else DONE.
    """
    start = time.monotonic()

    # Print the plan, and choose the file of the results by the name of the device.
    limits = choose_limits(options)
    print(format_plan(limits), flush=True)
    device = "cpu" if options.small else find_device_name()
    suffix = "-short" if options.short else ""
    path = Path(options.output_dir) / f"{device.lower().replace(' ', '-')}{suffix}.json"
    path.parent.mkdir(parents=True, exist_ok=True)

    # Keep the earlier results of other parts if only some parts are asked for.
    results: dict[str, PartResult] = {}
    if options.parts and path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        results = {name: numbers for name, numbers in earlier.items() if name in PARTS}

    # Run the parts. The JSON is written after each one, so that a killed run loses one part at
    # most.
    last_name = list(limits)[-1]
    for name in limits:
        if options.short:
            left_s = int(SHORT_BUDGET_S - (time.monotonic() - start))
            # The last part of the short form compiles, which takes an unknown time. So this part
            # gets all the time that the earlier parts have left over.
            limits[name] = left_s if name == last_name else min(limits[name], left_s)
        results[name] = run_part(name, limits[name], options)
        outcome = results[name].get("failed", "done")
        print(f"{name}: {outcome} ({results[name]['seconds']} s)", flush=True)
        write_results(path, results)

    # Update the page, and print what has run.
    if not options.small:
        write_between(PAGE, "gpu", format_results(sorted(RESULTS.glob("*.json"))))
    print(format_summary(limits, results))
    print(f"{path}: {path.stat().st_size:,} bytes, after {time.monotonic() - start:.0f} s")
    has_failures = any("failed" in results[name] for name in limits)
    return ExitCode.CHECK_FAILED if has_failures else ExitCode.DONE


def choose_limits(options: Options) -> dict[str, int]:
    """Return the time limit in seconds of each part that is to run, in the order of PARTS."""
    limits = {}
    for name, part in PARTS.items():
        limit_s = part.short_limit_s if options.short else part.limit_s
        # Without names in `parts`, all parts run, except that `short=true` leaves out those without
        # a short limit. If `parts` names such a part, it runs with its usual limit.
        is_selected = name in options.parts if options.parts else limit_s is not None
        if is_selected:
            limits[name] = limit_s or part.limit_s
    return limits


def find_device_name() -> str:
    """Return the name of the GPU, such as `NVIDIA H200`.

    A child process asks torch for the name. A process that has used a GPU keeps some GPU memory
    until it ends, which the parts of the benchmark would lack.

    Raises:
        ResourceError: if torch sees no GPU.
    """
    command = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=DEVICE_LIMIT_S
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        lines = str(error.stderr or error).strip().splitlines()
        next_step = "add small=true to try the parts on a CPU"
        # The last line of a traceback says what is wrong.
        raise ResourceError(f"torch sees no GPU ({lines[-1]})", next_step=next_step) from error
    return process.stdout.strip()


# Run a part in its process


def run_part(name: str, limit_s: float, options: Options) -> PartResult:
    """Run a part in a child process, and return the numbers that it measured.

    If the part fails, crashes or exceeds its time limit, `failed` says why, and `output` holds the
    last lines of its output.

    Args:
        name: the name of the part.
        limit_s: its time limit in seconds; with 0 or less, the part is not started.
        options: the options of this script.
    """
    # In the short form, earlier parts may have left no time for this one.
    created = datetime.now(UTC).isoformat(timespec="seconds")
    if limit_s <= 0:
        return {
            "failed": "not started: the short form has no time left",
            "created": created,
            "seconds": 0,
        }

    # Run the part. It appends its results to a file, which is read even if the part is killed.
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.jsonl"
        exit_code, last_lines = run_process(
            build_part_command(name, options, path), limit_s, build_part_environment()
        )
        numbers = merge_lines(path)

    # Say why the part failed: quote the last line that begins with "error: ", which specdistill
    # prints, or else the last line of the output.
    if exit_code is None:
        numbers["failed"] = f"ended at its time limit of {limit_s:.0f} s"
    elif exit_code:
        errors = [line for line in last_lines if line.startswith("error: ")]
        reason = (errors or last_lines or ["no output"])[-1]
        numbers["failed"] = f"exit code {exit_code}: {join_lines(reason)[:300]}"
    if "failed" in numbers:
        numbers["output"] = [line[:300] for line in last_lines]
    return {**numbers, "created": created, "seconds": round(time.monotonic() - start, 1)}


def build_part_command(name: str, options: Options, path: Path) -> list[str]:
    """Return the command that runs a part and makes it append its results to the file `path`."""
    keys = [
        f"part={name}",
        f"results={path}",
        f"short={options.short}".lower(),
        f"small={options.small}".lower(),
    ]
    return [sys.executable, "-m", "bench.gpu_parts", *keys, "debug=true"]


def build_part_environment() -> dict[str, str]:
    """Return the environment variables of a part: this checkout, no network, and one GPU."""
    # The allocator setting avoids fragmentation: parts hold tensors of very different sizes. If the
    # caller has set one of these two variables, the caller's value takes precedence.
    environment = {
        "HF_HUB_OFFLINE": "1",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        **os.environ,
    }

    # The part imports this checkout first, and then what the caller's PYTHONPATH has.
    python_path = os.environ.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{python_path}" if python_path else str(ROOT)

    # Use the first of the visible GPUs.
    visible_devices = os.environ.get(VISIBLE_DEVICES_VARIABLE, "0")
    environment[VISIBLE_DEVICES_VARIABLE] = visible_devices.split(",")[0]
    return environment


def run_process(
    command: list[str], limit_s: float, environment: dict[str, str]
) -> tuple[int | None, list[str]]:
    """Run a command and print its output; kill it and its child processes at a time limit.

    Args:
        command: the command.
        limit_s: the time limit in seconds.
        environment: the environment of the command.

    Returns:
        The exit code, and the last lines of the output. The exit code is None if the command was
        killed.
    """
    last_lines: deque[str] = deque(maxlen=NUM_OUTPUT_LINES)
    # The command gets a process group of its own, which is killed at the time limit. But it stays
    # in this process's session, so whoever kills the whole session also kills the command.
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    )
    # A thread reads the output while this one waits for the end or the time limit. It is a daemon,
    # and is joined with a limit, because a process that survives the kill keeps the pipe open.
    reader = threading.Thread(target=forward_output, args=(process.stdout, last_lines), daemon=True)
    reader.start()
    exit_code: int | None = None
    try:
        with suppress(subprocess.TimeoutExpired):
            exit_code = process.wait(limit_s)
    finally:
        kill_process_tree(process)
    reader.join(KILL_GRACE_S)
    return exit_code, list(last_lines)


def forward_output(stream: IO[str], last_lines: deque[str]) -> None:
    """Print each line of a stream as it comes, and append lines with text to `last_lines`.

    `last_lines` has a maximum length, so only the last of these lines stay in it.
    """
    with stream:
        for line in stream:
            print(line, end="", flush=True)
            if line.strip():
                last_lines.append(line.rstrip())


def kill_process_tree(process: "subprocess.Popen[str]") -> None:
    """Kill a process and all processes that it has started.

    A process that waits for a broken GPU driver cannot be killed. This function stops waiting for
    such a process after KILL_GRACE_S seconds.
    """
    # Kill the descendants one by one, because a launcher may have put them into process groups of
    # their own.
    with suppress(psutil.NoSuchProcess):
        for descendant in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                descendant.kill()

    # Then kill the process itself, together with its process group.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_GRACE_S)


# Results


def merge_lines(path: Path) -> PartResult:
    """Read the JSON lines that a part has written, and merge them into one dictionary.

    If the part was killed, the last line may be cut off. It is then left out. NaN, which standard
    JSON lacks, becomes the text "NaN".
    """
    numbers: PartResult = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(json.JSONDecodeError):
                numbers |= json.loads(line, parse_constant=str)
    return numbers


def write_results(path: Path, results: dict[str, PartResult]) -> None:
    """Write the results of all parts as JSON, so that an interruption leaves a complete file."""
    # Write to a temporary file first, then let it replace the old file in one step.
    ordered = {name: results[name] for name in PARTS if name in results}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def format_plan(limits: dict[str, int]) -> str:
    """Return a table of the parts that are to run: what they measure, and their time limits."""
    rows = [(f"`{name}`", PARTS[name].measures, f"{limit_s} s") for name, limit_s in limits.items()]
    return format_table(
        ("part", "measures", "time limit"), [*rows, ("all", "", f"{sum(limits.values())} s")]
    )


def format_summary(limits: dict[str, int], results: dict[str, PartResult]) -> str:
    """Return a table of the parts that have run: whether each is done or failed, and its time."""
    rows = []
    for name, limit_s in limits.items():
        numbers = results[name]
        outcome = "done"
        if "failed" in numbers:
            outcome = f"failed: {numbers['failed']}".replace("|", "/")
        rows.append((name, outcome, f"{numbers['seconds']} of {limit_s} s"))
    return format_table(("part", "outcome", "took"), rows)


def format_results(paths: Iterable[Path]) -> str:
    """Return the table of docs/performance.md: a row for each number of each device.

    Args:
        paths: the JSON files with results, one for each device.
    """
    rows: list[tuple[str, str, str, str]] = []
    for path in paths:
        rows += list_rows(path.stem, json.loads(path.read_text(encoding="utf-8")))
    return (
        format_table(("device", "part", "measure", "value"), rows)
        if rows
        else "Nothing was measured yet."
    )


def list_rows(device: str, results: dict[str, PartResult]) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each number of a device: device, part, measure and value."""
    # These entries are not measured numbers, or are too long for a table.
    left_out = ("created", "seconds", "hardware", "software", "kernels", "failures", "output")
    for part, numbers in results.items():
        for name, value in numbers.items():
            if name not in left_out:
                # Show a dictionary as `name: 1, name: 2`, without braces and quotation marks.
                text = join_lines(json.dumps(value).strip('{}"').replace('"', ""))
                yield device, part, name, text


if __name__ == "__main__":
    # SIGTERM raises SystemExit, so that `run_process` kills the running part before this ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(run(main, Options))
