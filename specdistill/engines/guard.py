"""A process between an engine's server and the process that started it: when one of them ends, it ends all that the engine started.

    python guard.py GRACE_SECONDS COMMAND …

It leads the session that the engine runs in. Its standard input is a pipe that the starting process alone holds open, and that the kernel
closes however that process ends, by SIGKILL too.
"""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil


def main(grace_seconds: str, *command: str) -> None:
    engine = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=surroundings(command[0]))
    while engine.poll() is None and not select.select([sys.stdin], [], [], 0.1)[0]:
        pass
    print(
        f"ended with status {engine.poll()}" if engine.poll() is not None else "ended from outside",
        flush=True,
    )
    end_session(os.getpid(), float(grace_seconds))


def surroundings(program: str) -> dict[str, str]:
    """The environment of a program in another Python than this one: it sees none of ours, and finds the tools next to it."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"PATH": f"{Path(program).parent}{os.pathsep}{kept.get('PATH', os.defpath)}"}


def end_session(session: int, grace_seconds: float) -> None:
    """End the processes of a session but its leader: by SIGTERM, so that they give back what they share, and after the grace by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + grace_seconds
        for process in members(session):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        while members(session) and time.monotonic() < deadline:
            time.sleep(0.05)


def members(session: int) -> list[psutil.Process]:
    """The processes of a session but its leader; dead ones that nobody has waited for do not count."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            if (
                os.getsid(process.pid) == session != process.pid
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
