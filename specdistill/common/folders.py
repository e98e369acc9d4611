"""Create, lock and check the folders that commands write.

Only one process at a time writes a folder. The folder appears under its name when it is complete,
or not at all. A folder of the user is not emptied: `empty_output_folder` looks for a mark in it,
and a caller of `create_folder` with `replaces` checks what is in it.
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

KEY = "output_dir"  # the key with which commands name a new folder
MARK = ".specdistill"  # an empty file in each folder that specdistill made and may empty again
START_TIME_MARK = ", started "  # the words between a process and its start time in a lock file
_HELD: set[int] = set()  # the descriptors of the files and folders that this process has locked


def _release_inherited_locks() -> None:
    """Close the copies of the parent process's locks in a forked child process.

    `_HELD` is the set of descriptors of the files that this process has locked. fork copies it, and
    the descriptors. A lock lasts until all copies of its descriptor are closed. So if a child
    process kept its copies open, the files would stay locked after the parent process has ended.
    """
    for descriptor in _HELD:
        os.close(descriptor)
    _HELD.clear()


os.register_at_fork(after_in_child=_release_inherited_locks)


def check_writable(folder: Path, key: str) -> None:
    """Raise UserError, naming `key`, if a folder cannot be made or written.

    The check writes a temporary file, and leaves nothing behind.
    """
    # If the folder does not exist yet, test the closest folder above it that exists.
    existing = find_existing_folder(folder)
    with (
        convert_errors(OSError, key, f"{folder}, in {existing}", "a folder that can be written"),
        tempfile.TemporaryFile(dir=existing),
    ):
        pass


def find_existing_folder(folder: Path) -> Path:
    """Return a folder, or the closest folder above it that exists, as an absolute path."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return existing


def check_new(output: Path) -> None:
    """Raise UserError, naming `output_dir`, if a new folder exists already or cannot be written."""
    # `exists` is False for a link whose target is missing, so links need a test of their own.
    if output.exists() or output.is_symlink():
        raise UserError(KEY, got=f"{output}, which exists", expected="a new folder")
    check_writable(output, KEY)


def check_holds(folder: Path, key: str, kind: str, is_own: Callable[[str], object]) -> None:
    """Check that a folder holds only files of one kind, such as those of a row set.

    Args:
        folder: the folder, which need not exist.
        key: the key that the error names.
        kind: what a folder with such files is called, for the error, such as "a row set".
        is_own: a function that gets the name of a file, and returns whether it is of this kind.

    Raises:
        UserError: for a folder with any other file.
    """
    for path in folder.glob("*"):
        if not is_own(path.name):
            raise UserError(
                key,
                got=f"{folder}, which holds {path.name}",
                expected=f"a new folder, or the folder of {kind}",
            )


