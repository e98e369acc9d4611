"""The common part of methods without weights: they look up what may follow.

Each sequence has its own lookup, which reads the text.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

from torch import nn

from specdistill.decoding.proposer import DecodingState, Proposal, UsesPastOutputs
from specdistill.decoding.sampling import Generators, Sampling
from specdistill.decoding.tree import TreeShape
from specdistill.methods import sizes
from specdistill.methods.base import Advice, DraftSettings, Method
from specdistill.methods.lookups.config import UntrainedRecipe
from specdistill.targets.frozen import FrozenTarget


class Lookup(Protocol):
    """A lookup in one sequence, and perhaps in earlier outputs.

    Attributes:
        settings: the settings of the lookup, as they stand in reports.
    """

    @property
    def settings(self) -> Mapping[str, object]:
        """The lookup's settings, in the form of the report (JSON)."""

    def restart(self) -> None:
        """Forget the sequence."""

    def find(self, text: list[int], k: int) -> list[int]:
        """Return up to k draft tokens for a sequence; none if nothing is found.

        Args:
            text: the tokens of the whole sequence so far. Each call passes the tokens of the call
                before and the new ones after them, so a lookup need only index the new ones.
            k: the most draft tokens.
        """


class LookupProposer:
    """A proposer that looks draft tokens up.

    Draft tokens are certain (one-hot) at any temperature, so verification needs no distribution of
    them.
    """

    vocabulary = reader = None
    depends_on_width = False
    aux_layers: tuple[int, ...] = ()
    num_parameters = num_bytes = 0

    def __init__(self, lookup: Lookup) -> None:
        self.lookup = lookup
        self.settings = lookup.settings
        self.rows: list[Lookup] = []

    def has_drawn_candidates(self, sampling: Sampling, tree: TreeShape | None) -> bool:
        """Return False, because tokens that are looked up are not drawn at random."""
        return False

    def count_passes(self, k: int) -> int:
        """Return 0: a lookup runs no model."""
        return 0

    def set_past_outputs(self, outputs: Sequence[Sequence[int]]) -> None:
        """Replace the outputs of earlier requests, if the lookup searches them."""
        if isinstance(self.lookup, UsesPastOutputs):
            self.lookup.set_past_outputs(outputs)

    def begin(self, max_lengths: Sequence[int]) -> None:
        """Start one new sequence for each entry of `max_lengths`."""
        # Each sequence gets a copy of the lookup and restarts it, so that it has an index of its
        # own. The copies share what they know of past outputs, because the copy is shallow.
        self.rows = [copy.copy(self.lookup) for _ in max_lengths]
        for row in self.rows:
            row.restart()

    def propose(
        self, state: DecodingState, k: int, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        """Look up at most k draft tokens for each sequence."""
        return [
            Proposal(row.find(text, k))
            for row, text in zip(self.rows, state.token_ids, strict=True)
        ]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        self.rows = [self.rows[row] for row in rows]


class LookupAdvice(Advice[nn.Module]):
    """The answers of lookups to `specdistill plan`: there are no weights, and nothing to train."""

    def __init__(self, published: sizes.MethodFigures, note: str) -> None:
        """Describe a lookup.

        Args:
            published: acceptance that others published.
            note: what is looked up, in words.
        """
        self.published = published
        self.note = note

    def plan_draft(
        self,
        target: sizes.ModelConfigInfo,
        draft_info: sizes.ModelConfigInfo | None,
        settings: DraftSettings,
    ) -> sizes.PlannedDraft:
        """Return the size of a lookup for `specdistill plan`.

        A lookup has no parameters and no layers, so the shape of its layers is None. It can draft
        every token of the target's vocabulary.
        """
        return sizes.PlannedDraft(
            parts=sizes.ParameterCounts(parameters=0, read=0, num_layers=0),
            shape=None,
            vocabulary=target.text.vocab_size,
            note=self.note,
            published=self.published,
        )


class LookupMethod(Method[UntrainedRecipe, nn.Module]):
    """A method that looks up what may follow, in the sequence or in earlier outputs.

    Attributes:
        lookup: makes a lookup from the keys of the method's section of `eval:`. Two of the keys are
            `min` and `max`, the fewest and the most tokens that must agree.
    """

    lookup: ClassVar[Callable[..., Lookup]]

    def load_proposer(
        self, folder: Path | None, target: FrozenTarget, *, key: str, **options: object
    ) -> LookupProposer:
        """Build a proposer for decoding. A lookup has no weights, so nothing is loaded.

        Args:
            folder: not used, like `target` and `key`.
            target: not used.
            key: not used.
            **options: one option with the method's name: the recipe's section `eval.<method>`,
                whose keys are the arguments of the lookup. Without it these have their defaults.
        """
        keys = vars(options[self.name]) if options else {}
        return LookupProposer(self.lookup(**keys))

    def build_lookup(self, min_tokens: int, max_tokens: int) -> LookupProposer:
        """Build a lookup that proposes before a draft; see `Method.build_lookup`."""
        return LookupProposer(self.lookup(min=min_tokens, max=max_tokens))
