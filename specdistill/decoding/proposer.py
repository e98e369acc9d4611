"""The contract of a proposer: what decoding asks of a draft, for one sequence or for several at once.

A proposer keeps its own state between rounds.

Shapes: B rows, D target hidden size, F freshly committed positions (of the row that has most), K draft tokens, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from specdistill.decoding.sampling import Generators, Sampling
from specdistill.decoding.tree import Tree, TreeShape
from specdistill.targets.frozen import Features


@dataclass
class DecodingState:
    """The sequences so far, as a proposer sees them.

    token_ids: of each row, prompt and emitted tokens. The target has processed all but the last.
    fresh: the target's features [B, F, D] of what it processed since the last proposal, of which the first num_fresh[b] of row b count.
    """

    token_ids: list[list[int]]
    fresh: Features
    num_fresh: list[int]


@dataclass(frozen=True)
class Proposal:
    """Draft tokens [K] and the distributions [K, V] they were drawn from; None where each is certain (one-hot).

    tree: the tokens are its nodes, siblings drawn from one distribution without replacement; None for a chain.
    """

    tokens: list[int]
    probabilities: Tensor | None = None
    tree: Tree | None = None


class Proposer(Protocol):
    """aux_layers: the target's layers it reads in addition to the last. num_parameters, num_bytes: of its weights, without those shared
    with the target. depends_on_width: whether what it drafts at a position depends on how many follow in the same proposal, as in a block
    whose positions see each other: its acceptance is then known for the K alone that was measured. reader: of a draft that runs layers of
    the target, over the target's KV cache, what reads the target in the decoder's place (see specdistill.decoding.readers) and does not run
    them again; None for others.
    """

    aux_layers: tuple[int, ...]
    num_parameters: int
    num_bytes: int
    depends_on_width: bool
    reader: Any

    @property
    def vocabulary(self) -> frozenset[int] | None:
        """The target's token ids that it can propose; None: any."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The method's own settings, as the report states them (JSON)."""

    def draws(self, sampling: Sampling, tree: TreeShape | None) -> bool:
        """Whether draft tokens are drawn from its distribution; otherwise each is certain (one-hot)."""

    def passes(self, k: int) -> int:
        """Its forward passes in a round of k draft tokens; of a tree, of k levels."""

    def begin(self, max_lengths: Sequence[int]) -> None:
        """Start new sequences; row b has at most max_lengths[b] tokens, draft tokens included. Raises UserError for several sequences at
        once of a draft that cannot be batched.
        """

    def propose(
        self, state: DecodingState, k: int, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        """Draft up to k tokens that follow each row, or a tree of up to k levels, if that is its own way. Row b draws from generators[b]
        alone, as many numbers as on its own, and gets the tokens that it gets on its own, up to rounding.
        """

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""


@runtime_checkable
class TreeProposer(Protocol):
    """A proposer that can also draft trees."""

    def propose_tree(
        self, state: DecodingState, shape: TreeShape, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        """Draft a tree of tokens that follow each row, as `propose` a chain. Its levels cost as many draft steps as `passes` says, a
        block's none."""


@runtime_checkable
class Remembering(Protocol):
    """A proposer that also looks up what earlier requests gave."""

    def remember(self, outputs: Sequence[Sequence[int]]) -> None:
        """Know these outputs of earlier requests, the latest last, and no others, for the sequences that begin from now on."""


class PausingProposer:
    """What proposers have in common whose draft pauses in some rounds. They are as it is, unless they say otherwise; when it drafts again
    it reads what was committed meanwhile.

    settings: in addition to the draft's.
    """

    def __init__(self, draft: Proposer, **settings: Any) -> None:
        self.draft = draft
        self.aux_layers, self.depends_on_width, self.reader = (
            draft.aux_layers,
            draft.depends_on_width,
            draft.reader,
        )
        self.num_parameters, self.num_bytes, self.vocabulary = (
            draft.num_parameters,
            draft.num_bytes,
            draft.vocabulary,
        )
        self.settings: dict[str, Any] = {**draft.settings, **settings}

    def draws(self, sampling: Sampling, tree: TreeShape | None) -> bool:
        return self.draft.draws(sampling, tree)

    def passes(self, k: int) -> int:
        return self.draft.passes(k)

    def remember(self, outputs: Sequence[Sequence[int]]) -> None:
        if isinstance(self.draft, Remembering):
            self.draft.remember(outputs)

    def begin(self, max_lengths: Sequence[int]) -> None:
        self.draft.begin(max_lengths)
        self._unread: list[list[Features]] = [[] for _ in max_lengths]  # of each row

    def keep(self, rows: Sequence[int]) -> None:
        self.draft.keep(rows)
        self._unread = [self._unread[row] for row in rows]

    def pause(self, state: DecodingState) -> None:
        """Keep the state's fresh features; copied: a compiled target's next pass may write over them."""
        for row, (unread, count) in enumerate(zip(self._unread, state.num_fresh, strict=True)):
            unread.append(state.fresh.rows([row]).first(count))

    def resume(self, state: DecodingState) -> DecodingState:
        """The state with all that is unread as its fresh features; nothing is left."""
        if not any(self._unread):
            return state
        self.pause(state)
        rows, self._unread = (
            [Features.joined(unread) for unread in self._unread],
            [[] for _ in self._unread],
        )
        return replace(
            state, fresh=Features.padded(rows), num_fresh=[row.last_hidden.shape[1] for row in rows]
        )
