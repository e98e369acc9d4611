"""The common part of the methods whose heads draft chains: how they learn and decode."""

from typing import ClassVar, TypeVar

from specdistill.methods.base import FeatureMethod
from specdistill.methods.chains.advice import HeadT
from specdistill.methods.chains.config import HeadRecipe
from specdistill.methods.chains.objective import TrainingTimeTest
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.losses.divergence import build_divergence

HeadRecipeT = TypeVar("HeadRecipeT", bound=HeadRecipe)


class ChainMethod(FeatureMethod[HeadRecipeT, HeadT]):
    """A method whose draft is a `Head`.

    Attributes:
        objective: the class of the objective.
        proposer: the class of the proposer.
    """

    objective: ClassVar[type[TrainingTimeTest]]
    proposer: ClassVar[type[HeadProposer]]

    def build_objective(
        self, draft: HeadT, recipe: HeadRecipeT, target: FrozenTarget
    ) -> TrainingTimeTest:
        """Build the module that computes the loss of a head, with the settings of a recipe.

        It unrolls the head over `ttt_steps` draft steps. With the recipe's `feature_weight` (EAGLE)
        the head also learns to predict the target's features.
        """
        # All other keys of `loss:` are arguments of the objective.
        return self.objective(
            draft,
            build_divergence(recipe.loss.divergence),
            recipe.draft.ttt_steps,
            **recipe.loss.model_dump(exclude={"divergence"}),
        )

    def build_proposer(self, draft: HeadT, target: FrozenTarget) -> HeadProposer:
        """Build the proposer of a head that is loaded."""
        return self.proposer(draft)
