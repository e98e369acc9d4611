"""The errors that a command reports in one line, and the exit codes of commands."""

import copyreg
import difflib
import errno
import logging
import os
import re
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType

from pydantic_core import ValidationError

from specdistill.common.terminal import guard, redirect_messages

logger = logging.getLogger("specdistill")  # the logger of all messages of the package
# The most characters of the line that reports an error, and of another error that it quotes. Errors
# of libraries may quote whole files.
MAX_ERROR_CHARACTERS = 900
MAX_QUOTED_CHARACTERS = 300
STDOUT = 1  # the file descriptor of stdout
RESUMES = "the same command resumes"  # the end of the line about an interruption
# If all processes of a launch fail in the same way, only the first should print the error. The
# others wait this many seconds. Meanwhile the first process ends, and the launcher then ends the
# others. The time is long enough for a busy machine.
SECONDS_APART = 30.0


class ExitCode(IntEnum):
    """The exit codes of commands.

    CHECK_FAILED means that a command ran, and its result is negative: for example a failed gate.
    """

    DONE = 0
    CHECK_FAILED = 1
    USER_ERROR = 2
    RESOURCE_ERROR = 3
    INCONCLUSIVE = 4
    INTERRUPTED = 130  # by Ctrl-C; shells use the same code


class ReportedError(Exception):
    """An error that a command reports in one line.

    The error can be pickled with its attributes, because processes that prepare rows send it to the
    process that started them.

    Attributes:
        key: the key of the recipe or of the command that the error is about; empty if there is
            none.
    """

    key = ""

    def __reduce__(self) -> tuple[object, ...]:
        """Return how to rebuild the error, for pickle, without calling `__init__`.

        By default pickle passes `args` to `__init__`. But `args` holds only the message, and the
        `__init__` of a subclass has other parameters.
        """
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]

    def rename_key(self, key: str, typed: str) -> None:
        """Replace a key in the message by the name that the user typed.

        A key without a section is only replaced at the start of the message, because its name may
        also be an ordinary word. A key with a section is replaced everywhere.

        >>> text = "eval.draft: no draft in a. Type eval.draft=PATH."
        >>> error = UserError("eval.draft", got="a", text=text)
        >>> error.rename_key("eval.draft", "draft")
        >>> print(error)
        draft: no draft in a. Type draft=PATH.
        """
        # A key next to a letter, or after a dot or a slash, is part of a longer key or of a path,
        # and is not replaced. `lambda` keeps re.sub from interpreting backslashes in `typed`.
        start = r"(?<![\w./])" if "." in key else "^"
        pattern = rf"{start}{re.escape(key)}(?!\w)"
        self.key = re.sub(pattern, lambda _: typed, self.key)
        self.args = (re.sub(pattern, lambda _: typed, str(self)),)


