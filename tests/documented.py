"""What the pages tell a reader to type: the commands in them, and the keys that each verb takes."""

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


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def without_examples(page: Path) -> str:
    """A page without its blocks of plain text, where mistakes are shown."""
    return re.sub(r"```text\n.*?```", "", read(page), flags=re.DOTALL)


@cache
def keys_of(verb: str) -> frozenset[str]:
    """The keys that `specdistill VERB --help all` lists."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main([verb, "--help", "all"])
    return frozenset(re.findall(r"^  (\S+) ", printed.getvalue(), re.MULTILINE)) | {"recipe"}


def unknown_keys(verb: str, keys: list[str]) -> list[str]:
    return [key for key in keys if key not in keys_of(verb) and not key.startswith("train.")]


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """(verb, keys) of each command in a text: in fenced blocks, indented blocks and inline code."""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        spans = re.findall(r"`([^`]+)`", line) if "`" in line else [line]
        for span in spans:
            for verb, rest in re.findall(r"\bspecdistill (\w+) +(.*)", span):
                if verb in VERBS:
                    yield verb, keys_in(rest)
            for script, rest in re.findall(r"\b((?:train|eval)/\w+\.py) +(.*)", span):
                if script in SCRIPTS:
                    yield SCRIPTS[script], keys_in(rest)


def keys_in(rest: str) -> list[str]:
    words = shlex.split(rest.replace("…", "").replace("'{…}'", ""), comments=True)
    return [word.partition("=")[0] for word in words if re.match(r"[a-z_.]+=", word)]


class Line(NamedTuple):
    """A command in a shell block. is_marked: says that it needs what a test lacks: a GPU, the Hub,
    an engine, servers, several machines."""

    command: str
    is_marked: bool


def shell_lines(page: Path) -> Iterator[Line]:
    """The commands of a page's shell blocks. A comment that begins with `needs` marks its line, or
    standing alone its block."""
    for block in re.findall(
        r"^```(?:bash|sh|shell|console)\n(.*?)^```", read(page), re.MULTILINE | re.DOTALL
    ):
        lines = [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]
        block_needs = any(re.match(r"# needs ", line) for line in lines)
        for line in lines:
            if not line.startswith("#"):
                yield Line(line, block_needs or "  # needs " in line)
