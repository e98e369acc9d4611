"""Which mutations of the library the quick tests notice: each is applied to a copy of the tree, and the modules listed with it are run.

    python bench/mutants.py [LIST.json] [ID …]      # tests/mutants.json, all of it

Prints the test that caught each, then the survivors; the exit code is 1 if there are any. An entry of the list: id, file, old (text that
the file holds once), new (what replaces it), tests (the modules that a developer would run). Each runs in a child of this process, which
has the libraries loaded: importing them takes longer than most of these tests.
"""

import os
import sys
import tempfile
from pathlib import Path

CACHE = tempfile.TemporaryDirectory(prefix="specdistill-mutants-")
# Before the libraries that read them.
os.environ.update(HF_HOME=CACHE.name, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", MPLBACKEND="Agg")

import json
import multiprocessing
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple, cast

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutants.json"
LIBRARIES = ("torch", "transformers", "datasets", "accelerate", "peft", "matplotlib.pyplot", "huggingface_hub", "scipy.stats")


class Mutant(NamedTuple):
    id: str
    file: str
    old: str
    new: str
    tests: list[str]


class Outcome(NamedTuple):
    """caught_by: the first test that failed, or what pytest could not collect; None for a survivor."""

    mutant: Mutant
    caught_by: str | None
    seconds: float


class FirstFailure:
    """A plugin of pytest that keeps the name of the first test, or module, that failed."""

    name: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.name = self.name or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.name = self.name or report.nodeid


def read_mutants(path: Path) -> list[Mutant]:
    return [Mutant(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


@contextmanager
def copy_of(tree: Path) -> Iterator[Path]:
    """A copy of the files that git knows or would add, which the tests change and read from."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=tree,
        capture_output=True,
        text=True,
        check=True,
    )
    with tempfile.TemporaryDirectory(prefix="specdistill-mutants-") as folder:
        for name in listed.stdout.split("\0"):
            if name and (tree / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(tree / name, Path(folder) / name)
        yield Path(folder)


def first_failure(folder: Path, tests: Sequence[str]) -> str | None:
    """Run the quick tests of these modules in this process, which is of no use afterwards. Raises when none could be run."""
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path.insert(0, str(folder))
    failure, log = FirstFailure(), StringIO()
    # Of the libraries that are loaded, one brings a plugin.
    options = ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider", "-n0", "-x", "-m", "not long"]
    with redirect_stdout(log):
        code = pytest.main([*options, *tests], plugins=[failure])
    assert (code == pytest.ExitCode.OK) == (failure.name is None), log.getvalue()[-3000:]
    return failure.name


def run(tree: Path, mutant: Mutant) -> Outcome:
    start = time.perf_counter()
    with copy_of(tree) as folder:
        path = folder / mutant.file
        text = path.read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, f"{mutant.id}: {mutant.file} holds its old text {text.count(mutant.old)} times"
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        caught_by = first_failure(folder, mutant.tests)
    return Outcome(mutant, caught_by, time.perf_counter() - start)


def outcomes(tree: Path, mutants: Sequence[Mutant], num_workers: int) -> Iterator[Outcome]:
    """In the order in which they end, each in a process of its own, which may start others."""
    waiting, running = list(mutants), dict[Connection, BaseProcess]()
    context = multiprocessing.get_context("fork")
    while waiting or running:
        while waiting and len(running) < num_workers:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(sender, tree, waiting.pop(0)))
            process.start()
            sender.close()
            running[receiver] = process
        for receiver in cast(list[Connection], wait([*running])):
            outcome: Outcome = receiver.recv()
            running.pop(receiver).join()
            yield outcome


def _send(sender: Connection, tree: Path, mutant: Mutant) -> None:
    sender.send(run(tree, mutant))


def main(arguments: Sequence[str]) -> int:
    path = Path(arguments[0]) if arguments and arguments[0].endswith(".json") else LIST
    names = [name for name in arguments if not name.endswith(".json")]
    mutants = [mutant for mutant in read_mutants(path) if not names or mutant.id in names]
    os.environ.setdefault("SPECDISTILL_TEST_DATA", str(ROOT.parent / "shared" / "data"))
    for library in LIBRARIES:
        __import__(library)
    survivors = []
    for mutant, caught_by, seconds in outcomes(ROOT, mutants, num_workers=os.cpu_count() or 1):
        print(f"{mutant.id}: {f'caught by {caught_by}' if caught_by else 'SURVIVES'} ({seconds:.0f} s)", flush=True)
        survivors += [] if caught_by else [mutant.id]
    print(f"{len(survivors)} of {len(mutants)} mutations survive" + "".join(f"\n  {name}" for name in survivors))
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
