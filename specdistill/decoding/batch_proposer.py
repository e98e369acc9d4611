"""The contract of a proposer for several sequences at once, and one for any proposer without features: a copy for each row.

A batched proposer is made from the one for a single sequence and drafts the same tokens, up to rounding.

Shapes: B rows, F freshly committed positions of the row that has most.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdistill.decoding.proposer import DecodingState, Proposal, Proposer
from specdistill.decoding.sampling import Sampling
from specdistill.targets.frozen import Features

Generators = Sequence[torch.Generator | None]


@dataclass
class BatchState:
    """The sequences so far, as a proposer sees them: `DecodingState` of B rows.

    token_ids: of each row. fresh: features [B, F, D], of which the first num_fresh[b] of row b count.
    """

    token_ids: list[list[int]]
    fresh: Features
    num_fresh: list[int]


class BatchProposer(Protocol):
    aux_layers: tuple[int, ...]

    def begin(self, max_lengths: Sequence[int]) -> None:
        """Start new sequences; row b has at most max_lengths[b] tokens, draft tokens included."""
        ...

    def propose(self, state: BatchState, k: int, sampling: Sampling, generators: Generators) -> list[Proposal]:
        """Draft up to k tokens that follow each row; row b draws from generators[b] alone, as many numbers as on its own."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        ...


def uniforms(count: int, generators: Generators) -> Tensor:
    """[B, count] in [0, 1), each row from its own generator."""
    return torch.stack([torch.rand(count, generator=generator, dtype=torch.float64) for generator in generators])


class RowByRow:
    """A copy of a proposer for each row."""

    def __init__(self, proposer: Proposer) -> None:
        assert not proposer.aux_layers, "a proposer that reads features drafts for one sequence"
        self.proposer = proposer
        self.aux_layers = proposer.aux_layers
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
