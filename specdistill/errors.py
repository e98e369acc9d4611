"""Errors that a command reports in one line, and its exit codes."""

import copyreg
import difflib
import errno
import logging
import os
import select
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

from pydantic_core import ValidationError

from specdistill.terminal import guard, output

logger = logging.getLogger("specdistill")  # of all that the package has to say
MOST_CHARACTERS, MOST_QUOTED = (
    900,
    300,
)  # of an error, and of one that it quotes: some quote whole files
STDOUT = 1
SECONDS_APART = 30.0  # a launcher ends the other processes before that, on a busy machine too


class ExitCode(IntEnum):
    DONE = 0
    CHECK_FAILED = 1
    USER_ERROR = 2
    RESOURCE_ERROR = 3
    INCONCLUSIVE = 4
    INTERRUPTED = 130  # by Ctrl-C, as a shell counts it


class ReportedError(Exception):
    """One that a command reports in one line. It is pickled whole: processes that prepare rows pass it to the one that waits for them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class UserError(ReportedError):
    """The user's input was wrong: one line that names the key, what was got, what was expected and the nearest valid name.

    >>> print(UserError("draft.num_layer", got="an unknown key", expected="a key of draft", nearest="draft.num_layers"))
    draft.num_layer: got an unknown key, expected a key of draft; did you mean draft.num_layers?

    text: the sentence, where these would make none.
    """

    def __init__(
        self,
        key: str,
        *,
        got: object,
        expected: str = "",
        nearest: str | None = None,
        text: str = "",
    ) -> None:
        hint = f"; did you mean {nearest}?" if nearest else ""
        stated = (
            f"{key} is required: {expected}"
            if got == "nothing"
            else f"{key}: got {got}, expected {expected}{hint}"
        )
        super().__init__(one_line(text or stated))
        self.key, self.got = key, str(got)


@contextmanager
def refusing(
    kinds: type[Exception] | tuple[type[Exception], ...], key: str, what: object, expected: str
) -> Iterator[None]:
    """Raises UserError for an error of these kinds, which it quotes after `what`."""
    try:
        yield
    except kinds as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, ValidationError):  # of several the first
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise UserError(
            key, got=f"{what}: {one_line(reason)[:MOST_QUOTED]}", expected=expected
        ) from error


class ResourceError(ReportedError):
    """Something outside failed (Hub, disk, memory); says what to do next."""

    def __init__(self, what: str, *, next_step: str) -> None:
        super().__init__(one_line(f"{what}; {next_step}"))


def reported(command: Callable[[], int], arguments: Sequence[str] = ()) -> int:
    """The exit code of a command with these arguments, whatever it raises: see `explain`. Quiet where nobody reads on (`| head`)."""
    guard(sys.stdout)
    guard(sys.stderr, shortens=True)
    with output(arguments):
        try:
            code = command()
            sys.stdout.flush()
            return code
        except (
            Exception,
            KeyboardInterrupt,
        ) as error:  # the one place: nothing that a command raises ends in a traceback
            if isinstance(error, BrokenPipeError) and _is_cut_off(STDOUT):
                os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # what is not written yet
                return ExitCode.DONE
            return explain(error, debug="debug=true" in arguments)


def _is_cut_off(descriptor: int) -> bool:
    """Whether this is a pipe that nobody reads any more."""
    pipe = select.poll()
    pipe.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in pipe.poll(0))


def explain(error: Exception | KeyboardInterrupt, *, debug: bool = False) -> ExitCode:
    """Print one line on stderr that says what went wrong (debug: after the traceback); returns the exit code.

    What nobody foresaw is a resource error, with its traceback in a file that the line names. Of an error that all processes of a launch
    find, the first process on each machine prints it: its launcher then ends the others.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(SECONDS_APART)
    if debug:
        logger.error("".join(traceback.format_exception(error)))
    if isinstance(error, KeyboardInterrupt):
        logger.error("interrupted")
        return ExitCode.INTERRUPTED
    if (
        isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
    ):  # whoever looks for a file may find that out
        error = UserError("a path", got=error.filename, expected="names that the file system takes")
    if isinstance(error, ReportedError):
        logger.error(f"error: {str(error)[:MOST_CHARACTERS]}")
        return ExitCode.USER_ERROR if isinstance(error, UserError) else ExitCode.RESOURCE_ERROR
    descriptor, log = tempfile.mkstemp(prefix="specdistill-", suffix=".log")
    with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        traceback.print_exception(error, file=file)
    what = one_line(f"{type(error).__name__}: {error}")[:MOST_CHARACTERS]
    logger.error(f"error: {what}, which specdistill did not foresee; the traceback is in {log}")
    return ExitCode.RESOURCE_ERROR


def one_line(text: str) -> str:
    """White space as single spaces."""
    return " ".join(text.split())


def sibling_key(key: str, name: str) -> str:
    """The key `name` in the section of another key, for messages of code that several commands call, each with its own sections.

    >>> sibling_key("eval.draft", "suite"), sibling_key("draft", "suite")
    ('eval.suite', 'suite')
    """
    return f"{key[: key.rfind('.') + 1]}{name}"


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name closest to a misspelt one, else one that begins with it or that it begins with; None when nothing is close."""
    names = list(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    begun = [
        other
        for other in names
        if min(len(name), len(other)) >= 3 and (other.startswith(name) or name.startswith(other))
    ]
    return next(iter(close + begun), None)
