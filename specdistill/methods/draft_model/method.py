"""Draft models as a method (arXiv 2211.17192): a smaller language model drafts."""

from transformers import PreTrainedModel

from specdistill.methods import sizes
from specdistill.methods.models.advice import ModelAdvice
from specdistill.methods.models.config import DraftModelRecipe
from specdistill.methods.models.method import ModelMethod
from specdistill.methods.models.objective import Distillation, OnPolicyGeneration
from specdistill.methods.models.proposer import DraftModelProposer
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.losses.divergence import build_divergence

PUBLISHED_FIGURES = sizes.MethodFigures(
    (1 - 1 / 2.01, 0.76),
    "AL 2.01 (68M for Vicuna-33B, not distilled, Spec-Bench; K not stated, so alpha is at least 1 -"
    " 1/AL) to alpha 0.76 (160M for Vicuna-7B, distilled on the domain it serves, OSD, ICML 2024)",
    532_000 * sizes.TOKENS_PER_SAMPLE,
    "assumed, as for eagle3: no figure is published for this shape",
)


class DraftModel(ModelMethod[DraftModelRecipe]):
    """A smaller language model that drafts token by token."""

    name = "draft_model"
    proposer = DraftModelProposer
    advice = ModelAdvice(PUBLISHED_FIGURES, "a smaller language model with a head of its own")

    def build_objective(
        self, draft: PreTrainedModel, recipe: DraftModelRecipe, target: FrozenTarget
    ) -> Distillation:
        """Build the objective that a recipe describes, on rows and on what the draft generates."""
        generation = OnPolicyGeneration(
            draft,
            **vars(recipe.on_policy),
            end_ids=tuple(target.eos_token_ids),
            seed=recipe.seed,
        )
        return Distillation(
            draft,
            build_divergence(recipe.loss.divergence),
            num_positions=recipe.eval.num_speculative_tokens,
            on_policy=generation,
            **recipe.loss.model_dump(exclude={"divergence"}),
        )


METHOD = DraftModel()