@contextmanager
def create_folder(output: Path, *, replaces: bool = False, key: str = KEY) -> Iterator[Path]:
    """Create a folder that gets its name only when everything in it is written.

    In its `with` block, the caller writes to a hidden folder next to `output`. At the end of the
    block, the hidden folder is renamed to `output`. After an error, it is deleted.

    Args:
        output: the folder.
        replaces: whether `output` may exist already. If it does, its old content is removed,
            whoever wrote it.
        key: the key that is named in errors of writing.

    Yields:
        The folder to write to, which is renamed to `output` at the end.

    Raises:
        UserError: if `output` exists although `replaces` is False, and while another process writes
            to the same folder.
        ResourceError: if writing fails.
    """
    if not replaces:
        check_new(output)
    partial = output.with_name(f".{output.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        # Lock the hidden folder. Folders can only be opened for reading, which suffices for a lock.
        with _lock_path(partial, os.O_RDONLY, key, output):
            try:
                # Move the old folder into the hidden folder in one step, and delete it there. If it
                # were deleted at `output`, and this process were killed meanwhile, what is left
                # there would look complete.
                if replaces and output.exists():
                    output.rename(partial / output.name)
                # Empty the hidden folder: it may hold the old folder, and files that a killed
                # process has left.
                for path in partial.iterdir():
                    if path.is_symlink() or path.is_file():
                        path.unlink()
                    else:
                        shutil.rmtree(path)
                yield partial
                partial.rename(output)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise ResourceError(
            f"{key}: could not write {output} ({error})",
            next_step="check free disk space and permissions",
        ) from error


def empty_output_folder(folder: Path, key: str) -> None:
    """Create an empty folder, and remove what an earlier run wrote to it.

    A folder that this function creates gets a hidden marker file (MARK). Only a folder with this
    file is emptied, so that the user's own files are never deleted.

    Raises:
        UserError: naming `key`, if the folder exists without the marker file, or is a link.
    """
    if folder.is_symlink() or (folder.exists() and not (folder / MARK).is_file()):
        raise UserError(
            key,
            got=f"{folder}, which exists and was not created by specdistill",
            expected="another path, or the same path after you have moved the folder away",
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARK).touch()


@contextmanager
def exclusive_lock(lock: Path, key: str, output: Path, *, saves_memory: str = "") -> Iterator[None]:
    """Hold an exclusive lock, so that no other process writes the same file or folder meanwhile.

    The process that holds the lock writes its id and start time into the lock file. It empties the
    file when its `with` block ends, with or without an error. When a process is killed, the
    operating system releases its lock, but the text stays in the file. So if a lock file has text
    although no process holds its lock, a process was killed, and a warning is logged.

    Args:
        lock: the lock file.
        key: the key that the error names.
        output: the file or folder that the caller writes, for messages.
        saves_memory: a key whose lower values take less memory. The warning suggests to lower the
            key, because the process may have been killed when memory ran out. Empty for none.

    Raises:
        UserError: if another process holds the lock. The error names this process.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with _lock_path(lock, os.O_RDWR | os.O_CREAT, key, output) as descriptor:
        # Warn if the file still has the text of a killed process, which is shorter than 200 bytes.
        # Text without START_TIME_MARK does not count: earlier versions of specdistill wrote it, and
        # left it in the file even if they were not killed.
        message = os.pread(descriptor, 200, 0).decode(errors="replace")
        if START_TIME_MARK in message:
            advice = f": lower {saves_memory}, or free memory" if saves_memory else ""
            logger.warning(
                f"An earlier run was killed while it wrote {output} ({message}). The parts that it"
                " had finished are kept. If its exit code was 137, the system ended it because"
                f" memory ran out{advice}."
            )

        # Write who holds the lock.
        os.ftruncate(descriptor, 0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = f"process {os.getpid()} on {socket.gethostname()}{START_TIME_MARK}{started}"
        os.pwrite(descriptor, holder.encode(), 0)
        try:
            yield
        finally:
            # In a forked child process, `_release_inherited_locks` has closed the descriptor.
            if descriptor in _HELD:
                os.ftruncate(descriptor, 0)


@contextmanager
def _lock_path(path: Path, flags: int, key: str, output: Path) -> Iterator[int]:
    """Open a file or folder, hold an exclusive lock on it, and yield its descriptor.

    Args:
        path: the file or folder to lock.
        flags: the flags of `os.open`.
        key: the key that the error names.
        output: the file or folder that the caller writes, for the error.

    Yields:
        The descriptor of the open file or folder.

    Raises:
        UserError: while another process holds the lock.
    """
    # `_HELD` has the descriptors of this process's locks. fork copies them. A lock lasts until all
    # copies are closed, so a child process closes its copies at once (`_release_inherited_locks`).
    descriptor = os.open(path, flags, 0o666)
    _HELD.add(descriptor)
    try:
        try:
            # LOCK_NB fails at once if another process holds the lock, instead of waiting for it.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            # If `path` is a lock file, the other process has written into it who it is, followed by
            # START_TIME_MARK. A folder that is locked holds no such text.
            message = os.pread(descriptor, 200, 0).decode() if path.is_file() else ""
            writer = message.partition(START_TIME_MARK)[0]
            raise UserError(
                key,
                got=f"{output}, which {writer or 'another process'} is writing",
                expected="one writer at a time: repeat the command when that process has ended",
            ) from error
        yield descriptor
    finally:
        # A child process that was forked within the `with` block may reach this line, too. It has
        # closed its copy of the descriptor already, and its `_HELD` is empty.
        if descriptor in _HELD:
            _HELD.remove(descriptor)
            os.close(descriptor)
