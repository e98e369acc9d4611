"""The table of methods, which are named as vLLM names them.

Each method is one row of the table. A row imports nothing heavy. The method's folder is imported
when it is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from specdistill.common.errors import UserError, find_nearest

if TYPE_CHECKING:
    from torch import nn

    from specdistill.methods.base import Method
    from specdistill.methods.recipe import Recipe, TrainedRecipe
    from specdistill.serving.engines.engine import Serving


@dataclass(frozen=True)
class MethodInfo:
    """One method, as a row of the table.

    Attributes:
        summary: one line that says what drafts.
        passes: passes of the draft in a round of K draft tokens. "K": one for each token. "1": one
            for all tokens. "0": none, because the method has no weights and is not trained.
        features: how many tensors, each as wide as the target's hidden state, training reads for
            each token.
        positions: how many drafted positions training computes for each token.
        standalone: whether a draft is a whole language model with its own tokenizer.
        in_target: whether engines load the draft from the target's checkpoint.
        package: the package with the method's code. It has the modules `config` (`RECIPE`, no
            torch), `method` (see specdistill.methods.base) and, if engines take the method's
            drafts, `serving` (no torch).
        family: the package with the code that the method shares with others. A method without a
            `config` of its own uses the family's.
    """

    summary: str
    passes: Literal["K", "1", "0"]
    features: int = 0
    positions: int = 0
    standalone: bool = False
    in_target: bool = False
    package: str = ""
    family: str = ""

    @property
    def is_trained(self) -> bool:
        """Whether the method has weights to train."""
        return self.passes != "0"

    def recipe(self) -> "type[Recipe]":
        """Return the pydantic class that describes and checks the recipes of this method."""
        # A method without recipe keys of its own has no `config` module; its family has one.
        has_own_config = find_spec(f"{self.package}.config") is not None
        package = self.package if has_own_config else self.family
        recipe_class: type[Recipe] = import_module(f"{package}.config").RECIPE
        return recipe_class

    def serving(self) -> "Mapping[str, Serving]":
        """Return which engines can serve this method's drafts, and how each of them loads a draft.

        Returns:
            A `Serving` for each engine, by the engine's name. Empty if no engine can.
        """
        # Only methods that an engine can serve have a `serving` module.
        if find_spec(f"{self.package}.serving") is None:
            return {}
        serving: Mapping[str, Serving] = import_module(f"{self.package}.serving").SERVING
        return serving

    def load(self) -> "Method[TrainedRecipe, nn.Module]":
        """Import the code of the method, and return its `Method` object.

        This also imports torch, which is slow, so it happens only when the method is used. All
        methods have the same return type here, so the type checker does not notice if a caller
        passes a recipe or a draft of another method.
        """
        method: Method[TrainedRecipe, nn.Module] = import_module(f"{self.package}.method").METHOD
        return method


# A draft belongs to the first method that recognizes it. So heads come before whole models.
# `features` and `positions` are those of the default recipe; `specdistill plan` estimates memory
# and time of training from them.
ROWS = {
    "eagle3": MethodInfo(
        "a head that reads three of the target's layers (arXiv 2503.01840)",
        passes="K",
        features=4,
        positions=5,
        family="chains",
    ),
    "eagle": MethodInfo(
        "a head that continues the target's last hidden states (arXiv 2401.15077)",
        passes="K",
        features=1,
        positions=1,
        family="chains",
    ),
    "mtp": MethodInfo(
        "a layer of the target's own kind that predicts further tokens from the target's last"
        " hidden state (arXiv 2412.19437)",
        passes="K",
        features=1,
        positions=3,
        in_target=True,
        family="chains",
    ),
    "early_exit": MethodInfo(
        "the target's first layers and an exit; verification runs only the other layers (arXiv"
        " 2309.08168)",
        passes="K",
        features=2,
        positions=1,
        family="chains",
    ),
    "dflash": MethodInfo(
        "a block of masks that reads the target's layers and is filled in one pass (arXiv"
        " 2602.06036)",
        passes="1",
        features=6,
        positions=2,
        family="blocks",
    ),
    "dspark": MethodInfo(
        "a block whose tokens are corrected by those before them (arXiv 2607.05147)",
        passes="1",
        features=6,
        positions=2,
        family="blocks",
    ),
    "pard": MethodInfo(
        "a smaller language model that fills masks in one pass (arXiv 2504.18583)",
        passes="1",
        positions=3,
        standalone=True,
        family="models",
    ),
    "draft_model": MethodInfo(
        "a smaller language model that drafts for the target (arXiv 2211.17192)",
        passes="K",
        positions=1,
        standalone=True,
        family="models",
    ),
    "ngram": MethodInfo(
        "proposes what followed the last tokens when they occurred before (arXiv 2304.04487)",
        passes="0",
        family="lookups",
    ),
    "suffix": MethodInfo(
        "proposes what most often followed the last tokens, in earlier outputs too (arXiv"
        " 2411.04975)",
        passes="0",
        family="lookups",
    ),
}
# The packages of a method and of its family are folders next to this file.
METHODS = {
    name: replace(row, package=f"{__name__}.{name}", family=f"{__name__}.{row.family}")
    for name, row in ROWS.items()
}


def get_method(name: str) -> MethodInfo:
    """Return the table row that describes a method, such as "eagle3".

    Raises:
        UserError: for a name that is not in the table.
    """
    if name not in METHODS:
        raise UserError(
            "method",
            got=name,
            expected=f"one of {', '.join(METHODS)}",
            nearest=find_nearest(name, METHODS),
        )
    return METHODS[name]
