"""Whether a draft and its target speak the same tokens, and what to do when they do not.

Two tokenizers are compared token by token, special tokens and their ids included. By default a difference is refused. With
`eval.heterogeneous_vocab=true` the draft proposes only tokens that both vocabularies spell alike: token-level intersection (TLI,
arXiv 2502.05202). Embedding matrices may be larger than the tokenizer; rows that no token names are nobody's token.

Shapes: W tokens in both vocabularies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from specdistill.errors import UserError, sibling_key

NUM_NAMED = 3  # differences that an error names


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

    @cached_property
    def draft_id_of(self) -> dict[int, int]:
        """What the draft reads for each target token that it does not lack."""
        return dict(zip(self.target_ids_W.tolist(), self.draft_ids_W.tolist(), strict=True))

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
    heterogeneous_vocab: bool = False,
    key: str = "eval.draft",
) -> SharedVocabulary | None:
    """How a draft's ids stand to the target's: None where they are the same, down to the size of the logits.

    The sizes are those of the logits.
    Raises UserError under `key` when the tokenizers differ and `heterogeneous_vocab` is false, or when they share no token at all.
    """
    difference = describe_difference(target_tokenizer, draft_tokenizer)
    if difference is None and target_vocab_size == draft_vocab_size:
        return None
    if difference is not None and not heterogeneous_vocab:
        switch = sibling_key(key, "heterogeneous_vocab")
        expected = f"the target's tokenizer, or {switch}=true to draft over the tokens of both"
        raise UserError(key, got=difference, expected=expected)
    target_ids, draft_ids = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    pairs = {
        token_id: draft_ids[token]
        for token, token_id in target_ids.items()
        if token_id < target_vocab_size and draft_ids.get(token, draft_vocab_size) < draft_vocab_size
    }
    if not pairs:
        got = f"a draft of {len(draft_ids)} tokens, none of which is among the target's {len(target_ids)}"
        raise UserError(key, got=got, expected="tokens in both vocabularies")
    target_ids_W, draft_ids_W = torch.tensor(sorted(pairs.items())).unbind(1)
    return SharedVocabulary(target_ids_W, draft_ids_W, target_vocab_size, target_tokenizer, draft_tokenizer)


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
    by_id = {f"id {token_id}": repr(token) for token, token_id in sorted(tokenizer.get_vocab().items(), key=itemgetter(1))}
    roles = {role: token for role, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    roles |= {token: token for token in tokenizer.all_special_tokens if token not in roles.values()}
    return by_id | {role: f"{token!r} (id {tokenizer.convert_tokens_to_ids(token)})" for role, token in roles.items()}
