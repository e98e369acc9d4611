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
HOST = "127.0.0.1"
HEALTH_SECONDS = 5.0  # for the answer to one question whether the engine is ready
START_SECONDS = 3600.0  # Large weights take minutes to load, and engines compile.
GRACE_SECONDS = 20.0  # from SIGTERM to SIGKILL
# How much is shown of the log of an engine that failed.
SHOWN_LINES = 30
SHOWN_CHARACTERS = 300
EXCEPTION = re.compile(r"\b[A-Z]\w*(Error|Exception): .+")


@contextmanager
def start_server(
    command: Sequence[str], log: Path, *, key: str, variables: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Start a server, yield its address once it answers, and end it.

    If the block is left by a ResourceError, the last lines of the server's log are shown.

    Args:
        command: that starts the server.
        log: the file for the engine's output.
        key: the recipe key that names the command.
        variables: added to the environment, which holds no other variables of this project.

    Raises:
        UserError: if there is no such program.
        ResourceError: if the engine ends or does not answer.
    """
    program = shutil.which(command[0])
    if program is None:
        raise UserError(
            key,
            got=command[0],
            expected="a program on the PATH, or the path of one, that starts the engine",
        )

    # Ask for a free port, and start the engine there, behind its guard.
    with socket.create_server((HOST, 0)) as probe:
        port = str(probe.getsockname()[1])

    # The engine gets this process's environment, without our own variables.
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

    # After Ctrl-C this does not wait for the engine's end.
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
    """Wait until the server answers.

    Raises:
        ResourceError: if the engine ends first, or does not answer within START_SECONDS.
    """
    server = Server(address, key="", timeout=HEALTH_SECONDS)
    deadline = time.monotonic() + START_SECONDS
    while True:
        with suppress(ResourceError):
            if server.ask("/health").status == 200:
                return
        if guard.poll() is not None:
            raise ResourceError(
                f"the engine ended before it answered ({find_cause(log)})",
                next_step=f"look at its log, {log}",
            )
        if time.monotonic() > deadline:
            raise ResourceError(
                f"the engine did not answer in {START_SECONDS:g} s",
                next_step=f"look at its log, {log}",
            )
        time.sleep(0.2)


def end(guard: "subprocess.Popen[bytes]", *, waits: bool = True) -> None:
    """End the engine through its guard, and without the guard if that has not ended everything.

    Args:
        guard: the process of guard.py.
        waits: whether to wait until the engine has ended, which may take GRACE_SECONDS.
    """
    assert guard.stdin is not None
    guard.stdin.close()
    if waits:
        guard.wait()
        end_session(guard.pid, GRACE_SECONDS)


def find_cause(log: Path) -> str:
    """Return the likely cause of a failure that a log names.

    That is the first exception, because the others follow from it, with the line below it if that
    is indented. Without an exception it is the last line.
    """
    lines = read_lines(log) or ["it printed nothing"]
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if "WARNING" not in line and (exception := EXCEPTION.search(line)):
            return f"{exception[0]} {below if below[:1].isspace() else ''}".strip()[
                :SHOWN_CHARACTERS
            ]
    return lines[-1][:SHOWN_CHARACTERS]


def read_lines(log: Path) -> list[str]:
    """Return the lines of a log that are not blank."""
    return [
        line
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
