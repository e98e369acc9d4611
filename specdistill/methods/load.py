"""A draft by the name of its method: made for training, or loaded from its folder for decoding."""

from pathlib import Path
from typing import Any

from datasets import Dataset

from specdistill.decoding.proposer import Proposer
from specdistill.errors import UserError, nearest
from specdistill.methods import METHODS
from specdistill.methods.contract import Draft, Implementation
from specdistill.methods.recipe import TrainedRecipe
from specdistill.methods.recognize import locate, method_of
from specdistill.targets.frozen import FrozenTarget


def create_draft(recipe: TrainedRecipe, target: FrozenTarget, rows: Dataset) -> Draft:
    """The draft that a recipe describes, before its first step: fresh, or continued from `draft.init`.

    rows: training data, by which methods choose a draft vocabulary or what a pruned width keeps. Raises UserError for settings that do
    not fit each other or the target.
    """
    create = implementation(recipe.method).create
    assert create is not None, recipe.method
    return create(recipe, target, rows)


def load_proposer(
    method: str, draft: Path | str | None, target: FrozenTarget, *, key: str = "eval.draft", **options: Any
) -> Proposer:
    """The proposer of a method; `options` are the method's own, as `Recipe.proposer_options` gives them.

    The draft is a folder or a Hub id, in any layout that is read; `key` is the key that it came from, which errors name.
    Raises UserError when the method is unknown or the draft does not fit the target; ResourceError when the Hub fails.
    """
    load = implementation(method).load_proposer
    if METHODS[method].artifact is None:
        return load(None, target, key=key, **options)
    if draft is None:
        raise UserError(key, got="nothing", expected="a draft folder")
    folder = locate(str(draft), key=key)
    if (found := method_of(folder, key=key)) != method:
        raise UserError(key, got=f"{draft}, which holds a draft of method {found}", expected=f"one of method {method}")
    return load(folder, target, key=key, **options)


def implementation(method: str) -> Implementation:
    """A method's functions. Raises UserError for a name that is not in the table."""
    if method not in METHODS:
        raise UserError("method", got=method, expected=f"one of {', '.join(METHODS)}", nearest=nearest(method, METHODS))
    return METHODS[method].implementation()
