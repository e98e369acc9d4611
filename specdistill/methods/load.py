"""From a method's name and a draft's folder to the proposer that decoding uses."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdistill.decoding.proposer import Proposer
from specdistill.errors import UserError, nearest
from specdistill.methods import METHODS
from specdistill.methods.draft_model.create import load_draft_model
from specdistill.methods.draft_model.proposer import DraftModelProposer
from specdistill.methods.draft_model.vocabulary import match_vocabularies
from specdistill.methods.heads.proposer import HeadProposer
from specdistill.methods.heads.table import HEADS
from specdistill.methods.ngram.proposer import NgramProposer
from specdistill.methods.recognize import locate, method_of
from specdistill.targets.frozen import FrozenTarget

# Options of `load_proposer` that one method reads: the method, the key that sets it, and its default.
OPTIONS: dict[str, tuple[str, str, Any]] = {
    "confidence_threshold": ("draft_model", "eval.confidence_threshold", None),
    "draft_context": ("draft_model", "eval.draft_context", "refuse"),
    "heterogeneous_vocab": ("draft_model", "draft.heterogeneous_vocab", False),
    "ngram_min": ("ngram", "eval.ngram.min", 1),
    "ngram_max": ("ngram", "eval.ngram.max", 3),
    "ngram_lookup": ("ngram", "eval.ngram.lookup", "text"),
}


def proposer_options(section: Any) -> dict[str, Any]:
    """Options of `load_proposer` from a recipe's eval section, or from another command's options of the same names."""
    return {
        "confidence_threshold": section.confidence_threshold,
        "draft_context": section.draft_context,
        "ngram_min": section.ngram.min,
        "ngram_max": section.ngram.max,
        "ngram_lookup": section.ngram.lookup,
    }


def options_of(method: str, options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that a method reads."""
    return {name: value for name, value in options.items() if OPTIONS[name][0] == method}


def check_options(methods: Sequence[str], options: dict[str, Any]) -> None:
    """Raises UserError for an option that was set and that none of the methods reads."""
    for name, value in options.items():
        only, key, default = OPTIONS[name]
        if only not in methods and value != default:
            got = f"{value} with method {' and '.join(dict.fromkeys(methods))}"
            raise UserError(key, got=got, expected=f"its default; it is for method {only}")


def load_proposer(
    method: str,
    draft: Path | str | None,
    target: FrozenTarget,
    *,
    key: str = "eval.draft",
    confidence_threshold: float | None = None,
    draft_context: str = "refuse",
    heterogeneous_vocab: bool = False,
    ngram_min: int = 1,
    ngram_max: int = 3,
    ngram_lookup: str = "text",
) -> Proposer:
    """The proposer of a method; the other options are those of `draft_model` (see `DraftModelProposer`) and `ngram` (`NgramProposer`).

    The draft is a folder or a Hub id, in any layout that is read; `key` is the key that it came from, which errors name.
    Raises UserError when the method is unknown, the draft does not fit the target, or an option does not apply to the method;
    ResourceError when the Hub fails.
    """
    if method not in METHODS:
        raise UserError("method", got=method, expected=f"one of {', '.join(METHODS)}", nearest=nearest(method, METHODS))
    check_options(
        [method],
        {
            "confidence_threshold": confidence_threshold,
            "draft_context": draft_context,
            "heterogeneous_vocab": heterogeneous_vocab,
            "ngram_min": ngram_min,
            "ngram_max": ngram_max,
            "ngram_lookup": ngram_lookup,
        },
    )
    if method == "ngram":
        return NgramProposer(ngram_min, ngram_max, ngram_lookup)
    if draft is None:
        raise UserError(key, got="nothing", expected="a draft folder")
    folder = locate(str(draft), key=key)
    if (found := method_of(folder, key=key)) != method:
        raise UserError(key, got=f"{draft}, which holds a draft of method {found}", expected=f"one of method {method}")
    if method in HEADS:
        return HeadProposer(HEADS[method].load(folder, target, key=key).to(device=target.device, dtype=target.model.dtype))
    model, tokenizer = load_draft_model(folder, key=key, device=target.device, dtype=target.dtype)
    vocabulary = match_vocabularies(
        target.tokenizer,
        target.lm_head.weight.shape[0],
        tokenizer,
        model.get_output_embeddings().weight.shape[0],
        heterogeneous=heterogeneous_vocab,
        key=key,
    )
    return DraftModelProposer(
        model,
        vocabulary=vocabulary,
        confidence_threshold=confidence_threshold,
        context=draft_context,
        target_max_length=target.max_length,
    )
