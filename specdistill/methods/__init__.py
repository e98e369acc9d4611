"""The methods, named as vLLM names them: one row for each. A row imports nothing heavy; its folder is loaded when it is used."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from specdistill.errors import UserError, nearest

if TYPE_CHECKING:
    from specdistill.engines.engine import Serving
    from specdistill.methods.contract import Implementation
    from specdistill.methods.recipe import Recipe


@dataclass(frozen=True)
class MethodCost:
    """What a method costs whatever the target.

    Args:
        passes: of the draft per round of K draft tokens: "K" for one per token, "1" for one in all, "0" for none.
        features: tensors as wide as the target's hidden state that training reads for each token.
        positions: drafted positions that training computes for each token.
    """

    passes: Literal["K", "1", "0"]
    features: int = 0
    positions: int = 0


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Args:
        summary: what drafts, in a line.
        cost: of drafting and of training.
        package: where its code is: `config` (`RECIPE`, no torch), `method` (see specdistill.methods.contract), and `serving` (engines
            that take its drafts, no torch) where there are any.
        standalone: a draft is a whole language model, with its own tokenizer.
        in_target: engines load the draft from the target's checkpoint.
        is_trained: drafts have weights.
    """

    summary: str
    cost: MethodCost
    package: str
    standalone: bool = False
    in_target: bool = False
    is_trained: bool = True

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
METHODS = {
    "eagle3": Method(
        "a head that reads three of the target's layers (arXiv 2503.01840)",
        MethodCost("K", features=4, positions=5),
        "specdistill.methods.eagle3",
    ),
    "eagle": Method(
        "a head that continues the target's last hidden states (arXiv 2401.15077)",
        MethodCost("K", features=1, positions=1),
        "specdistill.methods.eagle",
    ),
    "mtp": Method(
        "a layer of the target's own kind that predicts on from its last hidden state (arXiv 2412.19437)",
        MethodCost("K", features=1, positions=3),
        "specdistill.methods.mtp",
        in_target=True,
    ),
    "early_exit": Method(
        "the target's first layers and an exit; verification runs the others alone (arXiv 2309.08168)",
        MethodCost("K", features=2, positions=1),
        "specdistill.methods.early_exit",
    ),
    "dflash": Method(
        "a block of masks that reads the target's layers and is filled in one pass (arXiv 2602.06036)",
        MethodCost("1", features=6, positions=2),
        "specdistill.methods.dflash",
    ),
    "dspark": Method(
        "a block whose tokens are corrected by those before them (arXiv 2607.05147)",
        MethodCost("1", features=6, positions=2),
        "specdistill.methods.dspark",
    ),
    "pard": Method(
        "a smaller language model that fills masks in one pass (arXiv 2504.18583)",
        MethodCost("1", positions=3),
        "specdistill.methods.pard",
        standalone=True,
    ),
    "draft_model": Method(
        "a smaller language model that drafts for the target (arXiv 2211.17192)",
        MethodCost("K", positions=1),
        "specdistill.methods.draft_model",
        standalone=True,
    ),
    "ngram": Method(
        "proposes what followed the last tokens when they occurred before (arXiv 2304.04487)",
        MethodCost("0"),
        "specdistill.methods.ngram",
        is_trained=False,
    ),
    "suffix": Method(
        "proposes what most often followed the last tokens, in earlier outputs too (arXiv 2411.04975)",
        MethodCost("0"),
        "specdistill.methods.suffix",
        is_trained=False,
    ),
}


def method_named(name: str) -> Method:
    """A row of the table. Raises UserError for a name that is not in it."""
    if name not in METHODS:
        raise UserError("method", got=name, expected=f"one of {', '.join(METHODS)}", nearest=nearest(name, METHODS))
    return METHODS[name]
