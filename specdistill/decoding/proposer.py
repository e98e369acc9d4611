"""The contracts of a proposer, for one sequence and for several at once: what decoding asks of a draft. A proposer keeps its own state
between rounds.

Shapes: B rows, D target hidden size, F freshly committed positions (of a batch: of the row that has most), K draft tokens, V vocabulary.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from specdistill.decoding.sampling import Generators, Random, Sampling
from specdistill.decoding.tree import Tree, TreeShape
from specdistill.targets.frozen import Features


@dataclass
class DecodingState:
    """The sequence so far, as a proposer sees it.

    token_ids: prompt and emitted tokens. The target has processed all but the last.
    fresh: the target's features [1, F, D] of the F positions processed since the last proposal.
    """

    token_ids: list[int]
    fresh: Features | None = None


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
    whose positions see each other: its acceptance is then known for the K alone that was measured.
    """

    aux_layers: tuple[int, ...]
    num_parameters: int
    num_bytes: int
    depends_on_width: bool

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

    def begin(self, max_length: int) -> None:
        """Start a new sequence, of at most `max_length` tokens, draft tokens included."""

    def propose(self, state: DecodingState, k: int, sampling: Sampling, generator: Random) -> Proposal:
        """Draft up to k tokens that follow `state.token_ids`, or a tree of up to k levels, if that is its own way."""

    def batched(self) -> "BatchProposer":
        """The same draft for several sequences at once. Raises UserError for a draft that cannot be batched."""


@runtime_checkable
class TreeProposer(Protocol):
    """A proposer that can also draft trees."""

    def propose_tree(self, state: DecodingState, shape: TreeShape, sampling: Sampling, generator: Random) -> Proposal:
        """Draft a tree of tokens that follow `state.token_ids`. Its levels cost as many draft steps as `passes` says, a block's none."""


@runtime_checkable
class Remembering(Protocol):
    """A proposer that also looks up what earlier requests gave."""

    def remember(self, outputs: Sequence[Sequence[int]]) -> None:
        """Know these outputs of earlier requests, the latest last, and no others, for the sequences that begin from now on."""


@runtime_checkable
class CompiledProposer(Protocol):
    """A proposer whose passes can be compiled graphs (`eval.compile`). compiled: whether they are, from the next sequence on."""

    compiled: bool


@dataclass
class BatchState:
    """The sequences so far, as a proposer sees them: `DecodingState` of B rows.

    token_ids: of each row. fresh: features [B, F, D], of which the first num_fresh[b] of row b count.
    """

    token_ids: list[list[int]]
    fresh: Features
    num_fresh: list[int]


class BatchProposer(Protocol):
    """Made from the proposer for a single sequence; it drafts the same tokens, up to rounding."""

    def begin(self, max_lengths: Sequence[int]) -> None:
        """Start new sequences; row b has at most max_lengths[b] tokens, draft tokens included."""

    def propose(self, state: BatchState, k: int, sampling: Sampling, generators: Generators) -> list[Proposal]:
        """Draft up to k tokens that follow each row; row b draws from generators[b] alone, as many numbers as on its own."""

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""


class Unread:
    """Features of the positions that were committed since a draft drafted last, of each of B rows: it reads them when it drafts again."""

    def __init__(self, num_rows: int) -> None:
        self._rows: list[list[Features]] = [[] for _ in range(num_rows)]

    def add(self, fresh: Features, num_fresh: Sequence[int]) -> None:
        """Of fresh [B, F, D] the first num_fresh[b] positions of row b; copied: a compiled target's next pass may write over them."""
        for row, (unread, count) in enumerate(zip(self._rows, num_fresh, strict=True)):
            unread.append(fresh.rows([row]).first(count))

    def read_by(self, state: DecodingState) -> DecodingState:
        """The state of one sequence with all that is unread as its fresh features; nothing is left."""
        if not any(self._rows):
            return state
        assert state.fresh is not None
        (fresh,) = self._taken(state.fresh, [state.fresh.last_hidden.shape[1]])
        return replace(state, fresh=fresh)

    def read_by_rows(self, state: BatchState) -> BatchState:
        if not any(self._rows):
            return state
        rows = self._taken(state.fresh, state.num_fresh)
        return replace(state, fresh=Features.padded(rows), num_fresh=[row.last_hidden.shape[1] for row in rows])

    def _taken(self, fresh: Features, num_fresh: Sequence[int]) -> list[Features]:
        self.add(fresh, num_fresh)
        rows, self._rows = self._rows, [[] for _ in self._rows]
        return [Features.joined(unread) for unread in rows]

    def keep(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]


class RowByRow:
    """A copy of a proposer for each row; for any proposer without features."""

    def __init__(self, proposer: Proposer) -> None:
        assert not proposer.aux_layers, "a proposer that reads features drafts for one sequence"
        self.proposer = proposer
        self.rows: list[Proposer] = []

    def begin(self, max_lengths: Sequence[int]) -> None:
        self.rows = [copy.copy(self.proposer) for _ in max_lengths]
        for row, max_length in zip(self.rows, max_lengths, strict=True):
            row.begin(max_length)

    def propose(self, state: BatchState, k: int, sampling: Sampling, generators: Generators) -> list[Proposal]:
        return [
            row.propose(DecodingState(token_ids), k, sampling, generator)
            for row, token_ids, generator in zip(self.rows, state.token_ids, generators, strict=True)
        ]

    def keep(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
