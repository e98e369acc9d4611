"""A model's answers: the final number, whether the text is valid Python so far, and the program it contains.

Generated programs run in a process of their own with limits on time, memory and file size. The limits contain mistakes, not malice: a
program can read files and use the network as its user can. Nothing is run unless `eval.run_code=true`.
"""

import codeop
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from decimal import Decimal

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
INDENT = 4
FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
SECONDS = 10.0
MEMORY_BYTES = 2**30
FILE_BYTES = 2**20
ENDED = 99  # exit code of a program that ran to its end; one that exits before its tests has another

# The child sets its own limits before it reads the program, which cannot raise them again.
LIMITED = f"""
import resource, sys
for limit, most in ((resource.RLIMIT_AS, {MEMORY_BYTES}), (resource.RLIMIT_FSIZE, {FILE_BYTES}), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(limit, (most, most))
exec(compile(sys.stdin.read(), "program", "exec"), {{"__name__": "program"}})
sys.exit({ENDED})
"""


def is_match(text: str, reference: str) -> bool:
    """Whether a text's answer is the reference's, as GSM8K scores: the first number after `####`, or else the last of the text.

    A reference without a number is compared as a whole, ignoring case and white space.
    """
    answer = _number(reference)
    if answer is None:
        return text.casefold().split() == reference.casefold().split()
    return _number(text) == answer


def _number(text: str) -> Decimal | None:
    marked, numbers = NUMBER.findall(text.partition("####")[2]), NUMBER.findall(text)
    answer = marked[0] if marked else numbers[-1] if numbers else None
    return Decimal(answer.replace(",", "")) if answer else None


def is_python_so_far(source: str) -> bool:
    """Whether a source has no syntax error. It may begin inside a block and end anywhere, also within a line. Nothing is run."""
    first = next((line for line in source.splitlines() if line.strip()), "")
    indent = len(first) - len(first.lstrip())
    blocks = "".join(f"{' ' * level}def _():\n" for level in range(0, indent, INDENT))  # around the first line
    source = blocks + source
    return _compiles(source) or _compiles(source.rpartition("\n")[0])


def _compiles(source: str) -> bool:
    """Whether a source is valid Python, or the beginning of valid Python."""
    try:
        codeop.compile_command(source, "<text>", "exec")
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):  # all that compiling can raise
        return False
    return True


def program(prompt: str | None, text: str) -> str:
    """The program in a text: the rest of the indented block that `prompt` began, or, without a prompt, the first fenced code."""
    if prompt is None:
        fenced = FENCED.search(text)
        return fenced[1] if fenced else text
    first, *lines = text.split("\n")
    end = next((number for number, line in enumerate(lines) if line[:1].strip()), len(lines))
    return "\n".join([prompt + first, *lines[:end]])


def passes(program: str, seconds: float = SECONDS) -> bool:
    """Whether a program runs to its last line, in time and without an error. Its child processes are ended with it."""
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", LIMITED],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath},
            start_new_session=True,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        try:
            child.communicate(program, timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):  # it has ended already
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return child.returncode == ENDED
