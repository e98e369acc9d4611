"""The interface of a proposer: what the decoder asks of a draft, for one sequence or several.

A proposer keeps its own state between rounds.

Shapes: B rows, D target hidden size, F freshly committed positions (of the row that has most), K
draft tokens, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from specdistill.decoding.sampling import Generators, Sampling
from specdistill.decoding.tree import Tree, TreeShape
from specdistill.targets.frozen import Features


@dataclass
class DecodingState:
    """The sequences so far, as a proposer sees them.

    Attributes:
        token_ids: the tokens of each row: its prompt and the emitted tokens. The target has
            processed all but the last.
        fresh: the target's features [B, F, D] of the tokens that it processed since the last
            proposal.
        num_fresh: how many of the F positions of each row are valid.
    """

    token_ids: list[list[int]]
    fresh: Features
    num_fresh: list[int]


@dataclass(frozen=True)
class Proposal:
    """The draft tokens of one row and round.

    Attributes:
        tokens: the K tokens of a chain, or the tokens of a tree's nodes.
        probabilities: [K, V], the distributions that the tokens were drawn from. None if each
            token is certain (one-hot).
        tree: the tree of the tokens, whose siblings are drawn from one distribution without
            replacement. None for a chain.
    """

    tokens: list[int]
    probabilities: Tensor | None = None
    tree: Tree | None = None


class Proposer(Protocol):
    """A draft during decoding.

    Attributes:
        aux_layers: the target's layers whose hidden states the draft reads, besides the last layer.
        num_parameters: the number of its parameters, without those shared with the target.
        num_bytes: the bytes of the same parameters.
        depends_on_width: whether the token at a position depends on how many tokens follow in the
            same proposal, as in a block whose positions see each other. The draft's acceptance is
            then known only for the K that was measured.
        reader: None, or for a draft that runs layers of the target: the reader that replaces the
            decoder's (see specdistill.decoding.readers), so that these layers run only once.
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
        """The method's own settings, in the form of the report (JSON)."""

    def has_drawn_candidates(self, sampling: Sampling, tree: TreeShape | None) -> bool:
        """Return whether draft tokens are drawn at random from the draft's distribution.

        Otherwise each draft token is certain, such as the draft's best token.

        Args:
            sampling: temperature, top-p and top-k.
            tree: the shape of the proposal; None for a chain.
        """

    def count_passes(self, k: int) -> int:
        """Return how many forward passes the draft runs for a chain of k tokens.

        For a tree, k is its number of levels.
        """

    def begin(self, max_lengths: Sequence[int]) -> None:
        """Start new sequences, and forget the previous ones.

        Args:
            max_lengths: the most tokens of each sequence, draft tokens included.

        Raises:
            UserError: if there are several sequences and the draft can decode only one at a time.
        """

    def propose(
        self, state: DecodingState, k: int, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        """Propose draft tokens after each sequence of the batch.

        A sequence gets the same draft tokens as it would if decoded alone, up to rounding. So row b
        draws random numbers only from generators[b], and as many as it would alone.

        Args:
            state: the sequences so far, with the target features of their latest tokens.
            k: the most draft tokens of a chain.
            sampling: temperature, top-p and top-k.
            generators: the random generator of each row.

        Returns:
            For each row a chain, or a tree if the proposer always drafts a tree of its own shape.
        """

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only the rows with these indices, and drop the finished ones."""


@runtime_checkable
class TreeProposer(Protocol):
    """A proposer that can also draft trees."""

    def propose_tree(
        self, state: DecodingState, shape: TreeShape, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        """Draft a tree of tokens after each row, as `propose` drafts a chain.

        The draft runs `count_passes(shape.depth)` forward passes.

        Args:
            state: the sequences so far, with the target features of their latest tokens.
            shape: the shape of the trees.
            sampling: temperature, top-p and top-k.
            generators: the random generator of each row.
        """


@runtime_checkable
class UsesPastOutputs(Protocol):
    """A proposer that also searches the outputs of earlier requests."""

    def set_past_outputs(self, outputs: Sequence[Sequence[int]]) -> None:
        """Set the outputs of earlier requests, in which the proposer searches for draft tokens.

        Replaces the outputs that were set before. The new ones are used for sequences that begin
        afterwards.

        Args:
            outputs: token ids of each output, the latest output last.
        """
