"""Find the mutations of the library that the quick tests do not notice.

Each mutation is applied to a copy of the tree, and the test modules listed with it are run.

    python bench/mutants.py [ID …]      # of tests/mutants.json; without IDs all of them

It prints the test that caught each mutation, then the survivors. The exit code is 1 if there are
any. An entry of the list has: id, file, old (text that the file holds once), new (what replaces
it), tests (the modules that a developer would run). Each entry runs in a child of this process,
which has the libraries loaded: importing them takes longer than most of these tests. A mutation
whose child dies, or cannot run the tests, is printed with its exit code, and counts as a survivor.
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

# The libraries that are imported once, before the first fork.
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

# Seconds after which a test counts as hanging. Many tests run side by side here, so each may take
# much longer than alone.
TEST_TIMEOUT_S = 120


class Mutant(NamedTuple):
    """A mutation, and the tests that should notice it.

    Attributes:
        id: its name.
        file: the file to change.
        old: text that the file holds once.
        new: the text that replaces it.
        tests: the test modules to run.
    """

    id: str
    file: str
    old: str
    new: str
    tests: list[str]


class Outcome(NamedTuple):
    """The outcome of the tests under a mutation.

    Attributes:
        mutant: the mutation.
        caught_by: the first test that failed, or a module that pytest could not collect; None if
            all passed, or if the child process ended early.
        seconds: how long the tests took.
        exit_code: of the child process; 0 if it ended as it should.
    """

    mutant: Mutant
    caught_by: str | None
    seconds: float
    exit_code: int = 0

    def __str__(self) -> str:
        if self.caught_by:
            text = f"caught by {self.caught_by}"
        elif self.exit_code:
            text = f"NOT TRIED, its process ended with exit code {self.exit_code}"
        else:
            text = "SURVIVES"
        return f"{self.mutant.id}: {text} ({self.seconds:.0f} s)"


class FirstFailure:
    """A pytest plugin that keeps the name of the first failed test in `name`; None if all passed.

    A module that pytest cannot collect counts as a failed test.
    """

    name: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Keep the name of the first test that failed, or of a module that cannot be collected.

        pytest calls this method for each report.
        """
        if report.failed:
            self.name = self.name or report.nodeid

    pytest_collectreport = pytest_runtest_logreport


