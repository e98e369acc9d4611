"""From a method's name and a draft's folder to the proposer that decoding uses."""

from pathlib import Path

from specdistill.decoding.draft_model import DraftModelProposer
from specdistill.decoding.ngram import NgramProposer
from specdistill.decoding.proposers import HeadProposer, Proposer
from specdistill.drafts.heads import HEADS
from specdistill.drafts.recognise import locate, method_of
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
    ngram_min: int = 1,
    ngram_max: int = 3,
    ngram_lookup: str = "text",
) -> Proposer:
    """The proposer of a method; the other options are those of `draft_model` (see `DraftModelProposer`) and `ngram` (`NgramProposer`).

    The draft is a folder or a Hub id, in any layout that `specdistill.drafts` reads; `key` is the key that it came from, which errors name.
    Raises UserError when the method is unknown, the draft does not fit the target, or an option does not apply to the method;
    ResourceError when the Hub fails.
    """
    if method not in METHODS:
        raise UserError("method", got=method, expected=f"one of {', '.join(METHODS)}", nearest=nearest(method, METHODS))
    for only, option, value, default in (
        ("draft_model", "eval.confidence_threshold", confidence_threshold, None),
        ("draft_model", "eval.draft_context", draft_context, "refuse"),
        ("draft_model", "draft.heterogeneous_vocab", heterogeneous_vocab, False),
        ("ngram", "eval.ngram.min", ngram_min, 1),
        ("ngram", "eval.ngram.max", ngram_max, 3),
        ("ngram", "eval.ngram.lookup", ngram_lookup, "text"),
    ):
        if method != only and value != default:
            raise UserError(option, got=f"{value} with method {method}", expected=f"its default; it is for method {only}")
    if method == "ngram":
        return NgramProposer(ngram_min, ngram_max, ngram_lookup)
    if draft is None:
        raise UserError(key, got="nothing", expected="a draft folder")
    folder = locate(str(draft), key=key)
    if (found := method_of(folder, key=key)) != method:
        raise UserError(key, got=f"{draft}, which holds a draft of method {found}", expected=f"one of method {method}")
    if method in HEADS:
        return HeadProposer(HEADS[method].load(folder, target, key=key).to(device=target.device, dtype=target.model.dtype))
    model, tokenizer = load_small(folder, key=key, device=target.device, dtype=target.dtype)
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
