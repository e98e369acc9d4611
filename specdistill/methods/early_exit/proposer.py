"""An early exit drafts: chains for one sequence, by the first layers of the target itself.

Shapes: K draft tokens, V target vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdistill.decoding.proposer import DecodingState, Proposal
from specdistill.decoding.sampling import Generators, Sampling, draw, uniforms
from specdistill.decoding.tree import candidates_are_drawn
from specdistill.errors import UserError
from specdistill.methods.early_exit.module import ExitDraft
from specdistill.methods.early_exit.reader import SplitTarget
from specdistill.targets.frozen import FrozenTarget


class ExitProposer:
    """reader: reads the target in the decoder's place, and goes on where a draft has ended (see `SharesLayers`)."""

    aux_layers: tuple[int, ...] = ()  # the reader has them
    vocabulary: None = None
    depends_on_width = False
    draws = staticmethod(candidates_are_drawn)

    def __init__(self, draft: ExitDraft, target: FrozenTarget) -> None:
        self.draft, self.reader = draft.eval(), SplitTarget(target, draft.config.exit_layer)
        self.settings: dict[str, Any] = {"exit_layer": draft.config.exit_layer}
        self.num_parameters = sum(parameter.numel() for parameter in draft.parameters())
        self.num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in draft.parameters())
        self.is_enough: Callable[[Tensor], bool] | None = None  # see `ConfidentProposer`

    def passes(self, k: int) -> int:
        return k

    def begin(self, max_lengths: Sequence[int]) -> None:
        if len(max_lengths) > 1:
            raise UserError("eval.batch_size", got=f"{len(max_lengths)} with a draft of method early_exit", expected="1")

    def keep(self, rows: Sequence[int]) -> None:
        """There is one row."""

    def propose(self, state: DecodingState, k: int, sampling: Sampling, generators: Generators) -> list[Proposal]:
        """A chain of k draft tokens, or as many as are enough."""
        device = self.reader.target.device
        uniforms_1K = None if sampling.is_greedy else uniforms(k, generators).to(device)
        tokens = [torch.tensor([state.token_ids[0][-1]], device=device)]
        distributions: list[Tensor] = []
        for step in range(k):
            logits_1V = self.draft.logits(self.draft(self.reader.advance(tokens[-1].unsqueeze(0))[:, -1]))
            if uniforms_1K is None:
                tokens.append(logits_1V.argmax(-1))
            else:
                distributions.append(sampling.probabilities(logits_1V))
                tokens.append(draw(distributions[-1], uniforms_1K[:, step]))
            if self.is_enough and self.is_enough(sampling.confidence(logits_1V)):
                break
        return [Proposal(torch.cat(tokens[1:]).tolist(), torch.cat(distributions) if distributions else None)]
