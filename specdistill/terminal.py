"""What commands print steers no terminal: names, prompts, cards and what servers answer come from outside."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import rich.console
from rich.segment import Segment

# Control characters but tab and newline; what reverses the text that follows; what neither UTF-8 nor XML can hold.
NO_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
OF_A_BAR = re.compile(r"(\x1b\[A)+\Z|\r?")  # by which libraries draw a progress bar again


def printable(text: str) -> str:
    """A character that would steer a terminal as one that shows that it was there."""
    return NO_TEXT.sub("\N{REPLACEMENT CHARACTER}", text)


@contextmanager
def guarded(stream: Any) -> Iterator[None]:
    """What is written to a stream meanwhile is `printable`, and escaped where its encoding lacks it; on a terminal, bars may return.

    The stream stays the same object, which handlers of logging may hold already.
    """
    if hasattr(stream, "unguarded"):  # a script within a command
        yield
        return
    write, stream.unguarded = stream.write, Unguarded(stream)

    def write_text(text: str) -> int:
        bar = OF_A_BAR.match(text) if stream.isatty() else None
        start = bar.end() if bar else 0
        write(text[:start] + printable(text[start:]))
        return len(text)

    stream.write = write_text
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        stream.write = write
        del stream.unguarded


class Unguarded:
    """A stream before it is guarded, for what writes escapes of its own."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.write = stream, stream.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Console(rich.console.Console):
    """rich's, which writes colours and bars, but its texts are `printable` and no markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, **options)
        self.file = getattr(self.file, "unguarded", self.file)

    def render(self, *given: Any, **options: Any) -> Iterator[Segment]:
        for segment in super().render(*given, **options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
