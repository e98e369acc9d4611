"""Errors that a command reports in one line, and its exit codes."""

import copyreg
import difflib
import errno
import logging
import os
import re
import select
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

from pydantic_core import ValidationError

from specdistill.common.terminal import guard, redirect_messages

logger = logging.getLogger("specdistill")  # the logger of all messages of the package
# The most characters of an error, and of an error that it quotes. Some errors quote whole files.
MAX_ERROR_CHARACTERS = 900
MAX_QUOTED_CHARACTERS = 300
STDOUT = 1  # the file descriptor
# How long processes other than the first wait before they print an error. A launcher ends them
# before that, on a busy machine too.
SECONDS_APART = 30.0


class ExitCode(IntEnum):
    """The exit codes of commands."""

    DONE = 0
    CHECK_FAILED = 1
    USER_ERROR = 2
    RESOURCE_ERROR = 3
    INCONCLUSIVE = 4
    INTERRUPTED = 130  # by Ctrl-C; shells use the same code


class ReportedError(Exception):
    """An error that a command reports in one line.

    It can be pickled with its attributes, because the processes that prepare rows pass it to the
    one that waits for them.
    """

    key = ""

    def __reduce__(self) -> tuple[object, ...]:
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]

    def rename_key(self, key: str, typed: str) -> None:
        """Replace a key by the name that the user typed.

        It is replaced at the start of the message. A key with a section is replaced inside the
        message too.

        >>> text = "eval.draft: no draft in a. Type eval.draft=PATH."
        >>> error = UserError("eval.draft", got="a", text=text)
        >>> error.rename_key("eval.draft", "draft")
        >>> print(error)
        draft: no draft in a. Type draft=PATH.
        """
        # The name of a key without a section may also be a word of the sentence.
        start = r"(?<![\w./])" if "." in key else "^"
        pattern = rf"{start}{re.escape(key)}(?!\w)"
        self.key = re.sub(pattern, lambda _: typed, self.key)
        self.args = (re.sub(pattern, lambda _: typed, str(self)),)


class UserError(ReportedError):
    """An error for wrong input of the user.

    Its one line names the key, what was got, what was expected and the nearest valid name.

    >>> what = {"got": "an unknown key", "expected": "a key of draft"}
    >>> print(UserError("draft.num_layer", **what, nearest="draft.num_layers"))
    draft.num_layer: got an unknown key, expected a key of draft; did you mean draft.num_layers?

    For a value that is missing, `got` begins with `nothing`; for one that was left empty, with
    `null`. The circumstances may follow.

    >>> print(UserError("eval.suite", got="nothing with target.model=org/name", expected="prompts"))
    eval.suite is required with target.model=org/name: prompts
    >>> print(UserError("eval.temperature", got="null", expected="a number"))
    eval.temperature: no value given; expected a number

    Args:
        key: the key of the recipe or of the command.
        got: what was got.
        expected: what was expected.
        nearest: the nearest valid name; None if there is none.
        text: the whole sentence, if one cannot be made of the others.
        kind: for a row of data that cannot be used, what is wrong with it, in words that all rows
            with the same fault share. Such rows are counted by it.
    """

    def __init__(
        self,
        key: str,
        *,
        got: object,
        expected: str = "",
        nearest: str | None = None,
        text: str = "",
        kind: str = "",
    ) -> None:
        self.key = key
        self.got = str(got)
        self.kind = kind
        super().__init__(
            join_lines(
                text
                or self._compose_sentence(expected, f"; did you mean {nearest}?" if nearest else "")
            )
        )

    def _compose_sentence(self, expected: str, hint: str) -> str:
        """Return the sentence that names the key, what was got and what was expected."""
        first = re.split("[ ,]", self.got, maxsplit=1)[0]
        if first == "nothing":
            return f"{self.key} is required{self.got[len(first) :]}: {expected}"
        if first == "null":
            return f"{self.key}: no value given{self.got[len(first) :]}; expected {expected}{hint}"
        return f"{self.key}: got {self.got}, expected {expected}{hint}"


def make_unused_key_error(
    key: str, value: object, reason: str, *, alternative: str = ""
) -> UserError:
    """Return the error for a key that has no effect, with the reason and what to type instead.

    >>> reason = "only used with several machines"
    >>> print(make_unused_key_error("machine_rank", 1, reason, alternative="add num_machines=2"))
    machine_rank: only used with several machines. Remove machine_rank=1, or add num_machines=2.
    """
    typed = key if " " in str(value) else f"{key}={value}"
    remedy = f", or {alternative}" if alternative else ""
    return UserError(key, got=value, text=f"{key}: {reason}. Remove {typed}{remedy}.")


