"""Whether a draft and its target speak the same tokens, and what to do when they do not.

Two tokenizers are compared token by token, special tokens and their ids included. By default a difference is refused. With
`eval.heterogeneous_vocab=true` the draft proposes only tokens that both vocabularies spell alike: token-level intersection (TLI,
arXiv 2502.05202). Embedding matrices may be larger than the tokenizer; rows that no token names are nobody's token.

Shapes: W tokens in both vocabularies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from specdistill.errors import UserError, sibling_key

NUM_NAMED = 3  # differing tokens that an error names
T = TypeVar("T", int, str)


@dataclass(frozen=True)
class SharedVocabulary:
    """The tokens of both vocabularies: entry w is the same token, `target_ids_W` for the target, `draft_ids_W` for the draft.

    target_vocab_size: V, the width of the target's logits.
    """

    target_ids_W: Tensor
    draft_ids_W: Tensor
    target_vocab_size: int
    target_tokenizer: Any
    draft_tokenizer: Any

    def reencode(self, target_ids: Sequence[int]) -> list[int]:
        """Target tokens that the draft lacks, in the draft's own tokens; possibly none.

        Tokens that follow one another are given together: one alone may hold half a character.
        """
        known = [token for token in target_ids if token < len(self.target_tokenizer)]
        text = self.target_tokenizer.decode(known, skip_special_tokens=False)
        ids: list[int] = self.draft_tokenizer(text, add_special_tokens=False).input_ids
        return ids


def match_vocabularies(
    target_tokenizer: Any,
    target_vocab_size: int,
    draft_tokenizer: Any,
    draft_vocab_size: int,
    *,
    heterogeneous: bool = False,
    key: str = "eval.draft",
) -> SharedVocabulary | None:
    """How a draft's ids stand to the target's: None where they are the same, down to the size of the logits.

    The sizes are those of the logits. Raises UserError under `key` when the tokenizers differ and `heterogeneous` is false, or when
    they share no token at all.
    """
    difference = describe_difference(target_tokenizer, draft_tokenizer)
    if difference is None and target_vocab_size == draft_vocab_size:
        return None
    if difference is not None and not heterogeneous:
        switch = sibling_key(key, "heterogeneous_vocab")
        expected = f"the target's tokenizer, or {switch}=true to draft over the tokens of both"
        raise UserError(key, got=difference, expected=expected)
    target_ids, draft_ids = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    pairs = sorted(
        (token_id, draft_ids[token])
        for token, token_id in target_ids.items()
        if token_id < target_vocab_size and draft_ids.get(token, draft_vocab_size) < draft_vocab_size
    )
    if not pairs:
        got = f"a draft of {len(draft_ids)} tokens, none of which is among the target's {len(target_ids)}"
        raise UserError(key, got=got, expected="tokens in both vocabularies")
    target_ids_W, draft_ids_W = torch.tensor(pairs).unbind(1)
    return SharedVocabulary(target_ids_W, draft_ids_W, target_vocab_size, target_tokenizer, draft_tokenizer)


def describe_difference(target_tokenizer: Any, draft_tokenizer: Any) -> str | None:
    """What a user should know about two vocabularies that differ: sizes and the first tokens, or else the special tokens.

    None when every id names the same token, and the same tokens are special in the same roles.
    """
    tokens = [
        {token_id: repr(token) for token, token_id in it.get_vocab().items()} for it in (target_tokenizer, draft_tokenizer)
    ]
    differing = _differences("id ", *tokens)
    special = _differences("", _special_tokens(target_tokenizer), _special_tokens(draft_tokenizer))
    parts = [f"{len(differing)} ids differ: {_first(differing)}"] if differing else []
    parts += [f"different special tokens: {_first(special)}"] if special else []
    sizes = f"a draft of {len(tokens[1])} tokens for a target of {len(tokens[0])}"
    return f"{sizes}, where {', and '.join(parts)}" if parts else None


def _differences(what: str, target: Mapping[T, str], draft: Mapping[T, str]) -> list[str]:
    return [
        f"{what}{key} is {draft.get(key, 'none')}, the target's {target.get(key, 'none')}"
        for key in sorted(target.keys() | draft.keys())
        if target.get(key) != draft.get(key)
    ]


def _first(named: Sequence[str]) -> str:
    return "; ".join(named[:NUM_NAMED]) + " …" * (len(named) > NUM_NAMED)


def _special_tokens(tokenizer: Any) -> dict[str, str]:
    """role -> token and id; tokens that are special in no role of their own stand under their own name."""
    roles = {role: token for role, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    roles |= {token: token for token in tokenizer.all_special_tokens if token not in roles.values()}
    return {role: f"{token!r} (id {tokenizer.convert_tokens_to_ids(token)})" for role, token in roles.items()}
