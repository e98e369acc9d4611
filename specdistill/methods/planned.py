"""What a method tells `specdistill plan` before anything is trained: the size of a draft, and what is known of its kind.

Acceptance and training data are as others published them: greedy decoding, targets of 2 to 70 billion parameters; this project measured
none of it. A chain's acceptance length AL at K is turned into alpha, the rate that gives it when it is the same at every position
(arXiv 2211.17192).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specdistill.errors import UserError
from specdistill.methods.sizes import Parts, Shape

TOKENS_PER_SAMPLE = 950  # DeepSpec's cache: about 38 TB of 30 KB a token for 1.3M conversations
DRAFT_VOCABULARY = 32_000


@dataclass(frozen=True)
class Published:
    """alphas: the lower and the higher acceptance rate. training_tokens: distinct tokens that such drafts are trained on."""

    alphas: tuple[float, float] | None
    acceptance_source: str
    training_tokens: int | None
    training_source: str


@dataclass(frozen=True)
class PlannedTarget:
    """A target by its config: `text` its language model's, `model` without weights, native_mtp its key and number of such layers."""

    name: str
    text: Any
    model: Any
    parameters: int
    native_mtp: tuple[str, int] | None

    def decoder(self) -> Any:
        """The layers that a head reads. Raises UserError for a target that has none."""
        decoder = self.model.get_decoder()
        if not (hasattr(decoder, "layers") and hasattr(decoder, "norm")):
            expected = "a decoder with layers and norm, as Llama's, for a head to read"
            raise UserError("target.model", got=f"a {self.text.model_type} target", expected=expected)
        return decoder


@dataclass(frozen=True)
class GivenDraft:
    """A draft that exists, by its config: `raw` as the file has it, `text` as transformers reads it; `model()` without weights."""

    raw: dict[str, Any]
    text: Any
    model: Callable[[], Any]


@dataclass(frozen=True)
class PlannedDraft:
    """One method's draft for a target.

    Args:
        shape: of its layers; None where it has none.
        vocabulary: tokens that its logits span.
        note: what it is, in words.
        recipe_keys: what a recipe made for another target needs changed for this one.
    """

    parts: Parts
    shape: Shape | None
    vocabulary: int
    note: str
    published: Published
    recipe_keys: tuple[str, ...] = ()
