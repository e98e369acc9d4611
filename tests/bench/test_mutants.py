"""bench/mutants.py tells mutations that a test notices from others, and its list is current."""

import subprocess
from pathlib import Path

import pytest

from bench.mutants import LIST, Mutant, read_mutants, run_mutants
from specdistill.common.project import ROOT

LIBRARY = "def larger(a, b):\n    return a if a > b else b\n"
TESTS = """\
import pytest
from library import larger

def test_the_first(): assert larger(2, 1) == 2

@pytest.mark.long
def test_the_second(): assert larger(1, 2) == 2
"""


def test_a_mutation_is_caught_by_a_quick_test_or_survives(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "test_library.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long\n")

    def build_mutant(name: str, old: str, new: str) -> Mutant:
        return Mutant(name, "library.py", old, new, ["test_library.py"])

    mutants = [
        build_mutant("smaller", "a > b", "a < b"),
        build_mutant("always the first", "else b", "else a"),
        build_mutant("broken", "return", "return return"),
        build_mutant("ends the process", "return a", '__import__("os")._exit(3)'),
        build_mutant("of another day", "maximum", "minimum"),
    ]
    outcomes = {
        outcome.mutant.id: outcome for outcome in run_mutants(tmp_path, mutants, num_workers=2)
    }
    assert {name: (outcome.caught_by, outcome.exit_code) for name, outcome in outcomes.items()} == {
        "smaller": ("test_library.py::test_the_first", 0),
        "always the first": (None, 0),
        "broken": ("test_library.py", 0),
        "ends the process": (None, 3),
        "of another day": (None, 1),
    }
    assert str(outcomes["ends the process"]).startswith(
        "ends the process: NOT TRIED, its process ended with exit code 3"
    )
    assert "library.py holds its old text 0 times" in capfd.readouterr().err
    assert (tmp_path / "library.py").read_text() == LIBRARY


def test_every_mutation_of_the_list_can_be_applied() -> None:
    mutants = read_mutants(LIST)
    assert len({mutant.id for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1, mutant.id
        assert mutant.old != mutant.new and all((ROOT / test).exists() for test in mutant.tests), (
            mutant.id
        )