class UserError(ReportedError):
    """An error in the input of the user.

    The message is one line with the key, the value that was got, and the value that was expected.
    If the value is a misspelt name, the message ends with the nearest valid name.

    >>> what = {"got": "an unknown key", "expected": "a key of draft"}
    >>> print(UserError("draft.num_layer", **what, nearest="draft.num_layers"))
    draft.num_layer: got an unknown key, expected a key of draft; did you mean draft.num_layers?

    If the key was not set, `got` begins with `nothing`. If it was set without a value, `got` begins
    with `null`. The circumstances may follow.

    >>> print(UserError("eval.suite", got="nothing with target.model=org/name", expected="prompts"))
    eval.suite is required with target.model=org/name: prompts
    >>> print(UserError("eval.temperature", got="null", expected="a number"))
    eval.temperature: no value given; expected a number

    Args:
        key: the key of the recipe or of the command.
        got: the value that was got, or a description of it.
        expected: a description of the values that are allowed.
        nearest: the nearest valid name; None if there is none.
        text: the whole message, if it is not composed of the other arguments.
        kind: for a row of data that cannot be used, a description of the fault that is the same for
            all rows with this fault. Such rows are counted by this description.
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
        hint = f"; did you mean {nearest}?" if nearest else ""
        super().__init__(join_lines(text or self._compose_sentence(expected, hint)))

    def _compose_sentence(self, expected: str, hint: str) -> str:
        """Return the message that names the key, what was got and what was expected.

        Args:
            expected: a description of the values that are allowed.
            hint: a question that suggests a valid name, such as "; did you mean draft?", or "".
        """
        # The first word of `self.got` may be one of two special words: `nothing` for a key that was
        # not set, and `null` for a key without a value. The circumstances may follow, as in
        # "nothing with target.model=org/name".
        first_word = re.split("[ ,]", self.got, maxsplit=1)[0]
        circumstances = self.got[len(first_word) :]
        if first_word == "nothing":
            return f"{self.key} is required{circumstances}: {expected}"
        if first_word == "null":
            return f"{self.key}: no value given{circumstances}; expected {expected}{hint}"
        return f"{self.key}: got {self.got}, expected {expected}{hint}"


def make_unused_key_error(
    key: str, value: object, reason: str, *, alternative: str = ""
) -> UserError:
    """Return the error for a key that has no effect, with the reason and what to type instead.

    Args:
        key: the key of the recipe or of the command.
        value: the value that the user typed for the key, or a description of it.
        reason: why the key has no effect.
        alternative: another way to mend the command than to remove the key; empty for none.

    >>> reason = "only used with several machines"
    >>> print(make_unused_key_error("machine_rank", 1, reason, alternative="add num_machines=2"))
    machine_rank: only used with several machines. Remove machine_rank=1, or add num_machines=2.
    """
    # A value with a space is a description, not what the user typed.
    typed = key if " " in str(value) else f"{key}={value}"
    remedy = f", or {alternative}" if alternative else ""
    return UserError(key, got=value, text=f"{key}: {reason}. Remove {typed}{remedy}.")


@contextmanager
def announce_resumption() -> Iterator[None]:
    """Say that the same command resumes, if Ctrl-C or SIGTERM ends a `with` block.

    Without this, SIGTERM would end the process without a word. The exit code stays the same, 143.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # Shells use this exit code for a signal.

    # Only the main thread may handle signals.
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGTERM, end) if is_main else None
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(RESUMES) from None
    except SystemExit:
        # Only the first process of a launch says so, for all of them.
        if os.environ.get("RANK", "0") == "0":
            logger.error(f"terminated; {RESUMES}")
        raise
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def convert_errors(
    error_types: type[Exception] | tuple[type[Exception], ...],
    key: str,
    what: object,
    expected: str,
    *,
    kind: str = "",
) -> Iterator[None]:
    """Turn errors of some types in a `with` block into a UserError that quotes their message.

    Args:
        error_types: the types of errors.
        key: the key that the UserError names.
        what: the thing that could not be read or used, such as a path. The quoted message follows.
        expected: a description of what was expected.
        kind: for a row of data that cannot be used, a short description of the fault, by which
            such rows are counted; empty for other errors.

    Raises:
        UserError: if the `with` block raises an error of these types.
    """
    try:
        yield
    except error_types as error:
        # Errors of the operating system have a short message, `strerror`, without the path.
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
    """An error that the user's input did not cause (Hub, disk, memory), with what to do next.

    Args:
        what: what went wrong.
        next_step: what the user can do about it.
    """

    def __init__(self, what: str, *, next_step: str) -> None:
        super().__init__(join_lines(f"{what}; {next_step}"))


def run_and_report(command: Callable[[], int], arguments: Sequence[str] = ()) -> int:
    """Run a command, print its errors in one line (see `explain`), and return its exit code.

    If the output goes to a pipe that nobody reads any more, as with `| head`, the command ends
    without a message.

    Args:
        command: the command, which returns an exit code.
        arguments: the arguments that it was called with.
    """
    # Replace control characters in all output from now on: a text of unknown origin in a message
    # must not move the cursor or change colors. Messages on stderr are shortened too, because they
    # may quote long texts; results on stdout are printed whole.
    guard(sys.stdout)
    guard(sys.stderr, shortens=True)
    with redirect_messages(arguments):
        try:
            code = command()
            sys.stdout.flush()
            return code
        except (Exception, KeyboardInterrupt) as error:
            # This is the only place that catches all exceptions, so that no command ends in a
            # traceback.
            if isinstance(error, BrokenPipeError) and _is_cut_off(STDOUT):
                # Python flushes stdout once more when it exits, which would raise the error again.
                # So let stdout go to /dev/null, with what is still buffered.
                os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
                return ExitCode.DONE
            return explain(error, debug="debug=true" in arguments)


