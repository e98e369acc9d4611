"""The command, and the scripts of train/, eval/ and bench/, called in this process."""

import importlib.util
import subprocess
import sys
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from specdistill.cli.command import run
from specdistill.cli.main import main
from specdistill.common.project import ROOT
from specdistill.methods.recipe import Recipe

# the files that eval/run.py leaves
REPORT_FILES = ["junit.xml", "report.html", "report.json", "report.md", "samples.jsonl"]


def specdistill(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `specdistill` with these arguments, and return its exit code and what it prints.

    This saves the seconds of imports of a process. A training leaves an empty image in place of its
    curves: they take longer to draw, after each evaluation, than tiny drafts take to train.
    tests/training/test_history.py draws them.
    """
    given, out, err = sys.argv, StringIO(), StringIO()
    sys.argv = ["specdistill", *arguments]  # a run records it
    is_training = arguments[:1] == ("train",)
    drawing = (
        mock.patch("specdistill.training.history.draw", touch) if is_training else nullcontext()
    )
    try:
        with redirect_stdout(out), redirect_stderr(err), drawing:
            code = main(arguments)
    except SystemExit as end:  # raised by a script
        code = int(end.code or 0)
    finally:
        sys.argv = given
    return subprocess.CompletedProcess(
        ["specdistill", *arguments], code, out.getvalue(), err.getvalue()
    )


def touch(log: list[dict[str, float]], path: Path) -> None:
    """Leave an empty file, in place of `draw`."""
    path.touch()


def load_script(path: str) -> Any:
    """Return the module of a script: load_script("eval/run.py")."""
    spec = importlib.util.spec_from_file_location(
        path.removesuffix(".py").replace("/", "_"), ROOT / path
    )
    assert spec and spec.loader
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def evaluate(*arguments: str) -> int:
    """Run eval/run.py with these arguments, and return its exit code."""
    script = load_script("eval/run.py")
    return run(
        script.main,
        Recipe,
        list(arguments),
        shorthands=script.SHORTHANDS,
        without_recipe=["train.output_dir=runs/eval"],
    )
