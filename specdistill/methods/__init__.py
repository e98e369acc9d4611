"""The methods, named as vLLM names them: one row for each. A row imports nothing heavy; its folder is loaded when it is used."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from specdistill.errors import UserError, nearest

if TYPE_CHECKING:
    from specdistill.engines.engine import Serving
    from specdistill.methods.contract import Implementation
    from specdistill.methods.recipe import Recipe


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Args:
        summary: what drafts, in a line.
        passes: of the draft per round of K draft tokens: "K" for one per token, "1" for one in all, "0" for none, of what is not trained.
        features: tensors as wide as the target's hidden state that training reads for each token.
        positions: drafted positions that training computes for each token.
        standalone: a draft is a whole language model, with its own tokenizer.
        in_target: engines load the draft from the target's checkpoint.
        package: where its code is: `config` (`RECIPE`, no torch), `method` (see specdistill.methods.contract), and `serving` (engines
            that take its drafts, no torch) where there are any.
    """

    summary: str
    passes: Literal["K", "1", "0"]
    features: int = 0
    positions: int = 0
    standalone: bool = False
    in_target: bool = False
    package: str = ""

    @property
    def is_trained(self) -> bool:
        return self.passes != "0"

    def recipe(self) -> "type[Recipe]":
        """The schema of its recipes."""
        return import_module(f"{self.package}.config").RECIPE

    def serving(self) -> "Mapping[str, Serving]":
        """Engine -> how it is given this method's drafts."""
        if find_spec(f"{self.package}.serving") is None:
            return {}
        return import_module(f"{self.package}.serving").SERVING

    def implementation(self) -> "Implementation":
        """Its functions. Imports torch."""
        return import_module(f"{self.package}.method").METHOD


# A draft is recognized by the first that claims it, so heads stand before whole models.
ROWS = {
    "eagle3": Method(
        "a head that reads three of the target's layers (arXiv 2503.01840)",
        passes="K",
        features=4,
        positions=5,
    ),
    "eagle": Method(
        "a head that continues the target's last hidden states (arXiv 2401.15077)",
        passes="K",
        features=1,
        positions=1,
    ),
    "mtp": Method(
        "a layer of the target's own kind that predicts on from its last hidden state (arXiv 2412.19437)",
        passes="K",
        features=1,
        positions=3,
        in_target=True,
    ),
    "early_exit": Method(
        "the target's first layers and an exit; verification runs the others alone (arXiv 2309.08168)",
        passes="K",
        features=2,
        positions=1,
    ),
    "dflash": Method(
        "a block of masks that reads the target's layers and is filled in one pass (arXiv 2602.06036)",
        passes="1",
        features=6,
        positions=2,
    ),
    "dspark": Method(
        "a block whose tokens are corrected by those before them (arXiv 2607.05147)",
        passes="1",
        features=6,
        positions=2,
    ),
    "pard": Method(
        "a smaller language model that fills masks in one pass (arXiv 2504.18583)",
        passes="1",
        positions=3,
        standalone=True,
    ),
    "draft_model": Method(
        "a smaller language model that drafts for the target (arXiv 2211.17192)",
        passes="K",
        positions=1,
        standalone=True,
    ),
    "ngram": Method(
        "proposes what followed the last tokens when they occurred before (arXiv 2304.04487)",
        passes="0",
    ),
    "suffix": Method(
        "proposes what most often followed the last tokens, in earlier outputs too (arXiv 2411.04975)",
        passes="0",
    ),
}
METHODS = {name: replace(row, package=f"{__name__}.{name}") for name, row in ROWS.items()}


def method_named(name: str) -> Method:
    """A row of the table. Raises UserError for a name that is not in it."""
    if name not in METHODS:
        raise UserError(
            "method",
            got=name,
            expected=f"one of {', '.join(METHODS)}",
            nearest=nearest(name, METHODS),
        )
    return METHODS[name]
