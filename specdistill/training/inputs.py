"""What the inputs of a run leave open, for a warning before it begins."""

from collections.abc import Iterator
from typing import Any

from specdistill.recipe import data_sources
from specdistill.recipe.sections import FROM_HUB


def left_open(recipe: Any) -> Iterator[str]:
    """A target on the Hub without a revision, and what `data_sources.left_open` finds; of a recipe without these sections nothing."""
    target, data = (getattr(recipe, name, None) for name in ("target", "data"))
    if target is not None and FROM_HUB.holds(target) and target.revision is None:
        yield f"target.revision: {target.model} is not pinned, and its weights are those of today: target.revision=COMMIT keeps them"
    if data is not None:
        yield from data_sources.left_open(data.source)
