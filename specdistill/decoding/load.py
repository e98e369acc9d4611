"""From a method's name and a draft's folder to the proposer that decoding uses."""

from pathlib import Path

from specdistill.decoding.draft_model import DraftModelProposer
from specdistill.decoding.proposers import Eagle3Proposer, NgramProposer, Proposer
from specdistill.drafts.checkpoint import load_eagle3
from specdistill.drafts.small import load_small
from specdistill.drafts.vocabulary import match_vocabularies
from specdistill.errors import UserError, nearest
from specdistill.methods import METHODS
from specdistill.targets.frozen import FrozenTarget


def load_proposer(
    method: str,
    draft: Path | str | None,
    target: FrozenTarget,
    *,
    key: str = "eval.draft",
    confidence_threshold: float | None = None,
    draft_context: str = "refuse",
    heterogeneous_vocab: bool = False,
) -> Proposer:
    """The proposer of a method; the last three options are those of `draft_model` (see `DraftModelProposer`).

    `key` is the key that the draft came from, which errors name. Raises UserError when the method is unknown, the draft does not fit
    the target, or an option does not apply to the method.
    """
    if method not in METHODS:
        raise UserError("method", got=method, expected=f"one of {', '.join(METHODS)}", nearest=nearest(method, METHODS))
    if method != "draft_model":
        _refuse_options(method, confidence_threshold, draft_context, heterogeneous_vocab)
    if method == "ngram":
        return NgramProposer()
    if draft is None:
        raise UserError(key, got="nothing", expected="a draft folder")
    if method == "eagle3":
        return Eagle3Proposer(load_eagle3(draft, target, key=key).to(device=target.device, dtype=target.model.dtype))
    model, tokenizer = load_small(draft, key=key, device=target.device, dtype=target.dtype)
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


def _refuse_options(method: str, confidence_threshold: float | None, draft_context: str, heterogeneous_vocab: bool) -> None:
    """A setting that cannot apply is an error."""
    for key, value, default in (
        ("eval.confidence_threshold", confidence_threshold, None),
        ("eval.draft_context", draft_context, "refuse"),
        ("draft.heterogeneous_vocab", heterogeneous_vocab, False),
    ):
        if value != default:
            raise UserError(key, got=f"{value} with method {method}", expected="its default; it is for method draft_model")
