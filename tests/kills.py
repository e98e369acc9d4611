"""Commands that are killed by SIGKILL at random moments, and repeated until they end."""

import faulthandler
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from tests.processes import fork
from tests.scripts import specdistill

KILLS = int(os.environ.get("SPECDISTILL_KILLS", "20"))  # of each command
IN_A_ROW = 4  # kills, at most, before the command may run to its end
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
HANGS = 120.0  # seconds
# answers of a block that is whole, and what datasets had begun
USED_UP = re.compile(r"block-\d+\.jsonl$|^prepared/tmp")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Ended(NamedTuple):
    code: int | None
    seconds: float
    changes: int  # of files


def survive(
    words: Sequence[str],
    folder: Path,
    *outputs: Callable[[], dict[str, bytes]],
    reset: Callable[[], object] = lambda: None,
    in_parts: bool = False,
    kills: int = KILLS,
) -> None:
    """Kill `specdistill` with these arguments, half of the times after a while, half at a change of
    a file, both random with a fixed seed.

    folder: all that it writes; `reset` puts back what it writes elsewhere, and what it is to
    replace. outputs: what stands there under the output's name. After each kill every output is
    whole or not there (in_parts: each file of it), the files that were there before are as they
    were, and the same command makes what one makes that nobody killed, with nothing else next to
    it.
    """
    others, moments, copy = (
        contents(folder),
        random.Random(0),
        folder.with_name(f"{folder.name}-before"),
    )
    shutil.copytree(folder, copy)

    def start() -> None:
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)
        reset()

    start()
    assert run(words).code == 0
    expected, names = [output() for output in outputs], contents(folder).keys()
    assert all(expected)
    start()
    whole = run(words)  # a second one: caches elsewhere are full by now
    assert [output() for output in outputs] == expected
    while kills > 0:
        start()
        for _ in range(IN_A_ROW):
            by_time = moments.random() < 0.5
            after = moments.uniform(0, whole.seconds) if by_time else None
            ended = run(
                words, after=after, change=0 if by_time else moments.randint(1, whole.changes)
            )
            assert ended.code in (-signal.SIGKILL, 0, 2), ended  # 2: it is there already
            kills -= ended.code == -signal.SIGKILL
            for output, all_of_it in zip(outputs, expected, strict=True):
                found = output()
                assert found.items() <= all_of_it.items(), sorted(all_of_it.keys() ^ found.keys())
                assert in_parts or len(found) in (0, len(all_of_it)), sorted(
                    all_of_it.keys() - found.keys()
                )
            assert others.items() <= contents(folder).items()
        is_whole = [output() for output in outputs] == expected
        assert run(words).code in ((0, 2) if is_whole else (0,))
        assert [output() for output in outputs] == expected
        left = sorted(name for name in contents(folder).keys() ^ names if not USED_UP.search(name))
        assert not left, left


def run(words: Sequence[str], *, after: float | None = None, change: int = 0) -> Ended:
    """In a child of this process. after: seconds to the kill. change: the number of the change that
    the kill comes in place of, or for a file that is opened to be written: when it is open and
    empty.
    """
    counted = multiprocessing.get_context("fork").RawValue("i", 0)

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES and (event != "open" or arguments[2] & WRITING):
            counted.value += 1
            if counted.value == change:
                with suppress(OSError):
                    if event == "open":
                        os.open(arguments[0], arguments[2], 0o666)
                os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        faulthandler.dump_traceback_later(HANGS, exit=True)
        # not the one of all children, which a killed one may hold
        tqdm.get_lock().locks[:] = [threading.RLock()]
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


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
