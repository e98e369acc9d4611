"""The methods, named as vLLM names them: one row for each. A row imports nothing heavy; its folder is loaded when it is used."""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdistill.methods.contract import Implementation
    from specdistill.methods.recipe import Recipe


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Args:
        summary: what drafts, in a line.
        artifact: what training leaves: a head, a model, a layer of the target's checkpoint; None where there is nothing to train.
        script: the script that trains it, from the project's root; None where there is nothing to train.
        layouts: engines that its drafts are exported to.
        package: where its code is: `config` (its recipe, no torch) and `method` (see specdistill.methods.contract).
    """

    summary: str
    artifact: str | None
    script: str | None
    layouts: tuple[str, ...]
    package: str

    def recipe(self) -> "type[Recipe]":
        """The schema of its recipes."""
        schema: type[Recipe] = import_module(f"{self.package}.config").Recipe
        return schema

    def implementation(self) -> "Implementation":
        """Its functions. Imports torch."""
        implementation: Implementation = import_module(f"{self.package}.method").METHOD
        return implementation


# A draft is recognized by the first that claims it, so heads stand before whole models.
METHODS = {
    "eagle3": Method(
        "a head that reads three of the target's layers (arXiv 2503.01840)",
        "head",
        "train/eagle.py",
        ("vllm", "sglang", "speculators", "safeailab", "gguf"),
        "specdistill.methods.eagle3",
    ),
    "eagle": Method(
        "a head that continues the target's last hidden states (arXiv 2401.15077)",
        "head",
        "train/eagle.py",
        ("vllm", "sglang", "safeailab"),
        "specdistill.methods.eagle",
    ),
    "mtp": Method(
        "a layer of the target's own kind that predicts on from its last hidden state (arXiv 2412.19437)",
        "layer of the target's checkpoint",
        "train/mtp.py",
        ("vllm", "sglang"),
        "specdistill.methods.mtp",
    ),
    "draft_model": Method(
        "a smaller language model that drafts for the target (arXiv 2211.17192)",
        "model",
        "train/draft.py",
        ("vllm", "sglang", "gguf"),
        "specdistill.methods.draft_model",
    ),
    "ngram": Method(
        "proposes what followed the last tokens when they occurred before (arXiv 2304.04487)",
        None,
        None,
        (),
        "specdistill.methods.ngram",
    ),
}
