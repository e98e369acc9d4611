"""`specdistill monitor`: measure the acceptance of a draft on a running server."""

import json
import os
import time
from pathlib import Path

from specdistill.common.errors import UserError
from specdistill.common.folders import check_writable
from specdistill.common.terminal import print_result
from specdistill.evaluation.report.phrases import (
    ResultRow,
    format_bracketed_interval,
    format_duration,
    format_number,
    format_per_position,
)
from specdistill.recipe.fields import Condition, Section, option
from specdistill.recipe.load import load_recipe
from specdistill.recipe.short_keys import select_recipe_keys
from specdistill.serving.engines.client import Counters
from specdistill.serving.engines.server import Server

# The watched time is divided into this many equal parts, and the intervals are computed from the
# differences between the parts. That assumes independent parts. A request that runs across a
# boundary belongs to two parts, so a few long parts are better than many short ones.
NUM_PARTS = 6
# `watch` has no effect on what was counted since the server started.
SECONDS_ARE_GIVEN = Condition("with seconds above 0", lambda options: options.seconds > 0)


class MonitorOptions(Section):
    """The options of `specdistill monitor`."""

    server: str = option(
        ..., "address of a running vLLM, SGLang or llama.cpp server, e.g. http://127.0.0.1:8000"
    )
    seconds: float = option(
        60.0,
        f"seconds to watch the server; confidence intervals are computed from {NUM_PARTS} parts of"
        " this time; 0: report everything since the server started",
        ge=0,
        le=604_800,
    )
    watch: bool = option(
        False,
        "repeat until Ctrl-C, and print a line every `seconds` seconds",
        condition=SECONDS_ARE_GIVEN,
    )
    output: str | None = option(None, "JSON file to write the latest numbers to")
    server_timeout: float = option(10.0, "seconds to wait for a response of the server", ge=0.1)


def monitor(arguments: list[str]) -> int:
    """Measure acceptance on a running server (exit code 1: rate below 0.5, 4: inconclusive).

    specdistill monitor server=http://127.0.0.1:8000 seconds=300 watch=true
    """
    options = load_recipe(MonitorOptions, select_recipe_keys(arguments))
    seconds = options.seconds
    # Check the output file if one was typed. If it is a link, `realpath` returns the file that the
    # link points to. `output=` without a path must be refused, too. It is loaded as None, as if it
    # was not typed, so look for it among the arguments. The check refuses it, because
    # `realpath("")` is the working directory, which is a folder and no file.
    output = Path(os.path.realpath(options.output or ""))
    if options.output is not None or "output=" in arguments:
        _check_output_file(output, typed_path=options.output or "")

    # Connect to the server.
    server = Server(
        options.server, key="server", timeout=options.server_timeout, timeout_key="server_timeout"
    )
    # Engines close idle connections between two readings, so each reading opens a new one.
    server.session.headers["Connection"] = "close"
    # The next modules import scipy, so they are imported only here.
    from specdistill.evaluation.gate.decide import EXIT_CODES
    from specdistill.evaluation.report.files import stage_files
    from specdistill.serving.monitor import find_engine, summarize_acceptance

    # Find out which engine runs the server, and print what will be measured.
    engine, client = find_engine(server)
    num_parts = NUM_PARTS if seconds else 1
    period = "since the server started"
    if seconds:
        duration = format_duration(seconds / num_parts)
        period = f"95% intervals from {num_parts} parts of {duration} each"
    print(f"{engine} at {server.address}, {period}", flush=True)

    # The counters grow from the start of the server, so the acceptance in a part of the time is
    # computed from two readings. Read the counters now, before the first part. With seconds=0, an
    # empty reading stands for the start of the server.
    pages: list[Counters] = [client.read_counters(server) if seconds else {}]
    while True:
        # Read the counters after each part. The last reading of one measurement is kept as the
        # first reading of the next.
        start = time.monotonic()
        pages = pages[-1:]
        for part in range(1, num_parts + 1):
            time.sleep(max(0.0, start + seconds * part / num_parts - time.monotonic()))
            pages.append(client.read_counters(server))

        # Compute acceptance, intervals and verdict, and print them in one line.
        result = {
            "server": server.address,
            "engine": engine,
            "time": time.time(),
            "seconds": seconds,
            **summarize_acceptance(client, pages, seconds),
        }
        print(f"{time.strftime('%H:%M:%S')} {format_line(result)}", flush=True)
        print_result(result)

        # Staging replaces the file in one step, so that readers never see half of it.
        if options.output:
            with stage_files(output.parent) as staging:
                (staging / output.name).write_text(
                    json.dumps(result, indent=2) + "\n", encoding="utf-8"
                )

        # Without `watch`, there is only one measurement. With `watch`, Ctrl-C ends the loop.
        if not options.watch:
            return EXIT_CODES[result["verdict"]]


def _check_output_file(output: Path, typed_path: str) -> None:
    """Raise UserError unless the output file can be written.

    Results are written to a temporary file, which is then renamed to the output file. Renaming must
    not replace a folder or a device. The empty path of `output=` stands for the working directory,
    a folder, so it is refused, too.

    Args:
        output: the absolute path of the output file.
        typed_path: the path as the user typed it, for the error.
    """
    if output.exists() and not output.is_file():
        raise UserError("output", got=repr(typed_path), expected="a JSON file")
    check_writable(output.parent, "output")


def format_line(row: ResultRow) -> str:
    """Return one line with the verdict, the acceptance and the number of drafts.

    Args:
        row: a result of `summarize_acceptance`, with metrics named as in a report. `num_drafts` is
            the number of times that the server drafted.
    """
    # Each metric with its confidence interval in brackets.
    length, rate = (
        f"{format_number(row.get(name))}{format_bracketed_interval(row, name)}"
        for name in ("acceptance_length_vllm", "acceptance_rate")
    )
    return (
        f"{row['verdict']}: acceptance length {length}, accepted at position 1, 2, …:"
        f" {format_per_position(row)}, acceptance rate {rate}, {row['num_drafts']:,} drafts;"
        f" {row['reason']}"
    )
