"""Methods without weights: each sequence has a lookup of its own, which reads the text and says what may follow."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from specdistill.decoding.proposer import DecodingState, Proposal, Proposer, Remembering
from specdistill.decoding.sampling import Generators, Sampling
from specdistill.decoding.tree import TreeShape
from specdistill.methods import sizes
from specdistill.methods.contract import Implementation
from specdistill.recipe.fields import Section
from specdistill.targets.frozen import FrozenTarget


class Lookup(Protocol):
    """settings: as in `Proposer`."""

    @property
    def settings(self) -> Mapping[str, Any]: ...

    def restart(self) -> None:
        """Forget the sequence."""

    def find(self, text: list[int], k: int) -> list[int]:
        """Up to k draft tokens for a sequence that begins with the one before; none where nothing is found."""


class LookupProposer:
    """Draft tokens are certain (one-hot) at any temperature, so verification needs no distribution of theirs."""

    vocabulary = reader = None
    depends_on_width = False
    aux_layers: tuple[int, ...] = ()
    num_parameters = num_bytes = 0

    def __init__(self, lookup: Lookup) -> None:
        self.lookup, self.settings = lookup, lookup.settings
        self.rows: list[Lookup] = []

    def draws(self, sampling: Sampling, tree: TreeShape | None) -> bool:
        return False

    def passes(self, k: int) -> int:
        return 0

    def remember(self, outputs: Sequence[Sequence[int]]) -> None:
        if isinstance(self.lookup, Remembering):
            self.lookup.remember(outputs)

    def begin(self, max_lengths: Sequence[int]) -> None:
        self.rows = [copy.copy(self.lookup) for _ in max_lengths]
        for row in self.rows:
            row.restart()

    def propose(
        self, state: DecodingState, k: int, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        return [
            Proposal(row.find(text, k))
            for row, text in zip(self.rows, state.token_ids, strict=True)
        ]

    def keep(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


def lookup_method(
    method: str, lookup: Callable[..., Lookup], *, note: str, published: sizes.PublishedFigures
) -> Implementation:
    """A row of the table. lookup: takes the keys of the method's section of `eval:`, `min` and `max` among them, the fewest and the most
    tokens that agree. note, published: of `PlannedDraft`. There are no weights, and nothing to train.
    """

    def load_proposer(
        folder: Path | None, target: FrozenTarget, *, key: str, **sections: Section
    ) -> Proposer:
        return LookupProposer(lookup(**vars(sections[method]) if sections else {}))

    def planned(
        target: sizes.Described, given: sizes.Described | None, settings: dict[str, Any]
    ) -> sizes.PlannedDraft:
        return sizes.PlannedDraft(
            sizes.ParameterCounts(0, 0, 0), None, target.text.vocab_size, note, published
        )

    return Implementation(
        load_proposer, planned, lambda fewest, most: LookupProposer(lookup(min=fewest, max=most))
    )
