"""Generated programs, run in a process of their own with limits on time, memory and file size.

The limits contain mistakes, not malice: a program can read files and use the network as its user can. Nothing is run unless
`eval.run_code=true`.
"""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

SECONDS = 10.0
MEMORY_BYTES = 2**30
FILE_BYTES = 2**20
ENDED = 99  # exit code of a program that ran to its end; one that exits before its tests has another

# The child sets its own limits before it reads the program, which cannot raise them again.
LIMITED = f"""
import resource, sys
for limit, most in ((resource.RLIMIT_AS, {MEMORY_BYTES}), (resource.RLIMIT_FSIZE, {FILE_BYTES}), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(limit, (most, most))
exec(compile(sys.stdin.read(), "program", "exec"), {{"__name__": "program"}})
sys.exit({ENDED})
"""


def passes(program: str, seconds: float = SECONDS) -> bool:
    """Whether a program runs to its last line, in time and without an error. Its child processes are ended with it."""
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", LIMITED],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath},
            start_new_session=True,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        try:
            child.communicate(program, timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(child)
        return child.returncode == ENDED


def _end(child: "subprocess.Popen[str]") -> None:
    with suppress(ProcessLookupError):  # it has ended already
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
