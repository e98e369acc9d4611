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
    """Return the mask that a recipe asks for, else the inherited one, else a free token.

    Args:
        mask: `draft.mask_token_id`.
        init: `draft.init`.
        inherited: the mask of the draft of `draft.init`.
        target: the target.
        rows: training data.

    Raises:
        UserError: as `resolve_mask`.
    """
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
    """Check the mask that a recipe asks for before data are generated.

    Only what the target tells is checked, because the training data are not known yet.

    Raises:
        UserError: as `resolve_mask`.
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
    """Return the mask token after checking that it can serve as one.

    An ordinary token that the data hold is allowed, with a warning.

    Args:
        mask: the mask token; None chooses a free token.
        tokenizer: the target's tokenizer.
        end_ids: tokens that end a generation.
        vocab_size: V, of the target.
        counts: how often each token occurs in the training data; None if not known (see
            `find_free_token`).
        init: the value of `draft.init`, if the mask is that of a draft that is continued.

    Raises:
        UserError: for a mask outside the vocabulary, for one that ends a generation, and for a
            special token, such as those of the chat template, that the data hold while another
            token is free.
    """
    # Without a mask in the recipe, take a token that the texts do not hold.
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

    # A mask that occurs in the texts is refused only if another special token is free.
    if not counts or not counts[mask]:
        return mask
    reason = (
        f"which occurs {counts[mask]:,} times in the training data"
        f" ({counts[mask] / sum(counts):.2%} of the tokens)"
    )
    special_ids = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    if not counts[free_token] and mask in special_ids:
        raise make_error(got=f"{name}, {reason}")
    if is_first():
        logger.warning(
            f"{key}: {name}, {reason}. The draft cannot tell these tokens from tokens that it has"
            f" to fill in. {KEY}={free_token} occurs {counts[free_token]:,} times."
        )
    return mask


def find_free_token(
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Collection[int],
    vocab_size: int,
    counts: Sequence[int] | None = None,
) -> int:
    """Return the token that occurs least often in the data and has no other role.

    Tokens that begin, end or pad a text are left out, and so is the unknown token. Of tokens that
    occur equally often, the first of these kinds is chosen: the tokenizer's mask, a row of the
    embedding beyond the tokenizer, a special token, any other token. Of several tokens of the same
    kind, the one with the highest id is chosen.

    Args:
        tokenizer: the target's tokenizer.
        end_ids: tokens that end a generation.
        vocab_size: V, of the target.
        counts: how often each token occurs in the training data. None: this is not known yet, and
            the tokens that the chat template names are taken to occur.
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

    # The first criterion decides. Each of the others decides if those before it are equal.
    return min(
        candidates,
        key=lambda id: (counts[id], id != preferred, id < len(tokenizer), id not in special, -id),
    )
