"""An early exit drafts: chains for one sequence, by the first layers of the target itself.

Shapes: K draft tokens, V target vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdistill.decoding.proposer import DecodingState, Proposal
from specdistill.decoding.sampling import Generators, Sampling
from specdistill.errors import UserError
from specdistill.methods.early_exit.module import ExitDraft
from specdistill.methods.early_exit.reader import SplitTarget
from specdistill.methods.feature_proposer import TokenProposer
from specdistill.targets.frozen import FrozenTarget


class ExitProposer(TokenProposer):
    """reader: reads the target in the decoder's place, and goes on where a draft has ended (see `Proposer`)."""

    def __init__(self, draft: ExitDraft, target: FrozenTarget) -> None:
        super().__init__(draft)
        self.reader = SplitTarget(target, draft.config.exit_layer)
        self.settings = {"exit_layer": draft.config.exit_layer}

    def begin(self, max_lengths: Sequence[int]) -> None:
        if len(max_lengths) > 1:
            raise UserError(
                "eval.batch_size",
                got=f"{len(max_lengths)} with a draft of method early_exit",
                expected="1",
            )

    def keep(self, rows: Sequence[int]) -> None:
        """There is one row."""

    def propose(
        self, state: DecodingState, k: int, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        """A chain of k draft tokens, or as many as are enough."""
        last_1 = torch.tensor([state.token_ids[0][-1]], device=self.reader.target.device)

        def next_logits(step: int, token_1: Tensor | None) -> tuple[Tensor, None]:
            hidden_11H = self.reader.advance((last_1 if token_1 is None else token_1).unsqueeze(0))
            return self.draft.logits(self.draft(hidden_11H[:, -1])), None

        return self.chains(k, sampling, generators, next_logits)
