"""The contract of a proposer for several texts at once, and the form that any proposer without its own takes: a copy for each row.

Each is made of the proposer that drafts for one text, and drafts what that one would: only rounding may differ.

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
    """The texts so far, as a proposer sees them: `DecodingState` of B rows.

    token_ids: of each row. fresh: features [B, F, D], of which the first num_fresh[b] of row b count.
    """

    token_ids: list[list[int]]
    fresh: Features
    num_fresh: list[int]


class BatchProposer(Protocol):
    aux_layers: tuple[int, ...]

    def begin(self, max_lengths: Sequence[int]) -> None:
        """Forget the last texts; row b of the next ones has at most max_lengths[b] tokens, drafted ones included."""
        ...

    def propose(self, state: BatchState, k: int, sampling: Sampling, generators: Generators) -> list[Proposal]:
        """Guess up to k tokens that follow each row; row b draws from generators[b] alone, as much as it would on its own."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Forget all rows but these."""
        ...


def uniforms(count: int, generators: Generators) -> Tensor:
    """[B, count] in [0, 1), each row from its own generator."""
    return torch.stack([torch.rand(count, generator=generator, dtype=torch.float64) for generator in generators])


class RowByRow:
    """Any other proposer: a copy of it for each row."""

    def __init__(self, proposer: Proposer) -> None:
        assert not proposer.aux_layers, "a proposer that reads features drafts for one text"
        self.proposer = proposer
        self.aux_layers = proposer.aux_layers
        self.rows: list[Proposer] = []

    def begin(self, max_lengths: Sequence[int]) -> None:
        self.rows = [copy.copy(self.proposer) for _ in max_lengths]
        for row, max_length in zip(self.rows, max_lengths, strict=True):
            row.begin(max_length)

    def propose(self, state: BatchState, k: int, sampling: Sampling, generators: Generators) -> list[Proposal]:
        return [
            row.propose(DecodingState(text), k, sampling, generator)
            for row, text, generator in zip(self.rows, state.token_ids, generators, strict=True)
        ]

    def keep(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
