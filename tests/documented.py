"""The commands that the pages tell a reader to type, and the keys that each verb takes."""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from specdistill.cli.main import VERBS, main

SCRIPTS = {"train/eagle.py": "train", "train/draft.py": "train", "eval/run.py": "eval"}


def read_page(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def remove_examples(page: Path) -> str:
    """Return a page without its blocks of plain text, where mistakes are shown."""
    return re.sub(r"```text\n.*?```", "", read_page(page), flags=re.DOTALL)


@cache
def list_verb_keys(verb: str) -> frozenset[str]:
    """Return the keys that `specdistill VERB --help all` lists."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main([verb, "--help", "all"])
    return frozenset(re.findall(r"^  (\S+) ", printed.getvalue(), re.MULTILINE)) | {"recipe"}


def find_unknown_keys(verb: str, keys: list[str]) -> list[str]:
    return [key for key in keys if key not in list_verb_keys(verb) and not key.startswith("train.")]


def find_commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the verb and the keys of each command in a text.

    Commands stand in fenced blocks, indented blocks and inline code.
    """
    for line in re.sub(r"\\\n", " ", text).splitlines():
        spans = re.findall(r"`([^`]+)`", line) if "`" in line else [line]
        for span in spans:
            for verb, rest in re.findall(r"\bspecdistill (\w+) +(.*)", span):
                if verb in VERBS:
                    yield verb, list_typed_keys(rest)
            for script, rest in re.findall(r"\b((?:train|eval)/\w+\.py) +(.*)", span):
                if script in SCRIPTS:
                    yield SCRIPTS[script], list_typed_keys(rest)


def list_typed_keys(rest: str) -> list[str]:
    words = shlex.split(rest.replace("…", "").replace("'{…}'", ""), comments=True)
    return [word.partition("=")[0] for word in words if re.match(r"[a-z_.]+=", word)]


class ShellLine(NamedTuple):
    """A command in a shell block.

    is_marked: whether it says that it needs what a test lacks: a GPU, the Hub, an engine, servers
    or several machines.
    """

    command: str
    is_marked: bool


def find_shell_lines(page: Path) -> Iterator[ShellLine]:
    """Yield the commands of a page's shell blocks.

    A comment that begins with `needs` marks its line, or standing alone its block.
    """
    for block in re.findall(
        r"^```(?:bash|sh|shell|console)\n(.*?)^```", read_page(page), re.MULTILINE | re.DOTALL
    ):
        lines = [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]
        block_needs = any(re.match(r"# needs ", line) for line in lines)
        for line in lines:
            if not line.startswith("#"):
                yield ShellLine(line, block_needs or "  # needs " in line)
