"""Choose and check the mask token of methods that fill in masks.

The mask token stands for each token that is not drafted yet. It is a token that texts do not hold.
If a text holds it all the same, the draft cannot tell a token that it has to fill in from one that
is known.
"""

from collections.abc import Collection, Sequence
from functools import partial

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from specdistill.common.errors import UserError, logger
from specdistill.common.processes import is_first
from specdistill.data.rows.packing import count_tokens
from specdistill.methods.recipe import TrainedRecipe
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget

KEY = "draft.mask_token_id"


def choose_mask(
    mask: int | None, init: str | None, inherited: int | None, target: FrozenTarget, rows: Dataset
) -> int:
    """Choose the mask token of a draft, which stands for each token that is not drafted yet.

    This is the token that the recipe names, else that of the draft whose training is continued,
    else a token that does not occur in the data.

    Args:
        mask: the recipe's `draft.mask_token_id`, if it is given.
        init: the recipe's `draft.init`: the draft whose training is continued, if any.
        inherited: the mask token of the draft that `init` names.
        target: the target.
        rows: the training data.

    Raises:
        UserError: if the token cannot be a mask (see `resolve_mask`).
    """
    # Count all tokens of the data, because the draft also reads those that carry no loss.
    is_inherited = mask is None and inherited is not None
    counts = count_tokens(rows, target.vocab_size, with_loss=False).tolist()
    return resolve_mask(
        inherited if is_inherited else mask,
        target.tokenizer,
        target.eos_token_ids,
        target.vocab_size,
        counts,
        init=init if is_inherited else None,
    )


def check_recipe_mask(
    recipe: TrainedRecipe,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Collection[int],
    target: FrozenTarget | TargetFiles,
) -> None:
    """Check the mask token that a recipe names, before training data are generated.

    Only the target's vocabulary and tokenizer are considered. Whether the mask token occurs in the
    data is checked later, by `choose_mask`.

    Args:
        recipe: the recipe. If it names no mask token, nothing is checked.
        tokenizer: the target's tokenizer.
        end_ids: the tokens that end a generation.
        target: the target.

    Raises:
        UserError: if the token cannot be a mask (see `resolve_mask`).
    """
    mask = getattr(recipe.draft, "mask_token_id", None)
    if mask is not None:
        resolve_mask(mask, tokenizer, end_ids, target.vocab_size)


def resolve_mask(
    mask: int | None,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Collection[int],
    vocab_size: int,
    counts: Sequence[int] | None = None,
    *,
    init: str | None = None,
) -> int:
    """Check that a token can be the mask token, and return it; without a token, choose a free one.

    The mask token stands for tokens that are not drafted yet, so it should not occur in the data.
    If an ordinary token is named that does occur, a warning is logged.

    Args:
        mask: the token; None chooses a token that does not occur in the data.
        tokenizer: the target's tokenizer.
        end_ids: the tokens that end a generation.
        vocab_size: the size of the target's vocabulary.
        counts: how often each token occurs in the training data; None if this is not known yet.
        init: the value of `draft.init`, if the token is the mask token of that draft.

    Raises:
        UserError: if the token is not in the vocabulary, if it ends a generation, or if it is a
            special or added token that occurs in the data, and a token that does not occur there
            could be used instead.
    """
    # Find a free token, as the choice or as a suggestion in errors.
    free_token = find_free_token(tokenizer, end_ids, vocab_size, counts)
    mask = free_token if mask is None else mask

    # Errors name the mask by its text, and where it comes from. An inherited mask comes from a file
    # and may be anything.
    is_token = type(mask) is int and 0 <= mask < vocab_size
    spelling = (
        f" ({tokenizer.convert_ids_to_tokens(mask)!r})"
        if is_token and mask < len(tokenizer)
        else ""
    )
    name = f"the mask {mask}{spelling} of {init}" if init else f"{mask}{spelling}"
    key = "draft.init" if init else KEY
    make_error = partial(
        UserError, key, expected=f"a token that texts do not hold, such as {KEY}={free_token}"
    )
    if not is_token:
        raise make_error(
            got=f"{name}, which is not in the target's vocabulary, 0..{vocab_size - 1}"
        )
    if mask == tokenizer.eos_token_id or mask in end_ids:
        raise make_error(got=f"{name}, which ends a generation")

    # A mask that occurs in the data is refused only if it is a special or added token, and a token
    # that does not occur in the data could be used instead.
    if not counts or not counts[mask]:
        return mask
    occurrence = (
        f"occurs {counts[mask]:,} times in the training data"
        f" ({counts[mask] / sum(counts):.2%} of the tokens)"
    )
    special_ids = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    if not counts[free_token] and mask in special_ids:
        raise make_error(got=f"{name}, which {occurrence}")
    if is_first():
        logger.warning(
            f"{key}: {name} {occurrence}. In these places the draft takes the token for a mask,"
            f" which it has to fill in. {KEY}={free_token} sets the most suitable token, which"
            f" occurs {counts[free_token]:,} times."
        )
    return mask


def find_free_token(
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Collection[int],
    vocab_size: int,
    counts: Sequence[int] | None = None,
) -> int:
    """Return the token that is best suited as a mask: the one that occurs least in the data.

    Tokens that begin, end or pad a text are left out, and so is the unknown token. Of tokens that
    occur equally often, the tokenizer's own mask token is preferred, then ids beyond the tokenizer
    (padding of the embedding), then special tokens, then the highest id.

    Args:
        tokenizer: the target's tokenizer.
        end_ids: the tokens that end a generation.
        vocab_size: the size of the target's vocabulary.
        counts: how often each token occurs in the training data. None if this is not known yet;
            then the tokens in the chat template count as used.
    """
    # These tokens already mean something to the target, so they cannot mean "not drafted yet".
    roles = {
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
        *end_ids,
    }
    added = tokenizer.added_tokens_decoder
    special = {id for id, token in added.items() if token.special}
    preferred = tokenizer.mask_token_id

    # Before the training data are known, a token of the chat template counts as used once, and any
    # other token as unused.
    if counts is None:
        in_template = {
            id for id, token in added.items() if token.content in str(tokenizer.chat_template)
        }
        counts = [int(id in in_template) for id in range(vocab_size)]
    candidates = (id for id in range(vocab_size) if id not in roles)

    # `min` compares the tuples element by element. False comes before True, so each condition is
    # false for the preferred token.
    return min(
        candidates,
        key=lambda id: (counts[id], id != preferred, id < len(tokenizer), id not in special, -id),
    )
