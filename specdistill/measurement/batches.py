"""How prompts are put into batches to be measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from specdistill.suites.suite import Prompt, evenly


@dataclass(frozen=True)
class Batch:
    """Prompts that are decoded together: those from place `start` of all prompts on."""

    start: int
    prompts: tuple[Prompt, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.prompts)


def in_batches(prompts: Sequence[Prompt], size: int) -> list[Batch]:
    """In their order, the last batch with what is left."""
    return [Batch(start, tuple(prompts[start : start + size])) for start in range(0, len(prompts), size)]


def some(batches: Sequence[Batch], count: int) -> list[Batch]:
    """`count` of them, spread over the categories that they begin with."""
    return evenly(batches, [batch.prompts[0].category for batch in batches], count)
