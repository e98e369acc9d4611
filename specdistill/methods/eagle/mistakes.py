"""What may be wrong with an EAGLE-1 head whose files are right."""

from collections.abc import Iterator

from specdistill.methods.contract import Mistake
from specdistill.methods.eagle.module import EagleDraft
from specdistill.methods.heads.mistakes import mistakes_of_layers, mistakes_of_shape, swap_halves_of, undoing
from specdistill.targets.frozen import FrozenTarget


def mistakes(head: EagleDraft, target: FrozenTarget) -> Iterator[Mistake]:
    """Every mistake that an EAGLE-1 head can have, one at a time."""
    changed = undoing(head, target)
    yield changed("the two halves that fc reads, embedding and hidden state, are swapped", swap_halves_of("fc"))
    yield from mistakes_of_shape(head, target, changed)
    yield from mistakes_of_layers(head, changed)
