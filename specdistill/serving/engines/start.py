"""Start an engine's server, and end it whatever happens to either side.

The process `guard.py` stands between the server and this process.
"""

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

from specdistill.common.errors import ResourceError, UserError, logger
from specdistill.serving.engines.guard import end_session
from specdistill.serving.engines.server import Server

GUARD = Path(__file__).with_name("guard.py")
HOST = "127.0.0.1"  # only this machine can reach the server
HEALTH_SECONDS = 5.0  # the timeout of one request that asks whether the engine is ready
# The most time until the engine is ready. Large weights take minutes to load, and engines compile.
START_SECONDS = 3600.0
# The time from SIGTERM to SIGKILL, in which an engine may free GPU and shared memory.
GRACE_SECONDS = 20.0
# How many lines of a failed engine's log are shown, and how many characters of the likely cause.
SHOWN_LINES = 30
SHOWN_CHARACTERS = 300
# An exception in a log, with its message, as Python prints it.
EXCEPTION = re.compile(r"\b[A-Z]\w*(Error|Exception): .+")


@contextmanager
def start_server(
    command: Sequence[str], log: Path, *, key: str, variables: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Start an engine's server for a `with` block: yield its address, and end it after the block.

    The address is yielded once the server is ready. If a ResourceError leaves the block, the last
    lines of the server's log are shown.

    Args:
        command: the program that starts the server, and its arguments without host and port.
        log: the file to which the server's output is written.
        key: the recipe key that names the command, for errors.
        variables: environment variables to add. Variables of this project (SPECDISTILL_…) are not
            passed on, except those that are added here.

    Raises:
        UserError: if there is no such program.
        ResourceError: if the server ends or does not become ready.
    """
    program = shutil.which(command[0])
    if program is None:
        raise UserError(
            key,
            got=command[0],
            expected="the program that starts the engine: its name, if it is on the PATH, or path",
        )

    # Let the system choose a free port.
    with socket.create_server((HOST, 0)) as probe:
        port = str(probe.getsockname()[1])

    # Start guard.py, which starts the engine and ends it when this process ends.
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("SPECDISTILL_")
    }
    engine_command = [program, *command[1:], "--host", HOST, "--port", port]
    with log.open("wb") as output:
        guard = subprocess.Popen(
            # -P keeps the folder of guard.py off the import path: its modules could hide others.
            [sys.executable, "-P", GUARD, str(GRACE_SECONDS), *engine_command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**inherited, **(variables or {})},
        )
    address = f"http://{HOST}:{port}"

    # Wait until the server answers, and pass its address to the block. After Ctrl-C, this process
    # does not wait until the guard has ended the engine.
    try:
        wait_until_ready(guard, address, log)
        yield address
    except BaseException as error:
        end(guard, waits=not isinstance(error, KeyboardInterrupt))
        if isinstance(error, ResourceError):  # The engine has ended, so its log is complete.
            logger.error("\n".join([f"The last lines of {log}:", *read_lines(log)[-SHOWN_LINES:]]))
        raise
    end(guard)


def wait_until_ready(guard: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    """Wait until the server answers that it is ready.

    Args:
        guard: the process of guard.py, which started the engine and ends when the engine ends.
        address: the address of the server.
        log: the file with the engine's output.

    Raises:
        ResourceError: if the engine ends first, or does not answer within START_SECONDS.
    """
    server = Server(address, key="", timeout=HEALTH_SECONDS)
    deadline = time.monotonic() + START_SECONDS

    # An engine answers /health with status 200 once it has loaded the model. Until then requests
    # fail, which is no error.
    while True:
        with suppress(ResourceError):
            if server.ask("/health").status == 200:
                return
        if guard.poll() is not None:
            raise ResourceError(
                f"the engine ended before it was ready ({find_cause(log)})",
                next_step=f"look at its log, {log}",
            )
        if time.monotonic() > deadline:
            raise ResourceError(
                f"the engine was not ready after {START_SECONDS:g} s",
                next_step=f"look at its log, {log}",
            )
        time.sleep(0.2)


def end(guard: "subprocess.Popen[bytes]", *, waits: bool = True) -> None:
    """End the engine, by closing the standard input of its guard process.

    Args:
        guard: the process of guard.py, which started the engine.
        waits: whether to wait until the engine has ended, which may take GRACE_SECONDS, and then to
            end all processes of the engine that are left.
    """
    # The guard ends the engine when its standard input closes.
    assert guard.stdin is not None
    guard.stdin.close()
    if waits:
        guard.wait()
        end_session(guard.pid, GRACE_SECONDS)


def find_cause(log: Path) -> str:
    """Return the likely cause of an engine's failure, as one line of text from its log.

    This is the message of the first Python exception, because later exceptions follow from it. The
    next line is appended if it is indented, since it then continues the message. A warning that
    mentions an exception is passed over. A log without an exception gives its last line.
    """
    lines = read_lines(log) or ["it printed nothing"]
    next_lines = [*lines[1:], ""]
    for line, next_line in zip(lines, next_lines, strict=True):
        exception = EXCEPTION.search(line)
        if exception and "WARNING" not in line:
            continuation = next_line if next_line[:1].isspace() else ""
            cause = f"{exception[0]} {continuation}".strip()
            return cause[:SHOWN_CHARACTERS]
    return lines[-1][:SHOWN_CHARACTERS]


def read_lines(log: Path) -> list[str]:
    """Return the lines of a log that are not blank."""
    return [
        line
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
