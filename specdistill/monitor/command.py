"""`specdistill monitor`: its keys, what it prints and writes, and its exit code."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdistill.command import keys_of
from specdistill.engines.client import Counters
from specdistill.engines.server import Server
from specdistill.errors import UserError
from specdistill.files.folders import check_writable
from specdistill.recipe.fields import ReadWhen, Section, option
from specdistill.recipe.load import load_recipe
from specdistill.report.phrases import between, duration, number, per_position
from specdistill.terminal import result

NUM_PARTS = 6  # of the time that is watched: few and long ones, which depend on each other less
SOME_TIME = ReadWhen("with seconds above 0", lambda it: it.seconds > 0)


class MonitorOptions(Section):
    server: str = option(
        ..., "address of a running vLLM, SGLang or llama.cpp, e.g. http://127.0.0.1:8000"
    )
    seconds: float = option(
        60.0,
        f"time to watch, in {NUM_PARTS} parts; 0: everything since the server started",
        ge=0,
        le=604_800,
    )
    watch: bool = option(False, "repeat until Ctrl-C, one line per interval", read_when=SOME_TIME)
    output: str | None = option(None, "JSON file for the latest numbers")
    server_timeout: float = option(10.0, "timeout of a response, in seconds", ge=0.1)


def monitor(arguments: list[str]) -> int:
    """measure acceptance on a running server (exit code 1: rate below 0.5, 4: inconclusive)

    specdistill monitor server=http://127.0.0.1:8000 seconds=300 watch=true"""
    options = load_recipe(MonitorOptions, keys_of(arguments))
    output, seconds = Path(os.path.realpath(options.output or "")), options.seconds
    if options.output is not None or "output=" in arguments:
        if (
            output.exists() and not output.is_file()
        ):  # a folder or a device, whose place it would take
            raise UserError("output", got=repr(options.output or ""), expected="a JSON file")
        check_writable(output.parent, "output")
    server = Server(
        options.server, key="server", timeout=options.server_timeout, timeout_key="server_timeout"
    )
    server.session.headers["Connection"] = (
        "close"  # no engine keeps one alive from reading to reading
    )
    from specdistill.gate.decide import (
        EXIT_CODES,
    )  # here, and not above, because these import scipy
    from specdistill.monitor.acceptance import acceptance, engine_of
    from specdistill.report.files import staged

    engine, client = engine_of(server)
    num_parts = NUM_PARTS if seconds else 1
    intervals = (
        f"95% intervals over {num_parts} parts of {duration(seconds / num_parts)}"
        if seconds
        else "since it started"
    )
    print(f"{engine} at {server.address}, {intervals}", flush=True)
    pages: list[Counters] = [client.counters(server) if seconds else {}]
    while True:
        start, pages = time.monotonic(), pages[-1:]
        for part in range(1, num_parts + 1):
            time.sleep(max(0.0, start + seconds * part / num_parts - time.monotonic()))
            pages.append(client.counters(server))
        found = acceptance(client, pages, seconds)
        found = {
            "server": server.address,
            "engine": engine,
            "time": time.time(),
            "seconds": seconds,
            **found,
        }
        print(f"{time.strftime('%H:%M:%S')} {line(found)}", flush=True)
        result(found)
        if options.output:
            with staged(output.parent) as staging:  # whole at any time
                (staging / output.name).write_text(
                    json.dumps(found, indent=2) + "\n", encoding="utf-8"
                )
        if not options.watch:
            return EXIT_CODES[found["verdict"]]


def line(row: Mapping[str, Any]) -> str:
    length, rate = (
        f"{number(row.get(name))}{between(row, name)}"
        for name in ("mean_acceptance_length", "acceptance_rate")
    )
    return (
        f"{row['verdict']}: acceptance length {length}, accepted at position 1, 2, …: {per_position(row)}, acceptance rate {rate}, "
        f"{row['num_drafts']:,} drafts; {row['reason']}"
    )
