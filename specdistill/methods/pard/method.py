"""PARD as a method (arXiv 2504.18583): a draft model that fills masks in one pass.

A checkpoint is that of any model. Its config.json says in addition `spd_type: pard`, and
`pard_token` is the mask.
"""

from collections.abc import Set
from pathlib import Path

from datasets import Dataset
from transformers import PreTrainedModel

from specdistill.common.errors import UserError
from specdistill.methods.checkpoint import read_config
from specdistill.methods.mask_token import choose_mask
from specdistill.methods.models.method import ModelMethod
from specdistill.methods.models.proposer import DraftModelProposer
from specdistill.methods.pard.advice import PardAdvice, has_mask
from specdistill.methods.pard.config import PardRecipe
from specdistill.methods.pard.objective import ParallelDistillation
from specdistill.methods.sizes import RawConfig
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.losses.divergence import build_divergence


class Pard(ModelMethod[PardRecipe]):
    """A smaller language model that fills masks in one pass."""

    name = "pard"
    proposer = DraftModelProposer
    advice = PardAdvice()

    def find_mask(self, folder: Path, key: str) -> int:
        """Return the id of the mask token that a checkpoint's config.json names.

        Raises:
            UserError: naming `key`, if config.json names no mask token, or an id that is not below
                the vocabulary size.
        """
        config = read_config(folder, key)
        mask = config.get("pard_token")

        # JSON's `true` is an instance of `int` in Python, so the types are compared exactly.
        num_rows = config.get("vocab_size")
        if type(mask) is not int or type(num_rows) is not int or not 0 <= mask < num_rows:
            raise UserError(
                key,
                got=f"{folder} with pard_token {mask!r} and a vocabulary of {num_rows!r}",
                expected="a pard_token from 0 to the vocabulary size minus 1",
            )
        return mask

    def is_named(self, config: RawConfig, names: Set[str]) -> bool:
        """Return whether a folder holds a causal language model with a mask token in its config."""
        return has_mask(config) and super().is_named(config, names)

    def create(self, recipe: PardRecipe, target: FrozenTarget, rows: Dataset) -> PreTrainedModel:
        """Create the draft model of a recipe, and note its mask token in its config.

        The mask token stands for each token that is not drafted yet (see `choose_mask`).
        """
        draft = super().create(recipe, target, rows)

        # A draft that is trained further keeps its mask token, unless the recipe states another
        # one. vLLM reads the keys `pard_token` and `spd_type` from config.json.
        inherited = getattr(draft.config, "pard_token", None)
        settings = recipe.draft
        mask = choose_mask(settings.mask_token_id, settings.init, inherited, target, rows)
        draft.config.update({"pard_token": mask, "spd_type": "pard"})
        return draft

    def build_objective(
        self, draft: PreTrainedModel, recipe: PardRecipe, target: FrozenTarget
    ) -> ParallelDistillation:
        """Build the training objective of a recipe: the draft together with its loss."""
        return ParallelDistillation(
            draft,
            build_divergence(recipe.loss.divergence),
            num_positions=recipe.draft.parallel_tokens,
            retention=recipe.draft.retention,
            min_retention=recipe.draft.min_retention,
            seed=recipe.seed,
            **recipe.loss.model_dump(exclude={"divergence"}),
        )


METHOD = Pard()
