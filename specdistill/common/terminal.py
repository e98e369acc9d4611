"""Print the output of commands: results on stdout, progress and messages on stderr.

Names, prompts, model cards and answers of servers come from outside, and may contain control
characters. They are replaced, so that no output can control the terminal.
"""

import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any, TextIO

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

# The characters that are replaced: control characters except tab and newline, characters that
# reverse the direction of the text after them, and characters that UTF-8 or XML cannot hold.
UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
# The output with which libraries redraw a progress bar: cursor up, or carriage return and a new
# line of text. It may control the terminal, so its text must have no other such characters.
PROGRESS_BAR_OUTPUT = re.compile(rf"(\x1b\[A)+|\r(?!.*{UNPRINTABLE.pattern}).*")
MAX_LINE_CHARACTERS = 1000  # the most characters in a line of a message, which may quote a file
JSON = "--json"
QUIET_FLAG = "--quiet"
# Log lines of libraries that are of no use to a user: the logger -> a pattern of its lines.
NOISE = {
    "DeepSpeed": "Setting accelerator to CPU",
    # Each failed request is logged, and the error at the end says the same.
    "huggingface_hub.utils._http": "' thrown while requesting |Retrying in ",
}
for library in NOISE:
    logging.getLogger(library).addFilter(
        lambda record: not re.search(NOISE[record.name], record.getMessage())
    )
# The stream on which --json prints results, while a command with --json runs; empty otherwise. It
# is a list so that `redirect_messages` can change it.
json_streams: list[TextIO] = []


def make_printable(text: str) -> str:
    """Return a text with a visible character (�) in place of each control character."""
    return UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def shorten_lines(text: str) -> str:
    """Return a text whose lines have at most MAX_LINE_CHARACTERS characters.

    In a longer line, " … " replaces the middle.
    """
    # Keep the first half of the characters, and the last ones of the line (a negative index counts
    # from its end). These are three fewer than half, because " … " takes three characters.
    half = MAX_LINE_CHARACTERS // 2
    return "\n".join(
        line if len(line) <= MAX_LINE_CHARACTERS else f"{line[:half]} … {line[3 - half :]}"
        for line in text.split("\n")
    )


def guard(stream: Any, *, shortens: bool = False) -> None:
    """Replace the control characters in everything that is written to a stream from now on.

    The output that draws progress bars on a terminal is written unchanged, because it needs control
    characters. Characters that the encoding of the stream lacks are escaped.

    The stream object stays the same, and only its method `write` is replaced. A new stream object
    would not reach code that holds the old one already, such as the handlers of logging.

    Args:
        stream: the stream, which is changed in place.
        shortens: whether to shorten long lines too, including lines that libraries log.
    """
    # Keep the original methods in `stream.unguarded`, for `Console`. A stream that has this
    # attribute is guarded already.
    if not hasattr(stream, "unguarded"):
        write = stream.write
        stream.unguarded = SimpleNamespace(
            write=stream.write,
            flush=stream.flush,
            isatty=stream.isatty,
            fileno=stream.fileno,
            encoding=stream.encoding,
        )

        def write_guarded(text: str) -> object:
            """Write a text without control characters, unless it draws a progress bar.

            This function replaces `stream.write`. The original method is `write`.
            """
            if stream.isatty() and PROGRESS_BAR_OUTPUT.fullmatch(text):
                return write(text)
            text = make_printable(text)
            return write(shorten_lines(text) if shortens else text)

        stream.write = write_guarded
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def redirect_messages(arguments: Sequence[str]) -> Iterator[None]:
    """Set up the output of a command in a `with` block, as its flags --json and --quiet ask.

    Messages of the logger `specdistill` go to stderr. With --json, only `print_result` prints to
    stdout. With --quiet, only errors are printed to stderr.

    Args:
        arguments: the arguments of the command.
    """
    # If a handler exists, an outer command has set up the output, and now runs this command inside
    # its own process. The output then stays as the outer command needs it.
    logger = logging.getLogger("specdistill")
    if logger.handlers:
        yield
        return

    # The handler holds the real stderr, so that its errors are printed with --quiet too.
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.ERROR if QUIET_FLAG in arguments else logging.INFO)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with ExitStack() as stack:
            # With --json, discard all of stdout, except what `print_result` writes to the real
            # stdout in `json_streams`. With --quiet, discard all of stderr, except the errors of
            # the handler.
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            if JSON in arguments:
                json_streams.append(sys.stdout)
                stack.enter_context(redirect_stdout(nowhere))
            if QUIET_FLAG in arguments:
                stack.enter_context(redirect_stderr(nowhere))
            yield
    finally:
        json_streams.clear()
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def print_result(document: object) -> None:
    """Print the result of a command as one line of JSON, if the command was given --json.

    Without --json this does nothing, because the command prints its result in words. Only the first
    process of a launch prints.

    Args:
        document: the result. Data classes become objects of their fields, and values that JSON does
            not have, such as paths, become text.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    # `json_streams` holds the real stdout with --json, and is empty without.
    for stream in json_streams:
        print(json.dumps(document, default=_convert_to_json), file=stream, flush=True)


def _convert_to_json(value: object) -> object:
    """Convert a value that JSON does not have: a data class to a dictionary, others to text."""
    return vars(value) if is_dataclass(value) else str(value)


class Console(rich.console.Console):
    """A console of rich that may write colours and bars, although `guard` protects the stream.

    It writes to the unguarded stream, so that rich's own control sequences reach the terminal. The
    texts that it prints are made printable, and are not read as markup.
    """

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False) -> None:
        super().__init__(stderr=stderr, soft_wrap=soft_wrap, highlight=False, markup=False)
        self.file = getattr(self.file, "unguarded", self.file)

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError again, for `run_and_report` to handle.

        rich calls this method while it handles a BrokenPipeError. rich's own method would exit with
        code 1, which in specdistill means that a check failed.
        """
        raise

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yield the segments of rich's output, with control characters in their text replaced.

        Segments of rich's own control codes, for example to move the cursor, stay unchanged.
        """
        for segment in super().render(renderable, options):
            yield (
                segment if segment.control else segment._replace(text=make_printable(segment.text))
            )
