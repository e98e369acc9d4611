"""A process between an engine's server and the process that started it.

When one of the two ends, this process ends everything that the engine started.

    python guard.py GRACE_SECONDS COMMAND …

This process leads the session in which the engine runs. Its standard input is a pipe that only the
starting process holds open. The kernel closes the pipe however the starting process ends, also by
SIGKILL.
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
    """Run a command until it ends or standard input closes, then end all processes it started.

    The process that starts this one holds the other end of standard input, a pipe. The pipe closes
    whenever the starting process ends, so the engine never outlives the starting process.

    Args:
        grace_seconds: the seconds from SIGTERM to SIGKILL, when processes are ended.
        command: the program that starts the engine, and its arguments.
    """
    # Check ten times a second whether the engine has ended or standard input was closed. `select`
    # reports a closed pipe as readable.
    engine = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=build_environment(command[0]))
    while engine.poll() is None and not select.select([sys.stdin], [], [], 0.1)[0]:
        pass

    # Write to the engine's log how the engine ended.
    print(
        f"the engine ended with status {engine.poll()}"
        if engine.poll() is not None
        else "the engine was stopped by the process that started it",
        flush=True,
    )
    # This process leads the session of everything that the engine has started.
    end_session(os.getpid(), float(grace_seconds))


def build_environment(program: str) -> dict[str, str]:
    """Return the environment variables for a program that may run in another Python environment.

    Variables that point to this process's Python environment are removed. The program's folder
    comes first on the PATH, so that the program finds the tools that are installed next to it.

    Args:
        program: the path of the program.
    """
    kept_variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    return kept_variables | {
        "PATH": f"{Path(program).parent}{os.pathsep}{kept_variables.get('PATH', os.defpath)}"
    }


def end_session(session: int, grace_seconds: float) -> None:
    """End all processes of a session except its leader.

    The processes get SIGTERM first, so that they can free GPU memory and shared memory. After the
    grace period those that still run get SIGKILL.

    Args:
        session: the id of the session, which is the process id of its leader.
        grace_seconds: the seconds between the two signals.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        # Send the signal, then wait until all processes have ended or the time is over.
        deadline = time.monotonic() + grace_seconds
        for process in list_members(session):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        while list_members(session) and time.monotonic() < deadline:
            time.sleep(0.05)


def list_members(session: int) -> list[psutil.Process]:
    """Return the running processes of a session except its leader.

    Zombies are left out: they have ended, and only wait for their parent to collect their status.

    Args:
        session: the id of the session, which is the process id of its leader.
    """
    # A process may end while it is looked at, which raises one of the suppressed errors.
    members = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            is_member = os.getsid(process.pid) == session and process.pid != session
            if is_member and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


if __name__ == "__main__":
    main(*sys.argv[1:])
