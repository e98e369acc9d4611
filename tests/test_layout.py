"""Tests mirror the package, share only helper modules, and no folder holds too many modules."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from specdistill.common.project import ROOT

PACKAGE, TESTS = ROOT / "specdistill", ROOT / "tests"
MAX_MODULES = 15
VERBS = "specdistill/cli"  # it has a file for each verb, however many there are
# The tests of these modules stand elsewhere. The parts of a method are found by name, through
# the table of methods.
TESTED_ELSEWHERE = {
    "common/repositories": "hub/test_acquire.py",
    "methods/*/config": "recipe/test_recipe.py",
    "methods/lookups/*": "methods/suffix/test_proposer.py",
    "methods/*/serving": "serving/engines/test_loader.py",
    "methods/*/method": "cli/test_main.py",
    "methods/*/advice": "advice/doctor/test_diagnosis.py",
    "workflows/compare": "eval/test_compare_script.py",
    "workflows/evaluate": "eval/test_run_script.py",
    "workflows/features": "cli/test_features.py",
    "workflows/make_data": "data/produce/test_generate.py",
    "workflows/train": "train/test_eagle.py",
    "workflows/check_training": "train/test_refused_before_weights.py",
}


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def walk_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and the statements in it.

    Imports stand in no expression, and expressions are most of a file.
    """
    yield node
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for part in getattr(node, name, ()):
            yield from walk_statements(part)


@cache
def list_imports(path: Path) -> set[str]:
    """Return the modules that a file imports, and the names in them.

    `from a import b` is `a` and `a.b`.
    """
    found: set[str] = set()
    for node in walk_statements(parse(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def holds_code(path: Path) -> bool:
    """Return whether a file holds more than a docstring and imports."""
    return any(
        not isinstance(node, ast.Import | ast.ImportFrom | ast.Expr) for node in parse(path).body
    )


def to_dotted_name(module: str) -> str:
    return ".".join(("specdistill", *Path(module).parts)).removesuffix(".__init__")


@cache
def find_helpers() -> dict[str, Path]:
    """Return the modules of tests, by name."""
    return {
        ".".join(("tests", *path.relative_to(TESTS).with_suffix("").parts)): path
        for path in sorted(TESTS.rglob("*.py"))
    }


@cache
def find_reached_modules(folder: Path) -> set[str]:
    """Return the modules of a folder that its tests import.

    Modules of the folder that these import count, too, and so on.
    """
    siblings = {
        to_dotted_name(str(folder / path.stem)): path for path in (PACKAGE / folder).glob("*.py")
    }
    tests = sorted((TESTS / folder).glob("test_*.py"))
    imported = {name for test in tests for name in list_imports(test)}
    for name, path in find_helpers().items():
        if name in imported:
            imported |= list_imports(path)
    found: set[str] = set()
    fresh = imported | {
        to_dotted_name(str(folder / test.stem.removeprefix("test_"))) for test in tests
    }
    while fresh := (fresh & siblings.keys()) - found:
        found |= fresh
        fresh = {name for module in fresh for name in list_imports(siblings[module])}
    return found


@pytest.mark.long  # parses every module and every test
def test_every_module_is_reached_by_the_tests_of_its_folder() -> None:
    """specdistill/a/b.py is reached by tests/a/test_b.py, or by another file of tests/a.

    That file imports it, or a module of specdistill/a that does.
    """
    modules = [
        str(path.relative_to(PACKAGE).with_suffix(""))
        for path in PACKAGE.rglob("*.py")
        if holds_code(path)
    ]
    unreached = {
        module
        for module in modules
        if to_dotted_name(module) not in find_reached_modules(Path(module).parent)
    }
    elsewhere = {
        pattern: {module for module in unreached if fnmatch(module, pattern)}
        for pattern in TESTED_ELSEWHERE
    }
    assert unreached == set().union(*elsewhere.values())
    assert all(elsewhere.values()) and all(
        (TESTS / place).is_file() for place in TESTED_ELSEWHERE.values()
    )


def test_no_test_module_is_imported() -> None:
    """A helper module holds what several test modules need."""
    imported_tests = {
        f"{path.relative_to(TESTS)}: {name}"
        for path in TESTS.rglob("*.py")
        for name in list_imports(path)
        if name.startswith("tests.") and any(part.startswith("test_") for part in name.split("."))
    }
    assert imported_tests == set()


@pytest.mark.parametrize(
    ("top", "pattern"), [(PACKAGE, "*.py"), (TESTS, "test_*.py")], ids=["specdistill", "tests"]
)
def test_no_folder_holds_too_many_modules(top: Path, pattern: str) -> None:
    counts = {
        str(folder.relative_to(ROOT)): len(
            [path for path in folder.glob(pattern) if path.name != "__init__.py"]
        )
        for folder in (top, *(path for path in top.rglob("*") if path.is_dir()))
    }
    counts.pop(VERBS, None)
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}
