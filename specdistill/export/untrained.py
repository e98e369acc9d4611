"""The draft of a recipe as it is before its first step, so that its checkpoint can be tried in an engine before anything is trained."""

from pathlib import Path

from datasets import Dataset

from specdistill.errors import UserError
from specdistill.methods.load import create_draft, implementation
from specdistill.methods.recipe import Recipe, TrainedRecipe
from specdistill.targets.frozen import FrozenTarget


def write_untrained(recipe: Recipe, folder: Path) -> None:
    """Create the draft as its training script would, without data, and save it.

    What data would choose is arbitrary here: a pruned vocabulary holds the first tokens, a pruned width is measured on them.
    Raises UserError where training would.
    """
    if not isinstance(recipe, TrainedRecipe):
        raise UserError("method", got=f"{recipe.method}, which needs no training", expected="a method with a draft to write")
    target = FrozenTarget.load(**vars(recipe.target))
    tokens = list(range(min(target.vocab_size, target.max_length)))
    rows = Dataset.from_dict({"input_ids": [tokens], "loss_mask": [[0] * len(tokens)]})
    save = implementation(recipe.method).save
    assert save is not None, recipe.method
    save(create_draft(recipe, target, rows), target, folder)
