"""The token in the place of what is not drafted yet, of methods that fill masks."""

from specdistill.errors import UserError
from specdistill.targets.frozen import FrozenTarget


def mask_token(target: FrozenTarget, asked: int | None) -> int:
    """The id that is asked for; None: a token that no answer holds: the tokenizer's mask, a row of the embedding beyond the tokenizer, or a
    special token that neither begins, ends nor pads a text.

    Raises UserError for one that the target does not have, and where there is none.
    """
    tokenizer = target.tokenizer
    mask = tokenizer.mask_token_id if asked is None else asked
    if mask is not None:
        if not 0 <= mask < target.vocab_size:
            expected = f"a token of the target's vocabulary, 0..{target.vocab_size - 1}"
            raise UserError("draft.mask_token_id", got=mask, expected=expected)
        return int(mask)
    if target.vocab_size > len(tokenizer):
        return target.vocab_size - 1
    taken = {
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
        *target.eos_token_ids,
    }
    special = (
        id
        for id, token in tokenizer.added_tokens_decoder.items()
        if token.special and id not in taken
    )
    if (free := max(special, default=None)) is None:
        got = f"null with {target.name}, whose tokenizer has no token that is never generated"
        raise UserError("draft.mask_token_id", got=got, expected="a token that texts do not hold")
    return int(free)
