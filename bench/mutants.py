"""Which mutations of the library the quick tests notice: each is applied to a copy of the tree, and the modules listed with it are run.

    python bench/mutants.py [LIST.json] [ID …]      # tests/mutants.json, all of it

Prints the test that caught each, then the survivors; the exit code is 1 if there are any. An entry of the list: id, file, old (text that
the file holds once), new (what replaces it), tests (the modules that a developer would run). Each runs in a child of this process, which
has the libraries loaded: importing them takes longer than most of these tests. A mutation whose child dies, or cannot run the tests, is
printed with its exit code, and counts as a survivor.
"""

import importlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple, cast

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutants.json"
LIBRARIES = (
    "torch",
    "transformers",
    "datasets",
    "accelerate",
    "peft",
    "matplotlib.pyplot",
    "huggingface_hub",
    "scipy.stats",
)
MOST_SECONDS = 120  # of a test that takes two on a quiet machine


class Mutant(NamedTuple):
    id: str
    file: str
    old: str
    new: str
    tests: list[str]


class Outcome(NamedTuple):
    """caught_by: the first test that failed, or what pytest could not collect. exit_code: of the child, unless it ended as it should."""

    mutant: Mutant
    caught_by: str | None
    seconds: float
    exit_code: int = 0

    def __str__(self) -> str:
        died = (
            f"NOT TRIED, its process ended with exit code {self.exit_code}"
            if self.exit_code
            else "SURVIVES"
        )
        return f"{self.mutant.id}: {f'caught by {self.caught_by}' if self.caught_by else died} ({self.seconds:.0f} s)"


class FirstFailure:
    """A plugin of pytest that keeps the name of the first test, or module, that failed."""

    name: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self.name = self.name or report.nodeid

    pytest_collectreport = pytest_runtest_logreport


def read_mutants(path: Path) -> list[Mutant]:
    return [Mutant(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


@contextmanager
def copy_of(tree: Path) -> Iterator[Path]:
    """A copy of the files that git knows or would add, which the tests change and read from."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory(prefix="specdistill-mutants-") as folder:
        for name in listed.stdout.split("\0"):
            if name and (tree / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(tree / name, Path(folder) / name)
        yield Path(folder)


def first_failure(folder: Path, tests: Sequence[str]) -> str | None:
    """Run the quick tests of these modules in this process, which is of no use afterwards. Raises when none could be run."""
    import datasets

    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    # Cached rows are found by what they were made from, not by the code that made them: another mutation's would be found, too.
    datasets.config.HF_DATASETS_CACHE = Path(tempfile.mkdtemp(dir=os.environ["HF_HOME"]))
    sys.path.insert(0, str(folder))
    failure, log = FirstFailure(), StringIO()
    # Of the libraries that are loaded, one brings a plugin. A mutation may loop for ever.
    options = [
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
        "-p",
        "no:cacheprovider",
        "-n0",
        "-x",
        "-m",
        "not long",
    ]
    options += [f"--timeout={MOST_SECONDS}"]
    with redirect_stdout(log):
        code = pytest.main([*options, *tests], plugins=[failure])
    assert (code == pytest.ExitCode.OK) == (failure.name is None), log.getvalue()[-3000:]
    return failure.name


def first_failure_under(tree: Path, mutant: Mutant) -> str | None:
    with copy_of(tree) as folder:
        path = folder / mutant.file
        text = path.read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, (
            f"{mutant.id}: {mutant.file} holds its old text {text.count(mutant.old)} times"
        )
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        return first_failure(folder, mutant.tests)


def outcomes(tree: Path, mutants: Sequence[Mutant], num_workers: int) -> Iterator[Outcome]:
    """In the order in which they end, each in a process of its own, which may start others."""
    waiting, running = list(mutants), dict[Connection, tuple[BaseProcess, Mutant, float]]()
    context = multiprocessing.get_context("fork")
    while waiting or running:
        while waiting and len(running) < num_workers:
            mutant, (receiver, sender) = waiting.pop(0), context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(sender, tree, mutant))
            running[receiver] = process, mutant, time.perf_counter()
            process.start()
            sender.close()
        for receiver in cast(list[Connection], wait([*running])):
            process, mutant, start = running.pop(receiver)
            try:
                caught_by = receiver.recv()
            except EOFError:  # it died before it could say anything
                caught_by = None
            process.join()
            yield Outcome(mutant, caught_by, time.perf_counter() - start, process.exitcode or 0)


def _send(sender: Connection, tree: Path, mutant: Mutant) -> None:
    sender.send(first_failure_under(tree, mutant))


def main(arguments: Sequence[str]) -> int:
    path = Path(arguments[0]) if arguments and arguments[0].endswith(".json") else LIST
    names = {name for name in arguments if not name.endswith(".json")}
    mutants = [mutant for mutant in read_mutants(path) if not names or mutant.id in names]
    assert names <= {mutant.id for mutant in mutants}, (
        f"{path} has no {names - {mutant.id for mutant in mutants}}"
    )
    os.environ.setdefault("SPECDISTILL_TEST_DATA", str(ROOT.parent / "shared" / "data"))
    survivors = []
    with tempfile.TemporaryDirectory(prefix="specdistill-mutants-") as cache:
        # Before the libraries that read them.
        os.environ.update(HF_HOME=cache, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", MPLBACKEND="Agg")
        for library in LIBRARIES:
            importlib.import_module(library)
        for outcome in outcomes(ROOT, mutants, num_workers=os.cpu_count() or 1):
            print(outcome, flush=True)
            survivors += [] if outcome.caught_by else [outcome.mutant.id]
    print(
        f"{len(survivors)} of {len(mutants)} mutations survive"
        + "".join(f"\n  {name}" for name in survivors)
    )
    return int(bool(survivors))


if __name__ == "__main__":
    sys.path.pop(
        0
    )  # this folder, whose recipes.py a test would import in place of the folder recipes
    sys.exit(main(sys.argv[1:]))
