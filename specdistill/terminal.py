"""What commands print: results on stdout, progress and messages on stderr. It steers no terminal: names, prompts, cards and what servers
answer come from outside.
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
from typing import Any

import rich.console
from rich.segment import Segment

# Control characters but tab and newline; what reverses the text that follows; what neither UTF-8 nor XML can hold.
NO_TEXT = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
OF_A_BAR = re.compile(
    rf"(\x1b\[A)+|\r(?!.*{NO_TEXT.pattern}).*"
)  # by which libraries draw a progress bar again
LONGEST = 1000  # characters of a line of messages
JSON, QUIET = "--json", "--quiet"
# Lines of libraries that tell a user nothing, by the logger that writes them.
NOISE = {
    "DeepSpeed": "Setting accelerator to CPU",
    "huggingface_hub.utils._http": "' thrown while requesting |Retrying in ",  # the error at the end says it
}
for library in NOISE:
    logging.getLogger(library).addFilter(
        lambda record: not re.search(NOISE[record.name], record.getMessage())
    )
documents: list[
    Any
] = []  # the stream on which --json prints results; none: they are printed in words


def printable(text: str) -> str:
    """A character that would steer a terminal as one that shows that it was there."""
    return NO_TEXT.sub("\N{REPLACEMENT CHARACTER}", text)


def shortened(text: str) -> str:
    """Lines of at most LONGEST characters, the longer ones without their middle: a message may quote what a file holds."""
    lines = text.split("\n")
    return "\n".join(
        line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} … {line[3 - LONGEST // 2 :]}"
        for line in lines
    )


def guard(stream: Any, *, shortens: bool = False) -> None:
    """From now on, what is written to a stream is `printable`, but for bars on a terminal, and escaped where its encoding lacks it.

    shortens: and `shortened`, also what libraries log.

    It stays the same object, as handlers of logging may hold it already.
    """
    if not hasattr(stream, "unguarded"):
        write = stream.write
        kept = ("write", "flush", "isatty", "fileno", "encoding")
        stream.unguarded = SimpleNamespace(**{name: getattr(stream, name) for name in kept})
        shown = (lambda text: shortened(printable(text))) if shortens else printable
        stream.write = lambda text: write(
            text if stream.isatty() and OF_A_BAR.fullmatch(text) else shown(text)
        )
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def output(arguments: Sequence[str]) -> Iterator[None]:
    """While a command runs: its messages go to stderr. --json: of its results, `result` alone prints; --quiet: of stderr, errors alone."""
    logger = logging.getLogger("specdistill")
    if logger.handlers:  # a script, which `specdistill VERB` runs
        yield
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.ERROR if QUIET in arguments else logging.INFO)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with ExitStack() as stack:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            if JSON in arguments:
                documents.append(sys.stdout)
                stack.enter_context(redirect_stdout(nowhere))
            if QUIET in arguments:
                stack.enter_context(redirect_stderr(nowhere))
            yield
    finally:
        documents.clear()
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def result(document: Any) -> None:
    """With --json, print a command's result as one line of JSON; without, do nothing, since the command prints it in words."""
    for stream in documents if os.environ.get("RANK", "0") == "0" else ():
        print(
            json.dumps(document, default=lambda it: vars(it) if is_dataclass(it) else str(it)),
            file=stream,
            flush=True,
        )


class Console(rich.console.Console):
    """rich's, which writes colours and bars past `guard`; its texts are `printable` and no markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, **options)
        self.file = getattr(self.file, "unguarded", self.file)

    def on_broken_pipe(self) -> None:
        raise  # rich would end with exit code 1, which says that a check failed

    def render(self, *given: Any, **options: Any) -> Iterator[Segment]:
        for segment in super().render(*given, **options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
