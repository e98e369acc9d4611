"""What may be wrong with a multi-token-prediction layer whose files are right."""

from collections.abc import Iterator

from specdistill.methods.contract import Mistake
from specdistill.methods.heads.mistakes import mistakes_of_layers, swap, swap_halves_of, undoing
from specdistill.methods.mtp.module import MtpDraft
from specdistill.targets.frozen import FrozenTarget


def mistakes(head: MtpDraft, target: FrozenTarget) -> Iterator[Mistake]:
    """Every mistake that such a layer can have, one at a time."""
    changed = undoing(head, target)
    yield changed("the two halves that fc reads, embedding and hidden state, are swapped", swap_halves_of("fc"))
    yield changed("the norms of embedding and hidden state are swapped", swap("token_norm", "hidden_norm"))
    yield from mistakes_of_layers(head, changed)
