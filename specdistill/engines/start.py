"""An engine's server that is started here, and ended whatever happens to either side: `guard.py` stands between the two."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from specdistill.engines.guard import end_session
from specdistill.engines.server import Server
from specdistill.errors import ResourceError, UserError, logger

GUARD = Path(__file__).with_name("guard.py")
HOST = "127.0.0.1"
HEALTH_SECONDS = 5.0  # that an engine takes to say that it is ready
START_SECONDS = 3600.0  # large weights take minutes to load, and engines compile
GRACE_SECONDS = 20.0  # from SIGTERM to SIGKILL
SHOWN_LINES, SHOWN_CHARACTERS = 30, 300  # of the log of an engine that failed
EXCEPTION = re.compile(r"\b[A-Z]\w*(Error|Exception): .+")


@contextmanager
def started(
    command: Sequence[str], log: Path, *, key: str, variables: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The address of a server that a command starts, once it answers.

    log: where the engine's output goes. key: of the recipe, that names the command. variables: added to the environment, which holds no
    others of ours.

    Raises UserError when there is no such program, ResourceError when the engine ends or does not answer. The last lines of its log are
    shown when it is left by a ResourceError.
    """
    program = shutil.which(command[0])
    if program is None:
        raise UserError(
            key,
            got=command[0],
            expected="a program on the PATH, or the path of one, that starts the engine",
        )
    port = str(free_port())
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("SPECDISTILL_")
    }
    with log.open("wb") as output:
        guard = subprocess.Popen(
            [
                sys.executable,
                "-P",
                GUARD,
                str(GRACE_SECONDS),
                program,
                *command[1:],
                "--host",
                HOST,
                "--port",
                port,
            ],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**inherited, **(variables or {})},
        )
    address = f"http://{HOST}:{port}"
    try:
        wait_until_ready(guard, address, log)
        yield address
    except BaseException as error:
        end(guard, waits=not isinstance(error, KeyboardInterrupt))
        if isinstance(error, ResourceError):  # its log is whole by now
            logger.error("\n".join([f"The last lines of {log}:", *lines_of(log)[-SHOWN_LINES:]]))
        raise
    end(guard)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def wait_until_ready(guard: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    server, deadline = (
        Server(address, key="", timeout=HEALTH_SECONDS),
        time.monotonic() + START_SECONDS,
    )
    while True:
        with suppress(ResourceError):
            if server.ask("/health").status == 200:
                return
        if guard.poll() is not None:
            raise ResourceError(
                f"the engine ended before it answered ({cause(log)})",
                next_step=f"look at its log, {log}",
            )
        if time.monotonic() > deadline:
            raise ResourceError(
                f"the engine did not answer in {START_SECONDS:g} s",
                next_step=f"look at its log, {log}",
            )
        time.sleep(0.2)


def end(guard: "subprocess.Popen[bytes]", *, waits: bool = True) -> None:
    """By the guard, or else without it. waits: until the engine has ended, which may take the grace."""
    assert guard.stdin is not None
    guard.stdin.close()
    if waits:
        guard.wait()
        end_session(guard.pid, GRACE_SECONDS)


def cause(log: Path) -> str:
    """The first exception that a log states, for the others follow from it, with the indented line below it; or else the last line."""
    lines = lines_of(log) or ["it printed nothing"]
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if "WARNING" not in line and (stated := EXCEPTION.search(line)):
            return f"{stated[0]} {below if below[:1].isspace() else ''}".strip()[:SHOWN_CHARACTERS]
    return lines[-1][:SHOWN_CHARACTERS]


def lines_of(log: Path) -> list[str]:
    return [
        line
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