def read_mutants(path: Path) -> list[Mutant]:
    """Read the list of mutations from a JSON file."""
    return [Mutant(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


@contextmanager
def copy_tree(tree: Path) -> Iterator[Path]:
    """Yield a temporary folder with a copy of a checkout, which tests may change.

    It has the files that git tracks, and new ones that git does not ignore.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory(prefix="specdistill-mutants-") as folder:
        for name in listed.stdout.split("\0"):
            if name and (tree / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(tree / name, Path(folder) / name)
        yield Path(folder)


def find_first_failure(folder: Path, tests: Sequence[str]) -> str | None:
    """Run the quick tests of some modules in this process, and return the first that fails.

    The process must end afterwards, because its imports and settings are those of the mutated copy.

    Args:
        folder: the copy of the tree.
        tests: the test modules.

    Returns:
        The first test that failed; None if all passed.

    Raises:
        AssertionError: if no test could be run.
    """
    import datasets

    # Make the tests import the mutated copy.
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    # `datasets` looks up cached rows by their input, not by the code that made them. So give this
    # process a cache of its own: from a shared one, a test would get rows of another mutation.
    datasets.config.HF_DATASETS_CACHE = Path(tempfile.mkdtemp(dir=os.environ["HF_HOME"]))
    sys.path.insert(0, str(folder))
    failure = FirstFailure()
    log = StringIO()
    # Ignore pytest's warning about a plugin that is imported already, as part of one of the
    # libraries. Each test has a time limit, because a mutation may loop for ever.
    options = ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider"]
    options += ["-n0", "-x", "-m", "not long", f"--timeout={TEST_TIMEOUT_S}"]

    # pytest must either pass, or name a failed test. Any other outcome, such as no tests found, is
    # an error in the list of mutations.
    with redirect_stdout(log):
        code = pytest.main([*options, *tests], plugins=[failure])
    assert (code == pytest.ExitCode.OK) == (failure.name is None), log.getvalue()[-3000:]
    return failure.name


def run_tests_on_mutant(tree: Path, mutant: Mutant) -> str | None:
    """Apply a mutation to a copy of the tree, and return the first test that fails."""
    with copy_tree(tree) as folder:
        # Replace the text, which must occur exactly once.
        path = folder / mutant.file
        text = path.read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, (
            f"{mutant.id}: {mutant.file} holds its old text {text.count(mutant.old)} times"
        )
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        return find_first_failure(folder, mutant.tests)


def run_mutants(tree: Path, mutants: Sequence[Mutant], num_workers: int) -> Iterator[Outcome]:
    """Test each mutation in a child process, and yield the outcomes in the order of their end.

    Args:
        tree: the checkout.
        mutants: the mutations.
        num_workers: the most child processes at a time.
    """
    # Children are forked, so that they need not import the libraries again. Each child sends the
    # name of the first failed test over a pipe. The parent closes its copy of the sending end. So
    # when a child dies, the pipe has no sender left, and `recv` raises EOFError.
    waiting = list(mutants)
    running = dict[Connection, tuple[BaseProcess, Mutant, float]]()
    context = multiprocessing.get_context("fork")
    while waiting or running:
        # Start children up to the number of workers.
        while waiting and len(running) < num_workers:
            mutant = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(sender, tree, mutant))
            running[receiver] = process, mutant, time.perf_counter()
            process.start()
            sender.close()

        # Wait until a child has sent its result or died, and collect the result.
        for receiver in cast(list[Connection], wait([*running])):
            process, mutant, start = running.pop(receiver)
            try:
                caught_by = receiver.recv()
            except EOFError:  # the child died before it could send anything
                caught_by = None
            process.join()
            yield Outcome(mutant, caught_by, time.perf_counter() - start, process.exitcode or 0)


def _send(sender: Connection, tree: Path, mutant: Mutant) -> None:
    """Run the tests of a mutation, and send the name of the first failed test to the parent.

    This function runs in the child process. It sends None if all tests pass.
    """
    sender.send(run_tests_on_mutant(tree, mutant))


def main(arguments: Sequence[str]) -> int:
    """Test the mutations, and print each outcome and the mutations that no test noticed.

    Args:
        arguments: the IDs of the mutations to test; empty for all.

    Returns:
        The exit code: 1 if there is a mutation that no test noticed, else 0.
    """
    # Select the mutations.
    names = set(arguments)
    mutants = [mutant for mutant in read_mutants(LIST) if not names or mutant.id in names]
    unknown = names - {mutant.id for mutant in mutants}
    assert not unknown, f"{LIST} has no mutations {sorted(unknown)}"
    os.environ.setdefault("SPECDISTILL_TEST_DATA", str(ROOT.parent / "shared" / "data"))

    # Import the libraries with a cache of their own, then run the mutations side by side.
    survivors = []
    with tempfile.TemporaryDirectory(prefix="specdistill-mutants-") as cache:
        # Set before the import of the libraries, which read these variables.
        os.environ.update(HF_HOME=cache, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", MPLBACKEND="Agg")
        for library in LIBRARIES:
            importlib.import_module(library)
        for outcome in run_mutants(ROOT, mutants, num_workers=os.cpu_count() or 1):
            print(outcome, flush=True)
            if not outcome.caught_by:
                survivors.append(outcome.mutant.id)

    print(f"{len(survivors)} of {len(mutants)} mutations were not noticed by any test")
    for name in survivors:
        print(f"  {name}")
    return int(bool(survivors))


if __name__ == "__main__":
    # Remove this folder: a test would import its recipes.py in place of the folder `recipes`.
    sys.path.pop(0)
    sys.exit(main(sys.argv[1:]))
