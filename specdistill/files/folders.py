"""Folders that commands write: one process at a time, whole or not at all, and never in place of what somebody else put there."""

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from specdistill.errors import ResourceError, UserError, refusing

KEY = "output_dir"  # of a command that makes a new folder
MARK = ".specdistill"  # a file in a folder that is this package's to empty
_HELD: set[int] = set()  # files and folders that this process locks


def _let_go() -> None:
    for held in _HELD:
        os.close(held)
    _HELD.clear()


# A lock is held until every copy of its descriptor is closed: a worker that outlives a killed process would hold it on.
os.register_at_fork(after_in_child=_let_go)


def check_writable(folder: Path, key: str) -> None:
    """Raises UserError, naming `key`, for a folder that could not be made or written; leaves nothing behind."""
    existing = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
    )
    with (
        refusing(OSError, key, f"{folder}, in {existing}", "a folder that can be written"),
        tempfile.TemporaryFile(dir=existing),
    ):
        pass


def check_new(output: Path) -> None:
    """Raises UserError when something stands in the place of a new folder, or it cannot be written."""
    if output.exists() or output.is_symlink():
        raise UserError(KEY, got=f"{output}, which exists", expected="a new folder")
    check_writable(output, KEY)


def check_holds(folder: Path, key: str, what: str, is_own: Callable[[str], object]) -> None:
    """Raises UserError, naming `key`, for a folder with a file that `what` does not have, by its name."""
    if foreign := next((path.name for path in folder.glob("*") if not is_own(path.name)), None):
        raise UserError(
            key, got=f"{folder}, which holds {foreign}", expected=f"a new folder, or one of {what}"
        )


@contextmanager
def new_folder(output: Path, *, replaces: bool = False) -> Iterator[Path]:
    """A folder to write in, which takes its name once all is written; nothing is left behind otherwise.

    replaces: what is there is this package's, and removed first. Raises UserError when the output exists otherwise, and while another
    process writes it; ResourceError when writing fails.
    """
    if not replaces:
        check_new(output)
    partial = output.with_name(f".{output.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with _locked(partial, os.O_RDONLY, KEY, output):
            try:
                if replaces and output.exists():
                    output.rename(
                        partial / output.name
                    )  # at once: a half of it would look like a whole one
                for left in partial.iterdir():  # by a process that was killed, too
                    left.unlink() if left.is_symlink() or left.is_file() else shutil.rmtree(left)
                yield partial
                partial.rename(output)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        what = f"{KEY}: could not write {output} ({error})"
        raise ResourceError(what, next_step="check space and permissions") from error


def empty_own(folder: Path, key: str) -> None:
    """Make a folder, or empty one that an earlier run made. Raises UserError for one that holds anything else."""
    if folder.is_symlink() or (folder.exists() and not (folder / MARK).is_file()):
        raise UserError(
            key, got=f"{folder}, which an earlier run did not make", expected="a folder without it"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARK).touch()


@contextmanager
def alone(lock: Path, key: str, what: Path) -> Iterator[None]:
    """Within it no other process writes `what`. Raises UserError, naming the process that does; a killed one holds no lock."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with _locked(lock, os.O_RDWR | os.O_CREAT, key, what) as held:
        os.ftruncate(held, 0)
        os.pwrite(held, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield


@contextmanager
def _locked(path: Path, flags: int, key: str, what: Path) -> Iterator[int]:
    """A file or folder, opened and locked by this process alone."""
    held = os.open(path, flags, 0o666)
    _HELD.add(held)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            writer = os.pread(held, 200, 0).decode() if path.is_file() else ""
            got = f"{what}, which {writer or 'another process'} is writing"
            raise UserError(
                key,
                got=got,
                expected="one writer at a time: start this again when that one has ended",
            ) from error
        yield held
    finally:
        if held in _HELD:  # not so in a child
            _HELD.remove(held)
            os.close(held)
