"""Folders that commands write.

One process at a time writes a folder, it is written whole or not at all, and it never replaces what
somebody else put there.
"""

import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from specdistill.common.errors import ResourceError, UserError, convert_errors, logger

KEY = "output_dir"  # the key of commands that make a new folder
MARK = ".specdistill"  # a file in folders that this package may empty
START_TIME_MARK = ", started "  # stands between a process and its start time in a lock file
_HELD: set[int] = set()  # descriptors of files and folders that this process locks


def _release_inherited_locks() -> None:
    """Close the descriptors of all locks that the parent process holds."""
    for descriptor in _HELD:
        os.close(descriptor)
    _HELD.clear()


# A lock is held until every copy of its descriptor is closed. A worker that outlives a killed
# process would keep holding it.
os.register_at_fork(after_in_child=_release_inherited_locks)


def check_writable(folder: Path, key: str) -> None:
    """Raise UserError, naming `key`, for a folder that cannot be made or written.

    Nothing is left behind.
    """
    existing = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
    )
    with (
        convert_errors(OSError, key, f"{folder}, in {existing}", "a folder that can be written"),
        tempfile.TemporaryFile(dir=existing),
    ):
        pass


def check_new(output: Path) -> None:
    """Raise UserError if a new folder exists already, or cannot be written."""
    if output.exists() or output.is_symlink():
        raise UserError(KEY, got=f"{output}, which exists", expected="a new folder")
    check_writable(output, KEY)


def check_holds(folder: Path, key: str, what: str, is_own: Callable[[str], object]) -> None:
    """Check that a folder holds only files of one kind of folder.

    Args:
        folder: the folder.
        key: the key that the error names.
        what: the kind of folder, for the error.
        is_own: returns, from the name of a file, whether such a folder has it.

    Raises:
        UserError: for a folder with any other file.
    """
    foreign = next((path.name for path in folder.glob("*") if not is_own(path.name)), None)
    if foreign:
        raise UserError(
            key, got=f"{folder}, which holds {foreign}", expected=f"a new folder, or one of {what}"
        )


@contextmanager
def create_folder(output: Path, *, replaces: bool = False, key: str = KEY) -> Iterator[Path]:
    """Create a folder that gets its name only once everything in it is written.

    If writing fails, nothing is left behind.

    Args:
        output: the folder.
        replaces: whether a folder of this package may exist there. It is removed first.
        key: the key that errors of writing name.

    Yields:
        The folder to write to, which is renamed to `output` at the end.

    Raises:
        UserError: if the folder exists without `replaces`, and while another process writes it.
        ResourceError: if writing fails.
    """
    if not replaces:
        check_new(output)
    partial = output.with_name(f".{output.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with _lock_path(partial, os.O_RDONLY, key, output):
            try:
                if replaces and output.exists():
                    # It is moved away at once, because a half of it would look like a whole one.
                    output.rename(partial / output.name)
                # A process that was killed may have left files too.
                for path in partial.iterdir():
                    path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)
                yield partial
                partial.rename(output)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise ResourceError(
            f"{key}: could not write {output} ({error})", next_step="check space and permissions"
        ) from error


def empty_output_folder(folder: Path, key: str) -> None:
    """Make a folder, or empty one that an earlier run made.

    Raises:
        UserError: naming `key`, for a folder that no earlier run made.
    """
    if folder.is_symlink() or (folder.exists() and not (folder / MARK).is_file()):
        raise UserError(
            key, got=f"{folder}, which an earlier run did not make", expected="a folder without it"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARK).touch()


@contextmanager
def exclusive_lock(lock: Path, key: str, what: Path, *, saves_memory: str = "") -> Iterator[None]:
    """Hold an exclusive lock, within which no other process writes `what`.

    The lock file names its process while it writes, and is empty once it has ended, with or without
    an error. So a name in a file that nobody locks belongs to a process that was killed. A warning
    says so. A killed process holds no lock.

    Args:
        lock: the lock file.
        key: the key that the error names.
        what: what is written.
        saves_memory: the key that the warning says to lower, because memory may not have sufficed.

    Raises:
        UserError: naming the other process, while another process writes it.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with _lock_path(lock, os.O_RDWR | os.O_CREAT, key, what) as descriptor:
        message = os.pread(descriptor, 200, 0).decode(errors="replace")
        # Earlier versions left the name of the process in the file after its end, but did not write
        # START_TIME_MARK.
        if START_TIME_MARK in message:
            advice = f": lower {saves_memory}, or free memory" if saves_memory else ""
            logger.warning(
                f"{what}: an earlier run was killed while it wrote this ({message}). What it had"
                " finished is kept. Exit code 137 means that the system ended it because memory"
                f" ran out{advice}."
            )
        os.ftruncate(descriptor, 0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        os.pwrite(
            descriptor,
            f"process {os.getpid()} on {socket.gethostname()}{START_TIME_MARK}{started}".encode(),
            0,
        )
        try:
            yield
        finally:
            if descriptor in _HELD:  # A child process has closed it.
                os.ftruncate(descriptor, 0)


@contextmanager
def _lock_path(path: Path, flags: int, key: str, what: Path) -> Iterator[int]:
    """Open a file or folder and lock it, and yield its descriptor.

    Args:
        path: the file or folder.
        flags: of `os.open`.
        key: the key that the error names.
        what: what is written, for the error.

    Raises:
        UserError: while another process holds the lock.
    """
    descriptor = os.open(path, flags, 0o666)
    _HELD.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            writer = (
                os.pread(descriptor, 200, 0).decode().partition(START_TIME_MARK)[0]
                if path.is_file()
                else ""
            )
            raise UserError(
                key,
                got=f"{what}, which {writer or 'another process'} is writing",
                expected="one writer at a time: start this again when that one has ended",
            ) from error
        yield descriptor
    finally:
        if descriptor in _HELD:  # A child process has closed it.
            _HELD.remove(descriptor)
            os.close(descriptor)
