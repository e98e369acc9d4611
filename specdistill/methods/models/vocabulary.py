"""Compare the vocabularies of a draft and its target, and translate between them if they differ.

Two tokenizers are compared token by token, special tokens and their ids included. By default a
difference is an error. With `eval.heterogeneous_vocab=true` the draft proposes only tokens that
both vocabularies spell alike: token-level intersection (TLI, arXiv 2502.05202). Embedding matrices
may be larger than the tokenizer. Rows that belong to no token are ignored.

Some tokens mean the same and are spelled differently, such as those that end a turn in two chat
templates. `eval.token_replacements` says which text of the draft stands for a token of the target.
The draft reads this text wherever the target's token stands. If the text is one token, the draft
proposes the target's token where it would write its own. One token of the draft stands for one
token of the target: other target tokens with that text are read as this token, but not proposed.

Shapes: W tokens in both vocabularies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdistill.common.errors import UserError, name_sibling_key

# How many differences an error names. More of them would make the message longer, not clearer.
MAX_NAMED_DIFFERENCES = 3


@dataclass(frozen=True)
class SharedVocabulary:
    """The tokens that both vocabularies hold.

    Attributes:
        target_ids_W: [W], the target's ids of these tokens, ascending.
        draft_ids_W: [W], the draft's ids of the same tokens, in the same order.
        target_vocab_size: V, the width of the target's logits.
        target_tokenizer: the target's tokenizer.
        draft_tokenizer: the draft's tokenizer.
        read_as: target tokens that the draft reads but never proposes. Each has a list of the draft
            tokens that are read in its place: none, several, or one that already proposes another
            target token.
        replacements: the target's text of a token, with the draft's text for it.
    """

    target_ids_W: Tensor
    draft_ids_W: Tensor
    target_vocab_size: int
    target_tokenizer: PreTrainedTokenizerBase
    draft_tokenizer: PreTrainedTokenizerBase
    read_as: Mapping[int, list[int]] = field(default_factory=dict)
    replacements: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def draft_ids_of(self) -> dict[int, list[int]]:
        """The draft's token ids for each target token id.

        A token that the draft can propose has one id. A token that it only reads has the ids that
        are read in its place (`read_as`): one, several, or an empty list if the draft skips the
        token. Target tokens that are absent here are translated by their text instead (see
        `encode_for_draft`).
        """
        pairs = zip(self.target_ids_W.tolist(), self.draft_ids_W.tolist(), strict=True)
        return {token: [draft_id] for token, draft_id in pairs} | dict(self.read_as)

    def encode_for_draft(self, target_ids: Sequence[int]) -> list[int]:
        """Return the draft's tokens for the text of target tokens that the draft lacks.

        Args:
            target_ids: target tokens that follow one another. They are decoded together, because a
                single token may hold half a character.

        Returns:
            The draft's token ids of the same text; none if the tokens have no text.
        """
        # Ids beyond the tokenizer are padding rows of the embedding, which have no text.
        known_ids = [token for token in target_ids if token < len(self.target_tokenizer)]
        token_ids: list[int] = self.draft_tokenizer(
            self.target_tokenizer.decode(known_ids, skip_special_tokens=False),
            add_special_tokens=False,
        ).input_ids
        return token_ids


def match_vocabularies(
    target_tokenizer: PreTrainedTokenizerBase,
    target_vocab_size: int,
    draft_tokenizer: PreTrainedTokenizerBase,
    draft_vocab_size: int,
    *,
    heterogeneous_vocab: bool | None = None,
    token_replacements: Mapping[str, str] = MappingProxyType({}),
    key: str = "eval.draft",
) -> SharedVocabulary | None:
    """Match the tokens of a draft and its target, and return the tokens that both have.

    Args:
        target_tokenizer: the target's tokenizer.
        target_vocab_size: the width of the target's logits.
        draft_tokenizer: the draft's tokenizer.
        draft_vocab_size: the width of the draft's logits.
        heterogeneous_vocab: whether the tokenizers may differ. With False, the error suggests to
            set the recipe key of this name to true. None also means that they may not differ, but
            is for commands without such a key, so the error does not suggest it.
        token_replacements: maps the text of a target token to the text that the draft reads in its
            place. A text of exactly one draft token also works the other way: where the draft
            predicts this token, the target token is proposed.
        key: the recipe key of the draft, to name in errors.

    Returns:
        The shared tokens. None if no translation is needed, because tokenizers and widths are the
        same.

    Raises:
        UserError: if the tokenizers differ and `heterogeneous_vocab` is not true; if they share no
            token; or for a replacement that cannot be applied. Its first text must be one token of
            the target, the draft must have logits for all tokens of its second text, and the
            tokenizers must differ.
    """
    # Equal tokenizers need no translation, if the vocabularies are padded alike.
    difference = describe_difference(target_tokenizer, draft_tokenizer)
    replacements_key = name_sibling_key(key, "token_replacements")
    if difference is None:
        if token_replacements:
            raise UserError(
                replacements_key,
                got="replacements for a draft with the target's tokenizer",
                expected="{}, because the draft reads the target's tokens as they are",
            )
        if target_vocab_size == draft_vocab_size:
            return None
    elif not heterogeneous_vocab:
        # A command without the key `heterogeneous_vocab` has no alternative.
        switch_key = name_sibling_key(key, "heterogeneous_vocab")
        alternative = f", or {switch_key}=true to draft over the tokens of both"
        suffix = "" if heterogeneous_vocab is None else alternative
        raise UserError(key, got=difference, expected=f"the target's tokenizer{suffix}")

    # Pair the tokens that both spell alike, and that have logits on both sides.
    target_ids = target_tokenizer.get_vocab()
    draft_ids = draft_tokenizer.get_vocab()
    pairs = {
        token_id: draft_ids[token]
        for token, token_id in target_ids.items()
        if token_id < target_vocab_size
        and draft_ids.get(token, draft_vocab_size) < draft_vocab_size
    }

    # Apply the replacements, which take precedence over tokens that are spelled alike.
    read_as: dict[int, list[int]] = {}
    for text, draft_text in token_replacements.items():
        token_id = _find_target_token(target_tokenizer, text, target_vocab_size, replacements_key)
        draft_token_ids = _encode_replacement(
            draft_tokenizer, draft_text, draft_vocab_size, text, replacements_key
        )
        _replace_token(pairs, read_as, token_id, draft_token_ids)

    # Without a common token, the draft cannot propose anything.
    if not pairs:
        raise UserError(
            key,
            got=(
                f"a draft of {len(draft_ids)} tokens, none of which is among the target's"
                f" {len(target_ids)}"
            ),
            expected="a draft that shares tokens with the target",
        )

    # Sort by the target's ids, so that the order does not depend on a tokenizer's dictionary.
    target_ids_W, draft_ids_W = torch.tensor(sorted(pairs.items())).unbind(1)
    return SharedVocabulary(
        target_ids_W,
        draft_ids_W,
        target_vocab_size,
        target_tokenizer,
        draft_tokenizer,
        read_as,
        token_replacements,
    )


def _find_target_token(
    target_tokenizer: PreTrainedTokenizerBase, text: str, target_vocab_size: int, key: str
) -> int:
    """Return the id of the target token that a text spells.

    Raises:
        UserError: naming `key`, if the text is not exactly one token that has a logit.
    """
    # A text without tokens gets an id that has no logit, so that it is refused below.
    token_id, *further_ids = encode(target_tokenizer, text) or [target_vocab_size]

    # The tokenizer encodes a text that it does not know as the unknown token, which decodes to
    # another text.
    is_unknown = (
        text not in target_tokenizer.get_vocab() and target_tokenizer.decode([token_id]) != text
    )
    if further_ids or is_unknown or token_id >= target_vocab_size:
        raise UserError(
            key,
            got=text,
            expected="a text that is exactly one token of the target's tokenizer",
        )
    return token_id


def _encode_replacement(
    draft_tokenizer: PreTrainedTokenizerBase,
    draft_text: str,
    draft_vocab_size: int,
    target_text: str,
    key: str,
) -> list[int]:
    """Return the draft's token ids of the text that replaces a target token.

    Raises:
        UserError: naming `key`, if the draft has no logit for one of the tokens.
    """
    token_ids = encode(draft_tokenizer, draft_text)
    if max(token_ids, default=0) >= draft_vocab_size:
        raise UserError(
            key,
            got=(
                f"{draft_text} for {target_text}, but {draft_text} has the token id"
                f" {max(token_ids)} in the draft's tokenizer"
            ),
            expected=(
                f"a replacement whose token ids are all below {draft_vocab_size}, because the draft"
                " can only predict these"
            ),
        )
    return token_ids


def _replace_token(
    pairs: dict[int, int], read_as: dict[int, list[int]], token_id: int, draft_token_ids: list[int]
) -> None:
    """Let the draft read some of its own tokens in place of a target token.

    If this is exactly one draft token, the draft can also propose the target token: where the draft
    predicts this one token, the target token is proposed. The target token is then put into
    `pairs`. Otherwise it can only be read, and is put into `read_as`. It is never in both.

    Args:
        pairs: the target tokens that the draft can propose, each with the one draft token that
            proposes it and is read in its place; changed in place.
        read_as: the target tokens that the draft can only read, each with the draft tokens that are
            read in its place; changed in place.
        token_id: the target's token.
        draft_token_ids: the draft's tokens that are read in its place, possibly none.
    """
    # No token, or several, cannot propose the target token.
    pairs.pop(token_id, None)
    if len(draft_token_ids) != 1:
        read_as[token_id] = draft_token_ids
        return

    # A draft token proposes only one target token: from now on `token_id`. If it proposed another
    # target token so far, the draft can no longer propose that one. But it still reads the draft
    # token in its place. So move the other target token from `pairs` to `read_as`.
    (draft_token_id,) = draft_token_ids
    other_ids = [token for token, draft_id in pairs.items() if draft_id == draft_token_id]
    for other_id in other_ids:
        read_as[other_id] = [pairs.pop(other_id)]
    read_as.pop(token_id, None)
    pairs[token_id] = draft_token_id


def check_rows(
    tokenizer: PreTrainedTokenizerBase, num_rows: int, key: str, name: Path | str
) -> None:
    """Check that the draft's embedding has a row for each token that a text may contain.

    Added tokens are checked only if the chat template contains them. Other added tokens, such as
    those for images, may have no row.

    Args:
        tokenizer: the draft's tokenizer.
        num_rows: the number of rows of the embedding.
        key: the recipe key to name in errors.
        name: what errors call the draft.

    Raises:
        UserError: for tokens without a row.
    """
    # A token whose id is not below the number of rows would be an index error in the embedding. The
    # chat template may be None, or a dict of several ones, so it is searched as a text.
    tokens_without_row = {
        token: token_id for token, token_id in tokenizer.get_vocab().items() if token_id >= num_rows
    }
    added = tokenizer.added_tokens_decoder
    needed_tokens = [
        token
        for token, token_id in tokens_without_row.items()
        if token_id not in added or token in str(tokenizer.chat_template)
    ]
    if needed_tokens:
        raise UserError(
            key,
            got=(
                f"{name} with {num_rows} rows in its embedding, and no row for"
                f" {len(needed_tokens)} tokens, such as {needed_tokens[0]!r}"
            ),
            expected="an embedding row for each token of the draft's tokenizer",
        )


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text; a text that is the name of a token has only that id."""
    # Look the text up first, because tokenizers may split the text of a special token into pieces.
    token_id = tokenizer.get_vocab().get(text)
    if token_id is not None:
        return [token_id]
    token_ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return token_ids


