"""Commands that are killed by SIGKILL at random moments, and repeated until they end."""

import faulthandler
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.processes import fork
from tests.scripts import specdistill

KILLS = int(os.environ.get("SPECDISTILL_KILLS", "20"))  # of each command
MAX_KILLS_IN_A_ROW = 4  # kills, at most, before the command may run to its end
CHANGES = {
    "open",
    "os.link",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.symlink",
    "os.truncate",
}
HANG_TIMEOUT_S = 120.0  # seconds
# Answers of a finished block, and files that datasets had begun.
USED_UP_FILES = re.compile(r"block-\d+\.jsonl$|^prepared/tmp")
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Ended(NamedTuple):
    code: int | None
    seconds: float
    changes: int  # of files


def check_survives_kills(
    words: Sequence[str],
    folder: Path,
    *outputs: Callable[[], dict[str, bytes]],
    reset: Callable[[], object] = lambda: None,
    in_parts: bool = False,
    kills: int = KILLS,
) -> None:
    """Check that `specdistill` with these arguments survives kills.

    Half of the kills come after a while, half at a change of a file, both random with a fixed seed.
    After each kill every output is whole or not there (in_parts: each file of it), the files that
    were there before are as they were, and the same command makes what one makes that nobody
    killed, with nothing else next to it.

    folder: all that it writes; `reset` puts back what it writes elsewhere, and what it is to
    replace. outputs: what stands there under the output's name.
    """
    other_files, generator, copy = (
        read_files(folder),
        random.Random(0),
        folder.with_name(f"{folder.name}-before"),
    )
    shutil.copytree(folder, copy)

    def restore() -> None:
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)
        reset()

    restore()
    assert run(words).code == 0
    expected, names = [output() for output in outputs], read_files(folder).keys()
    assert all(expected)
    restore()
    whole = run(words)  # the second run finds caches elsewhere filled
    assert [output() for output in outputs] == expected
    while kills > 0:
        restore()
        for _ in range(MAX_KILLS_IN_A_ROW):
            by_time = generator.random() < 0.5
            after = generator.uniform(0, whole.seconds) if by_time else None
            ended = run(
                words, after=after, change=0 if by_time else generator.randint(1, whole.changes)
            )
            assert ended.code in (-signal.SIGKILL, 0, 2), ended  # 2: the output is there already
            kills -= ended.code == -signal.SIGKILL
            for output, all_files in zip(outputs, expected, strict=True):
                found = output()
                assert found.items() <= all_files.items(), sorted(all_files.keys() ^ found.keys())
                assert in_parts or len(found) in (0, len(all_files)), sorted(
                    all_files.keys() - found.keys()
                )
            assert other_files.items() <= read_files(folder).items()
        is_whole = [output() for output in outputs] == expected
        assert run(words).code in ((0, 2) if is_whole else (0,))
        assert [output() for output in outputs] == expected
        left = sorted(
            name for name in read_files(folder).keys() ^ names if not USED_UP_FILES.search(name)
        )
        assert not left, left


def run(words: Sequence[str], *, after: float | None = None, change: int = 0) -> Ended:
    """Run the command in a child of this process.

    after: seconds to the kill. change: the number of the change that the kill comes in place of, or
    for a file that is opened to be written: when it is open and empty.
    """
    counted = multiprocessing.get_context("fork").RawValue("i", 0)

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES and (event != "open" or arguments[2] & WRITE_FLAGS):
            counted.value += 1
            if counted.value == change:
                with suppress(OSError):
                    if event == "open":
                        os.open(arguments[0], arguments[2], 0o666)
                os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        faulthandler.dump_traceback_later(HANG_TIMEOUT_S, exit=True)
        sys.addaudithook(count)
        done = specdistill(*words)
        sys.stderr.write(done.stderr if done.returncode else "")
        sys.exit(done.returncode)

    begin = time.monotonic()
    process = fork(work)
    process.join(after)
    if after is not None and process.exitcode is None:
        process.kill()
    process.join()
    return Ended(process.exitcode, time.monotonic() - begin, counted.value)


def read_files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
