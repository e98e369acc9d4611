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
        """Return the mask token that a checkpoint's config.json names.

        Raises:
            UserError: naming `key`, if there is none or if it is beyond the embedding.
        """
        config = read_config(folder, key)
        mask = config.get("pard_token")

        # `bool` is a subclass of `int`, so the types are compared exactly.
        num_rows = config.get("vocab_size")
        if type(mask) is not int or type(num_rows) is not int or not 0 <= mask < num_rows:
            raise UserError(
                key,
                got=f"{folder} with pard_token {mask!r} and a vocabulary of {num_rows!r}",
                expected="a row of its embedding",
            )
        return mask

    def is_named(self, config: RawConfig, names: Set[str]) -> bool:
        """Return whether a folder calls itself a causal language model that fills masks."""
        return has_mask(config) and super().is_named(config, names)

    def create(self, recipe: PardRecipe, target: FrozenTarget, rows: Dataset) -> PreTrainedModel:
        """Create the model that a recipe describes, and choose its mask (see `choose_mask`)."""
        draft = super().create(recipe, target, rows)

        # Keep the mask of a draft that is continued, unless the recipe states another one. vLLM
        # reads both keys from config.json.
        inherited = getattr(draft.config, "pard_token", None)
        settings = recipe.draft
        mask = choose_mask(settings.mask_token_id, settings.init, inherited, target, rows)
        draft.config.update({"pard_token": mask, "spd_type": "pard"})
        return draft

    def build_objective(
        self, draft: PreTrainedModel, recipe: PardRecipe, target: FrozenTarget
    ) -> ParallelDistillation:
        """Build the objective that a recipe describes."""
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