def describe_difference(
    target_tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase
) -> str | None:
    """Describe how two vocabularies differ: their sizes, and the first differing ids and roles.

    Returns:
        A text for an error message. None if every id names the same token, and the special tokens
        (`eos_token` and so on) are the same.
    """
    target_names = _list_token_names(target_tokenizer)
    draft_names = _list_token_names(draft_tokenizer)
    differences = [
        f"{key} is {draft_names.get(key, 'none')}, the target's {target_names.get(key, 'none')}"
        for key in {**target_names, **draft_names}
        if target_names.get(key) != draft_names.get(key)
    ]
    if not differences:
        return None
    first_differences = "; ".join(differences[:MAX_NAMED_DIFFERENCES]) + (
        " …" if len(differences) > MAX_NAMED_DIFFERENCES else ""
    )
    sizes = (
        f"a draft of {len(draft_tokenizer.get_vocab())} tokens for a target of"
        f" {len(target_tokenizer.get_vocab())}"
    )
    return f"{sizes}, with {len(differences)} differences: {first_differences}"


def _list_token_names(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the token of each id, and the special token of each role, as texts.

    Returns:
        For example `{"id 7": "'the'", "eos_token": "'</s>' (id 2)"}`. A special token without a
        role has its own text as key.
    """
    # Ids and roles are in one dictionary, so that one loop over its keys compares two tokenizers.
    tokens_by_id = {
        f"id {token_id}": repr(token)
        for token, token_id in sorted(tokenizer.get_vocab().items(), key=itemgetter(1))
    }
    roles = {
        role: token
        for role, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str)
    }
    roles |= {token: token for token in tokenizer.all_special_tokens if token not in roles.values()}
    return tokens_by_id | {
        role: f"{token!r} (id {tokenizer.convert_tokens_to_ids(token)})"
        for role, token in roles.items()
    }
