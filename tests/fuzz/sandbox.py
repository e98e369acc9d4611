"""A command in a child of this process, and what the contract of commands says about its end.

The child starts with the libraries loaded.
"""

import faulthandler
import logging
import os
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NamedTuple

from specdistill.cli.main import main

SECONDS = 20
MAX_CHARACTERS = 1000  # characters of a message
MAX_BYTES = 8 * 2**30  # memory of a child
GATING = ("doctor", "eval", "gate", "publish")  # exit code 1 says that a check failed
# Keys whose value is a folder to write into. A release is staged in the run's own; the Hub of a
# test lies next to the working folder.
OUTPUTS = re.compile(r"(?:(?:train\.|eval\.)?output_dir|hidden_states\.path|data\.cache_dir)=(.+)")
ALWAYS = ("run/release", "../hub")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
UNFORESEEN = re.compile(r"This is a bug in specdistill; the traceback is in (\S+)")
FRAME = re.compile(r'File "[^"]*?/((?:specdistill|eval|train)/[^"]+)", line \d+, in (\w+)')
ERROR = re.compile(r"^([\w.]+)(?::|$)", re.MULTILINE)


class Ended(NamedTuple):
    """The end of a command.

    code: the exit code, negative for a signal, None for a command that hung. changed: paths that
    came, went or changed.
    """

    command: Sequence[str]
    code: int | None
    out: str
    err: str
    changed: list[str]


class Sandbox:
    """Folders for one command at a time.

    It runs in `work`, which has a copy of `valid`; its home, its tmp and what it prints are next to
    that.
    """

    def __init__(self, folder: Path, valid: Path) -> None:
        self.folder, self.valid, self.work = folder, valid, folder / "a" / "b" / "work"

    def run(
        self,
        command: Sequence[str],
        files: dict[str, bytes],
        around: Callable[[], AbstractContextManager[object]],
    ) -> Ended:
        """Run the command with these files in place of valid ones."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.valid, self.work)
        for name in ("home", "tmp"):
            (self.folder / name).mkdir()
        for name, content in files.items():
            (self.work / name).write_bytes(content)
        before = self._read_files()
        with warnings.catch_warnings():
            # Python warns about a fork next to threads; pytest-xdist has one, which only waits.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            self._run_in_child(command, around)
        code, after = _wait_for_child(child), self._read_files()
        out, err = (
            (self.folder / name).read_text(encoding="utf-8", errors="surrogateescape")
            for name in ("out", "err")
        )
        return Ended(
            command,
            code,
            out,
            err,
            sorted(path for path in before | after if before.get(path) != after.get(path)),
        )

    def _read_files(self) -> dict[str, bytes]:
        """Return every file next to the working folder and in it."""
        files = (path for path in (self.folder / "a").rglob("*") if not path.is_dir())
        return {os.path.relpath(path, self.work): path.read_bytes() for path in files}

    def _run_in_child(
        self, command: Sequence[str], around: Callable[[], AbstractContextManager[object]]
    ) -> None:
        code = 70
        try:
            os.setsid()
            faulthandler.disable()  # pytest's handler writes elsewhere
            for limit, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_DATA, MAX_BYTES)):
                resource.setrlimit(limit, (most, most))
            os.chdir(self.work)
            os.environ.update(HOME=str(self.folder / "home"), TMPDIR=str(self.folder / "tmp"))
            tempfile.tempdir = None
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(self.folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
            sys.stdout, sys.stderr = (
                os.fdopen(1, "w", encoding="utf-8"),
                os.fdopen(2, "w", 1, "utf-8", "backslashreplace"),
            )
            for library in ("transformers", "datasets", "huggingface_hub"):
                for handler in logging.getLogger(library).handlers:
                    if isinstance(handler, logging.StreamHandler):
                        handler.setStream(sys.stderr)
            warnings.simplefilter("ignore")
            with around():
                code = int(main(command))
        except SystemExit as end:  # raised by a script
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)


def _wait_for_child(child: int) -> int | None:
    """Return the exit code of a child, or None for one that had to be killed.

    None of its own children outlives it.
    """
    descriptor = os.pidfd_open(child)
    in_time = bool(select.select([descriptor], [], [], SECONDS)[0])
    os.close(descriptor)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if in_time else None


def broken(ended: Ended) -> str | None:
    """Return which clause of the contract a command broke, and where, or None."""
    command, code, out, err, changed = ended
    if code is None or code < 0:
        return "a hang" if code is None else f"killed by {signal.Signals(-code).name}"
    log = Path(found[1]).read_text(encoding="utf-8") if (found := UNFORESEEN.search(err)) else err
    if found or "Traceback (most recent call last)" in log:
        return (
            f"unforeseen: {ERROR.findall(log)[-1]} in"
            f" {':'.join((FRAME.findall(log) or [('?',)])[-1])}"
        )
    if (
        code not in (0, 1, 2, 3, 4)
        or (code == 1 and command[0] not in GATING)
        or (code in (2, 3) and "error: " not in err)
    ):
        return f"exit code {code}"
    if steering := next(
        (line for line in f"{out}\n{err}".split("\n") if CONTROL.search(line)), None
    ):
        return f"control characters: {CONTROL.sub('�', steering)[:60]}"
    if (longest := max(err.split("\n"), key=len)) and len(longest) > MAX_CHARACTERS:
        return f"a message of {len(longest)} characters: {longest[:60]}"
    outputs = tuple(match[1] for word in command if (match := OUTPUTS.fullmatch(word)))
    elsewhere = next((path for path in changed if not path.startswith(outputs + ALWAYS)), None)
    return elsewhere and f"files elsewhere: {elsewhere}"
