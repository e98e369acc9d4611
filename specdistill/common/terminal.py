"""Print the output of commands: results on stdout, progress and messages on stderr.

No output may control the terminal, because names, prompts, cards and answers of servers come from
outside.
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

# Control characters except tab and newline, characters that reverse the text that follows, and
# characters that neither UTF-8 nor XML can hold.
NO_TEXT = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
# The output with which libraries redraw a progress bar.
PROGRESS_BAR_OUTPUT = re.compile(rf"(\x1b\[A)+|\r(?!.*{NO_TEXT.pattern}).*")
MAX_LINE_CHARACTERS = 1000  # the most characters of a line of a message
JSON = "--json"
QUIET_FLAG = "--quiet"
# Patterns of lines of libraries that are of no use to a user, by the logger that writes them.
NOISE = {
    "DeepSpeed": "Setting accelerator to CPU",
    # The error at the end says the same.
    "huggingface_hub.utils._http": "' thrown while requesting |Retrying in ",
}
for library in NOISE:
    logging.getLogger(library).addFilter(
        lambda record: not re.search(NOISE[record.name], record.getMessage())
    )
# The stream on which --json prints results. Without one, commands print them in words.
documents: list[TextIO] = []


def make_printable(text: str) -> str:
    """Return a text whose control characters are replaced by a visible character."""
    return NO_TEXT.sub("\N{REPLACEMENT CHARACTER}", text)


def shorten_lines(text: str) -> str:
    """Return a text whose lines have at most MAX_LINE_CHARACTERS characters.

    Longer lines lose their middle. A message may quote the content of a file.
    """
    return "\n".join(
        line
        if len(line) <= MAX_LINE_CHARACTERS
        else f"{line[: MAX_LINE_CHARACTERS // 2]} … {line[3 - MAX_LINE_CHARACTERS // 2 :]}"
        for line in text.split("\n")
    )


def guard(stream: Any, *, shortens: bool = False) -> None:
    """Make everything that is written to a stream `printable` from now on.

    Progress bars on a terminal are left alone. Characters that the encoding of the stream lacks are
    escaped. The stream stays the same object, because handlers of logging may hold it already.

    Args:
        stream: the stream.
        shortens: also apply `shortened`, even to what libraries log.
    """
    if not hasattr(stream, "unguarded"):
        write = stream.write
        stream.unguarded = SimpleNamespace(
            write=stream.write,
            flush=stream.flush,
            isatty=stream.isatty,
            fileno=stream.fileno,
            encoding=stream.encoding,
        )
        shown = (lambda text: shorten_lines(make_printable(text))) if shortens else make_printable
        stream.write = lambda text: write(
            text if stream.isatty() and PROGRESS_BAR_OUTPUT.fullmatch(text) else shown(text)
        )
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def redirect_messages(arguments: Sequence[str]) -> Iterator[None]:
    """Send the messages of a command to stderr while it runs.

    With --json only `result` prints to stdout. With --quiet only errors are printed to stderr.

    Args:
        arguments: the arguments of the command.
    """
    logger = logging.getLogger("specdistill")
    if logger.handlers:  # A script that `specdistill VERB` runs has its handlers already.
        yield
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.ERROR if QUIET_FLAG in arguments else logging.INFO)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with ExitStack() as stack:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            if JSON in arguments:
                documents.append(sys.stdout)
                stack.enter_context(redirect_stdout(nowhere))
            if QUIET_FLAG in arguments:
                stack.enter_context(redirect_stderr(nowhere))
            yield
    finally:
        documents.clear()
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def print_result(document: object) -> None:
    """Print the result of a command as one line of JSON with --json.

    Otherwise do nothing, because the command prints its result in words. Only the first process of
    a launch prints.
    """
    for stream in documents if os.environ.get("RANK", "0") == "0" else ():
        print(
            json.dumps(
                document, default=lambda value: vars(value) if is_dataclass(value) else str(value)
            ),
            file=stream,
            flush=True,
        )


class Console(rich.console.Console):
    """A console of rich that writes colours and bars past `guard`.

    Its texts are `printable`, and are not read as markup.
    """

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False) -> None:
        super().__init__(stderr=stderr, soft_wrap=soft_wrap, highlight=False, markup=False)
        self.file = getattr(self.file, "unguarded", self.file)

    def on_broken_pipe(self) -> None:
        raise  # rich would exit with code 1, which means that a check failed

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield (
                segment if segment.control else segment._replace(text=make_printable(segment.text))
            )
