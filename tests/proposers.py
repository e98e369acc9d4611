"""A proposer with a distribution of its own, for tests that need drafts which are sometimes accepted and sometimes not."""

from dataclasses import dataclass
from typing import Any

import torch

from specdistill.decoding.proposer import BatchProposer, DecodingState, Proposal, RowByRow
from specdistill.decoding.sampling import Sampling, draw
from specdistill.decoding.tree import DynamicTree, StaticTree, candidates_are_drawn
from specdistill.targets.frozen import FrozenTarget
from tests.tiny import tiny_target_model, tiny_tokenizer


def tiny_target(seed: int = 0) -> FrozenTarget:
    return FrozenTarget(tiny_target_model(num_layers=2, seed=seed), tiny_tokenizer(), name="tiny")


@dataclass
class ModelProposer:
    """Drafts with a whole model, without a cache: its greedy tokens (one-hot) or tokens drawn from its distribution."""

    model: torch.nn.Module
    one_hot: bool = False
    aux_layers: tuple[int, ...] = ()
    num_parameters: int = 7
    num_bytes: int = 28
    vocabulary: None = None
    depends_on_width: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    def draws(self, sampling: Sampling, tree: StaticTree | DynamicTree | None) -> bool:
        return not self.one_hot and candidates_are_drawn(sampling, tree)

    def passes(self, k: int) -> int:
        return k

    def begin(self, max_length: int) -> None:
        pass

    def batched(self) -> BatchProposer:
        return RowByRow(self)

    def propose(self, state: DecodingState, k: int, sampling: Sampling, generator: torch.Generator | None) -> Proposal:
        tokens, distributions = list(state.token_ids), []
        for _ in range(k):
            logits = self.model(torch.tensor([tokens])).logits[0, -1]
            if sampling.is_greedy or self.one_hot:
                tokens.append(int(logits.argmax()))
            else:
                distributions.append(sampling.probabilities(logits.unsqueeze(0))[0])
                uniform = torch.rand(1, generator=generator, dtype=torch.float64)
                tokens.append(int(draw(distributions[-1].unsqueeze(0), uniform)))
        return Proposal(tokens[len(state.token_ids) :], torch.stack(distributions) if distributions else None)
