"""Early exits as a method: how they are recognized, created, trained and decoded with.

An early exit drafts chains, for one sequence at a time, with the first layers of the target itself.
"""

from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor

from specdistill.common.errors import UserError
from specdistill.decoding.proposer import DecodingState, Proposal
from specdistill.decoding.sampling import Generators, Sampling
from specdistill.methods.base import FeatureMethod
from specdistill.methods.chains.head import create_or_load
from specdistill.methods.early_exit.advice import ExitAdvice
from specdistill.methods.early_exit.checkpoint import (
    check_exit,
    is_exit_config,
    load_exit,
    save_exit,
)
from specdistill.methods.early_exit.config import ExitRecipe
from specdistill.methods.early_exit.module import ExitDraft, build_exit
from specdistill.methods.early_exit.objective import ExitDistillation
from specdistill.methods.early_exit.reader import SplitTarget
from specdistill.methods.feature_proposer import TokenProposer
from specdistill.methods.sizes import RawConfig
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.losses.divergence import build_divergence


class ExitProposer(TokenProposer[ExitDraft]):
    """A proposer that drafts chains for one sequence with an early exit.

    Attributes:
        reader: reads the target in place of the decoder's reader (see `Proposer`). To verify, the
            reader continues from the layer at which drafting stopped.
    """

    reader: SplitTarget

    def __init__(self, draft: ExitDraft, target: FrozenTarget) -> None:
        """Prepare an exit for decoding with its target."""
        super().__init__(draft)
        self.reader = SplitTarget(target, draft.config.exit_layer)
        self.settings = {"exit_layer": draft.config.exit_layer}

    def begin(self, max_lengths: Sequence[int]) -> None:
        """Raise UserError for more than one sequence; nothing else is needed to start.

        The KV cache is in `reader`, which runs the target's layers in two parts, to draft and to
        verify. It holds one sequence.
        """
        if len(max_lengths) > 1:
            raise UserError(
                "eval.batch_size",
                got=f"{len(max_lengths)} with a draft of method early_exit",
                expected="1",
            )

    def keep(self, rows: Sequence[int]) -> None:
        """Do nothing, because there is only one row."""

    def propose(
        self, state: DecodingState, k: int, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        """Draft a chain of k tokens for the only sequence, one pass of the first layers for each.

        See `Proposer.propose` for the arguments.
        """
        last_token_1 = torch.tensor([state.token_ids[0][-1]], device=self.reader.target.device)

        def next_logits(step: int, token_1: Tensor | None) -> Tensor:
            """Run the target's first layers over one token; return the exit's logits [1, V].

            `chains` calls this once for each draft token.

            Args:
                step: not used.
                token_1: the token drafted in the step before. None: the sequence's last token.
            """
            next_token_1 = last_token_1 if token_1 is None else token_1
            hidden_11H = self.reader.advance(next_token_1.unsqueeze(0))
            return self.draft.logits(self.draft(hidden_11H[:, -1]))

        return self.chains(k, sampling, generators, next_logits)


class EarlyExit(FeatureMethod[ExitRecipe, ExitDraft]):
    """Early exits (arXiv 2309.08168): the target's first layers draft."""

    name = "early_exit"
    advice = ExitAdvice()

    def is_named(self, config: RawConfig, names: Set[str]) -> bool:
        """Return whether a folder's config.json belongs to an early exit."""
        return is_exit_config(config)

    def create(self, recipe: ExitRecipe, target: FrozenTarget, rows: Dataset) -> ExitDraft:
        """Create the exit that a recipe describes: new, or the trained one of `draft.init`.

        The training data `rows` is not needed, because the exit has the target's vocabulary.
        """
        return create_or_load(recipe, target, build_exit, load_exit)

    def build_objective(
        self, draft: ExitDraft, recipe: ExitRecipe, target: FrozenTarget
    ) -> ExitDistillation:
        """Build the module that computes the loss of an exit, with the settings of a recipe."""
        return ExitDistillation(
            draft,
            build_divergence(recipe.loss.divergence),
            recipe.eval.num_speculative_tokens,
            recipe.loss.temperature,
        )

    def build_proposer(self, draft: ExitDraft, target: FrozenTarget) -> ExitProposer:
        """Build the proposer of an exit that is loaded."""
        return ExitProposer(draft, target)

    def save(self, draft: ExitDraft, target: FrozenTarget, folder: Path) -> None:
        """Write an exit into a folder, in specdistill's own layout."""
        save_exit(draft, folder)

    def load(self, folder: Path, target: FrozenTarget, *, key: str) -> ExitDraft:
        """Load an exit in the dtype of its file."""
        return load_exit(folder, target, key=key)

    def check(
        self,
        folder: Path,
        tensors: Mapping[str, Tensor],
        target: TargetFiles | None,
        *,
        key: str,
        name: Path | str,
        **options: object,
    ) -> None:
        """Check an exit's config.json and the shapes of its tensors; see `Method.check`."""
        check_exit(folder, tensors, target, key=key, name=name)


METHOD = EarlyExit()
