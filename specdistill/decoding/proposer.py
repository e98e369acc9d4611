"""The contract of a proposer: what decoding asks of a draft. A proposer keeps its own state between rounds.

Shapes: D target hidden size, F freshly committed positions, K draft tokens, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from specdistill.decoding.sampling import Sampling
from specdistill.decoding.tree import DynamicTree, StaticTree, Tree
from specdistill.targets.frozen import Features

if TYPE_CHECKING:
    from specdistill.decoding.batch_proposer import BatchProposer


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
    """
    aux_layers: the target's layers it reads beside the last.
    num_parameters, num_bytes: of its weights; those shared with the target do not count.
    """

    aux_layers: tuple[int, ...]
    num_parameters: int
    num_bytes: int

    @property
    def vocabulary(self) -> frozenset[int] | None:
        """The target's token ids that it can propose; None: any."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """The method's own settings, as the report states them (JSON)."""
        ...

    def draws(self, sampling: Sampling, tree: StaticTree | DynamicTree | None) -> bool:
        """Whether draft tokens are drawn from its distribution; otherwise each is certain (one-hot)."""
        ...

    def passes(self, k: int) -> int:
        """Its forward passes in a round of k draft tokens; of a tree, of k levels."""
        ...

    def begin(self, max_length: int) -> None:
        """Start a new sequence, of at most `max_length` tokens, draft tokens included."""
        ...

    def propose(self, state: DecodingState, k: int, sampling: Sampling, generator: torch.Generator | None) -> Proposal:
        """Draft up to k tokens that follow `state.token_ids`."""
        ...

    def batched(self) -> "BatchProposer":
        """The same draft for several sequences at once. Raises UserError for a draft that cannot be batched."""
        ...


@runtime_checkable
class TreeProposer(Protocol):
    """A proposer that can also draft trees."""

    def propose_tree(
        self, state: DecodingState, shape: StaticTree | DynamicTree, sampling: Sampling, generator: torch.Generator | None
    ) -> Proposal:
        """Draft a tree of tokens that follow `state.token_ids`; each of its levels is one draft step."""
        ...
