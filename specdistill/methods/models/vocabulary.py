"""Whether a draft and its target speak the same tokens, and what to do when they do not.

Two tokenizers are compared token by token, special tokens and their ids included. By default a difference is refused. With
`eval.heterogeneous_vocab=true` the draft proposes only tokens that both vocabularies spell alike: token-level intersection (TLI,
arXiv 2502.05202). Embedding matrices may be larger than the tokenizer; rows that no token names are nobody's token.

Some tokens mean the same and are spelled differently, such as those that end a turn in two chat templates. `eval.token_replacements` says
which text of the draft stands for a token of the target: the draft reads it wherever the target's token stands, and proposes the target's
token where it would write its own, if its text is one token. What one token of the draft stands for is one token of the target: others with
that text are read as it and not proposed.

Shapes: W tokens in both vocabularies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from specdistill.errors import UserError, sibling_key

NUM_NAMED = 3  # differences that an error names


@dataclass(frozen=True)
class SharedVocabulary:
    """The tokens of both vocabularies: entry w is the same token, `target_ids_W` for the target, `draft_ids_W` for the draft.

    target_vocab_size: V, the width of the target's logits. replacements: the target's text for a token -> the draft's text for it.
    read_as: target tokens that are read but never proposed, each with the draft's tokens for it: none, several, or one that another has.
    """

    target_ids_W: Tensor
    draft_ids_W: Tensor
    target_vocab_size: int
    target_tokenizer: Any
    draft_tokenizer: Any
    read_as: Mapping[int, list[int]] = field(default_factory=dict)
    replacements: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def draft_ids_of(self) -> dict[int, list[int]]:
        """What the draft reads for each target token that it does not lack."""
        pairs = zip(self.target_ids_W.tolist(), self.draft_ids_W.tolist(), strict=True)
        return {token: [same] for token, same in pairs} | dict(self.read_as)

    def reencode(self, target_ids: Sequence[int]) -> list[int]:
        """Target tokens that the draft lacks, in the draft's own tokens; possibly none.

        Tokens that follow one another are given together: one alone may hold half a character.
        """
        known = [token for token in target_ids if token < len(self.target_tokenizer)]
        text = self.target_tokenizer.decode(known, skip_special_tokens=False)
        return self.draft_tokenizer(text, add_special_tokens=False).input_ids


def match_vocabularies(
    target_tokenizer: Any,
    target_vocab_size: int,
    draft_tokenizer: Any,
    draft_vocab_size: int,
    *,
    heterogeneous_vocab: bool = False,
    token_replacements: Mapping[str, str] = MappingProxyType({}),
    key: str = "eval.draft",
) -> SharedVocabulary | None:
    """How a draft's ids stand to the target's: None where they are the same, down to the size of the logits.

    The sizes are those of the logits. token_replacements: see `SharedVocabulary`.
    Raises UserError under `key` when the tokenizers differ and `heterogeneous_vocab` is false, or when they share no token at all; under
    the key next to it for replacements of what is no token of the target, or of tokenizers that do not differ.
    """
    difference = describe_difference(target_tokenizer, draft_tokenizer)
    replacing = sibling_key(key, "token_replacements")
    if difference is None:
        if token_replacements:
            got = f"{len(token_replacements)} for a draft with the target's tokenizer"
            raise UserError(
                replacing, got=got, expected="{}: it reads the target's tokens as they are"
            )
        if target_vocab_size == draft_vocab_size:
            return None
    elif not heterogeneous_vocab:
        switch = sibling_key(key, "heterogeneous_vocab")
        expected = f"the target's tokenizer, or {switch}=true to draft over the tokens of both"
        raise UserError(key, got=difference, expected=expected)
    target_ids, draft_ids = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    pairs = {
        token_id: draft_ids[token]
        for token, token_id in target_ids.items()
        if token_id < target_vocab_size
        and draft_ids.get(token, draft_vocab_size) < draft_vocab_size
    }
    read_as: dict[int, list[int]] = {}
    for text, replaced in token_replacements.items():
        token_id, *others = encode(target_tokenizer, text) or [target_vocab_size]
        is_unknown = text not in target_ids and target_tokenizer.decode([token_id]) != text
        if others or is_unknown or token_id >= target_vocab_size:
            raise UserError(
                replacing, got=text, expected="a token of the target, with the draft's text for it"
            )
        if max(ids := encode(draft_tokenizer, replaced), default=0) >= draft_vocab_size:
            got = (
                f"{replaced} for {text}, token {max(ids)} of a draft with {draft_vocab_size} logits"
            )
            raise UserError(replacing, got=got, expected="text of its tokens")
        pairs.pop(token_id, None)
        read_as[token_id] = ids
        if len(ids) == 1:
            read_as |= {
                other: [pairs.pop(other)] for other, same in list(pairs.items()) if same == ids[0]
            }
            (pairs[token_id],) = read_as.pop(token_id)
    if not pairs:
        got = f"a draft of {len(draft_ids)} tokens, none of which is among the target's {len(target_ids)}"
        raise UserError(key, got=got, expected="tokens in both vocabularies")
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


def encode(tokenizer: Any, text: str) -> list[int]:
    """A text that spells a token is that token."""
    if (token_id := tokenizer.get_vocab().get(text)) is not None:
        return [token_id]
    return tokenizer(text, add_special_tokens=False).input_ids


def describe_difference(target_tokenizer: Any, draft_tokenizer: Any) -> str | None:
    """What a user should know about two vocabularies that differ: their sizes, and the first ids and special tokens that differ.

    None when every id names the same token, and the same tokens are special in the same roles.
    """
    target, draft = _names(target_tokenizer), _names(draft_tokenizer)
    differing = [
        f"{key} is {draft.get(key, 'none')}, the target's {target.get(key, 'none')}"
        for key in {**target, **draft}
        if target.get(key) != draft.get(key)
    ]
    if not differing:
        return None
    first = "; ".join(differing[:NUM_NAMED]) + " …" * (len(differing) > NUM_NAMED)
    sizes = f"a draft of {len(draft_tokenizer.get_vocab())} tokens for a target of {len(target_tokenizer.get_vocab())}"
    return f"{sizes}, with {len(differing)} differences: {first}"


def _names(tokenizer: Any) -> dict[str, str]:
    """Each id's token, then each role's special token with its id; one that is special in no role stands under its own name."""
    by_id = {
        f"id {token_id}": repr(token)
        for token, token_id in sorted(tokenizer.get_vocab().items(), key=itemgetter(1))
    }
    roles = {
        role: token
        for role, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str)
    }
    roles |= {token: token for token in tokenizer.all_special_tokens if token not in roles.values()}
    return by_id | {
        role: f"{token!r} (id {tokenizer.convert_tokens_to_ids(token)})"
        for role, token in roles.items()
    }
