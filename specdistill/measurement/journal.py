"""What a measurement has decoded, kept batch by batch, so that one that is interrupted resumes with the batch that it was at."""

from collections import deque
from collections.abc import Callable
from pathlib import Path

from pydantic import TypeAdapter

from specdistill.decoding.decoder import Generation

Ways = list[list[Generation]]  # of each way of decoding, the generations of a batch
GENERATIONS = TypeAdapter(Ways)


class Journal:
    """A file with a line for each batch that was decoded, in their order, which follows from what was decoded before.

    known: the lines of an interrupted measurement that are not read yet. seconds: of the decoding that was read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.seconds = path, 0.0
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]  # the last line may have been cut
        if content != whole:
            path.write_bytes(whole)
        self.known = deque(whole.splitlines())

    def decoded(self, decode: Callable[[], Ways]) -> Ways:
        """The next batch: as it was decoded before the interruption, or now."""
        if self.known:
            ways = GENERATIONS.validate_json(self.known.popleft())
            self.seconds += sum(generation.seconds for generations in ways for generation in generations)
            return ways
        ways = decode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(GENERATIONS.dump_json(ways) + b"\n")
        return ways