def _is_cut_off(descriptor: int) -> bool:
    """Return whether a file descriptor is a pipe that nobody reads any more."""
    # poll reports an error for a pipe whose reader has closed it, even if the caller asks for no
    # events (0). It returns at once (a timeout of 0 ms).
    pipe = select.poll()
    pipe.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in pipe.poll(0))


def explain(error: Exception | KeyboardInterrupt, *, debug: bool = False) -> ExitCode:
    """Print one line on stderr that says what went wrong, and return the exit code.

    An error of any other type than ReportedError is a bug. Its traceback is written to a file,
    which the line names.

    If all processes of a launch fail for the same reason, only the first process on each machine
    prints the line.

    Args:
        error: the error.
        debug: print the traceback before the line.
    """
    # Processes other than the first on a machine wait here. Meanwhile the first one ends, and the
    # launcher then ends the others.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(SECONDS_APART)
    if debug:
        logger.error("".join(traceback.format_exception(error)))
    if isinstance(error, KeyboardInterrupt):
        # `announce_resumption` adds what the user can do.
        logger.error("; ".join(["interrupted", *error.args]))
        return ExitCode.INTERRUPTED

    # A path may be too long for the file system. Any code that looks at a path can raise this
    # error, even a test whether a file exists, so it is handled here for all commands.
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        error = UserError(
            "a path", got=error.filename, expected="a shorter name, which the file system accepts"
        )
    if isinstance(error, ReportedError):
        logger.error(f"error: {str(error)[:MAX_ERROR_CHARACTERS]}")
        return ExitCode.USER_ERROR if isinstance(error, UserError) else ExitCode.RESOURCE_ERROR

    # Write the traceback of a bug to a file.
    descriptor, log = tempfile.mkstemp(prefix="specdistill-", suffix=".log")
    with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        traceback.print_exception(error, file=file)
    description = join_lines(f"{type(error).__name__}: {error}")[:MAX_ERROR_CHARACTERS]
    logger.error(f"error: {description}. This is a bug in specdistill; the traceback is in {log}")
    return ExitCode.RESOURCE_ERROR


def join_lines(text: str) -> str:
    """Return a text on one line: any white space, such as a line break, becomes one space."""
    return " ".join(text.split())


def name_sibling_key(key: str, name: str) -> str:
    """Return the key `name` in the section of another key.

    The same setting is `eval.suite` in a recipe and `suite` in some commands. Code that several
    commands call gets one key, such as `eval.draft` or `draft`. This function tells such code what
    another key of the same command is called, for its messages.

    >>> name_sibling_key("eval.draft", "suite"), name_sibling_key("draft", "suite")
    ('eval.suite', 'suite')
    """
    # Keep the key up to its last dot. Without a dot rfind returns -1, so nothing of it is kept.
    return f"{key[: key.rfind('.') + 1]}{name}"


def find_nearest(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name that is closest to a misspelt name.

    If no valid name is spelt almost like the misspelt name, a valid name is returned that begins
    with the misspelt name, or with which the misspelt name begins (`target` for `target_model`).

    Args:
        name: the misspelt name.
        valid: the valid names.

    Returns:
        The valid name; None if no name is similar.
    """
    names = list(valid)

    # A similarity of 0.7 allows a typing error or two in a key, and does not suggest other keys.
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)

    # Compare beginnings only of names with at least three letters: too many names begin with the
    # same one or two letters.
    same_start = [
        valid_name
        for valid_name in names
        if min(len(name), len(valid_name)) >= 3
        and (valid_name.startswith(name) or name.startswith(valid_name))
    ]
    candidates = close + same_start
    return candidates[0] if candidates else None