@contextmanager
def convert_errors(
    kinds: type[Exception] | tuple[type[Exception], ...],
    key: str,
    what: object,
    expected: str,
    *,
    kind: str = "",
) -> Iterator[None]:
    """Turn errors of some types into a UserError that quotes them.

    Args:
        kinds: the types of errors.
        key: the key that the UserError names.
        what: what could not be read or used. The quoted error follows it.
        expected: what was expected.
        kind: of the UserError.

    Raises:
        UserError: for an error of these types.
    """
    try:
        yield
    except kinds as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, ValidationError):  # It may hold several errors; quote the first.
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise UserError(
            key,
            got=f"{what}: {join_lines(reason)[:MAX_QUOTED_CHARACTERS]}",
            expected=expected,
            kind=kind,
        ) from error


class ResourceError(ReportedError):
    """An error outside the user's input (Hub, disk, memory), with what to do next."""

    def __init__(self, what: str, *, next_step: str) -> None:
        super().__init__(join_lines(f"{what}; {next_step}"))


def run_and_report(command: Callable[[], int], arguments: Sequence[str] = ()) -> int:
    """Run a command, report what it raises (see `explain`), and return its exit code.

    It ends without a message if its output goes to a pipe that nobody reads any more (`| head`).

    Args:
        command: the command, which returns an exit code.
        arguments: the arguments that it was called with.
    """
    guard(sys.stdout)
    guard(sys.stderr, shortens=True)
    with redirect_messages(arguments):
        try:
            code = command()
            sys.stdout.flush()
            return code
        except (Exception, KeyboardInterrupt) as error:
            # Only here are all exceptions caught, so that no command ends in a traceback.
            if isinstance(error, BrokenPipeError) and _is_cut_off(STDOUT):
                # Output that is still buffered goes nowhere.
                os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
                return ExitCode.DONE
            return explain(error, debug="debug=true" in arguments)


def _is_cut_off(descriptor: int) -> bool:
    """Return whether a file descriptor is a pipe that nobody reads any more."""
    pipe = select.poll()
    pipe.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in pipe.poll(0))


def explain(error: Exception | KeyboardInterrupt, *, debug: bool = False) -> ExitCode:
    """Print one line on stderr that says what went wrong, and return the exit code.

    An unforeseen error counts as a resource error. Its traceback is written to a file that the line
    names. If all processes of a launch find an error, the first process on each machine prints it.
    Its launcher then ends the others.

    Args:
        error: the error.
        debug: print the traceback first.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(SECONDS_APART)
    if debug:
        logger.error("".join(traceback.format_exception(error)))
    if isinstance(error, KeyboardInterrupt):
        logger.error("interrupted")
        return ExitCode.INTERRUPTED
    # Any test whether a file exists may raise this.
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        error = UserError(
            "a path", got=error.filename, expected="a name that the file system accepts"
        )
    if isinstance(error, ReportedError):
        logger.error(f"error: {str(error)[:MAX_ERROR_CHARACTERS]}")
        return ExitCode.USER_ERROR if isinstance(error, UserError) else ExitCode.RESOURCE_ERROR
    descriptor, log = tempfile.mkstemp(prefix="specdistill-", suffix=".log")
    with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        traceback.print_exception(error, file=file)
    logger.error(
        f"error: {join_lines(f'{type(error).__name__}: {error}')[:MAX_ERROR_CHARACTERS]}. This is a"
        f" bug in"
        f" specdistill; the traceback is in {log}"
    )
    return ExitCode.RESOURCE_ERROR


def join_lines(text: str) -> str:
    """Return a text on one line, with single spaces for any white space."""
    return " ".join(text.split())


def name_sibling_key(key: str, name: str) -> str:
    """Return the key `name` in the section of another key.

    Messages need it in code that several commands call, each with its own sections.

    >>> name_sibling_key("eval.draft", "suite"), name_sibling_key("draft", "suite")
    ('eval.suite', 'suite')
    """
    return f"{key[: key.rfind('.') + 1]}{name}"


def find_nearest(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name that is closest to a misspelt one.

    If none is close, it is a valid name that begins with the misspelt one, or with which the
    misspelt one begins.

    Returns:
        The valid name; None if there is none.
    """
    names = list(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    begun = [
        valid_name
        for valid_name in names
        if min(len(name), len(valid_name)) >= 3
        and (valid_name.startswith(name) or name.startswith(valid_name))
    ]
    return next(iter(close + begun), None)
