"""A small language model drafts for a larger one: any causal language model of transformers, with keys and values of its own.

What makes it fast is what it leaves out. Between rounds the draft keeps its cache: positions of rejected tokens are cut off, and only
tokens committed since go through it, usually one, two after a round accepted in full (the last draft token was never fed). A step
is the decoder layers and one row of the head, and the draft token stays a tensor until the round ends.

A model that knows a mask (PARD, arXiv 2504.18583) drafts all K tokens in one step: K - 1 masks follow the last token, and their keys and
values are forgotten. A tree then costs no other step: the nodes of a level have one distribution of children.

Shapes: B rows, T positions of one step, H hidden size, V the target's vocabulary, W tokens both vocabularies hold, K draft tokens.
"""

import itertools
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from specdistill.decoding.proposer import DecodingState, Proposal
from specdistill.decoding.sampling import Generators, Sampling
from specdistill.decoding.transformers_models import (
    TransformersLayers,
    check_batchable,
    last_of,
    padded,
)
from specdistill.decoding.tree import Step, TreeShape
from specdistill.errors import UserError
from specdistill.methods.feature_proposer import TokenProposer
from specdistill.methods.models.layers import LlamaLayers, is_plain_llama
from specdistill.methods.models.vocabulary import SharedVocabulary
from specdistill.targets.anatomy import examine


class DraftText:
    """A sequence in the draft's own tokens, and which of them its KV cache holds. vocabulary: None where they are the target's."""

    def __init__(self, vocabulary: SharedVocabulary | None) -> None:
        self.vocabulary = vocabulary
        self.ids: list[int] = []  # the sequence so far
        self.cached: list[int] = []  # tokens whose keys and values the cache holds
        self._num_final = 0  # how many ids nothing that follows can change
        self._num_read = 0  # tokens of the target's sequence that are in it
        self._lacking: list[int] = []  # target tokens at its end that the draft's vocabulary lacks

    def read(self, token_ids: Sequence[int]) -> int:
        """Extend it by the target's new tokens; returns how many of its ids are unchanged.

        Tokens that the draft lacks are encoded in its own, a run of them together, so a run's encoding may change as it grows.
        """
        fresh = token_ids[self._num_read :]
        self._num_read = len(token_ids)
        unchanged = self._num_final
        if self.vocabulary is None:
            self.ids += fresh
            self._num_final = len(self.ids)
            return unchanged
        for token in fresh:
            same = self.vocabulary.draft_ids_of.get(token)
            if same is None:
                self._lacking.append(token)
            else:
                self._encode_lacking(self.vocabulary)
                self.ids += same
                self._num_final, self._lacking = len(self.ids), []
        self._encode_lacking(self.vocabulary)
        return unchanged

    def _encode_lacking(self, vocabulary: SharedVocabulary) -> None:
        self.ids[self._num_final :] = vocabulary.reencode(self._lacking) if self._lacking else []

    def uncached(self, unchanged: int) -> list[int]:
        """What must be fed, at least the last token: all but what is cached of the ids, and not of rejected tokens. Notes it as cached."""
        most = min(len(self.cached), len(self.ids) - 1)
        agrees = max(0, min(unchanged, most))
        while agrees < most and self.cached[agrees] == self.ids[agrees]:
            agrees += 1
        fresh = self.ids[agrees:]
        self.cached[agrees:] = fresh
        return fresh


class DraftModelProposer(TokenProposer):
    """Chains or trees drafted by a model of its own: its best tokens where the target is greedy, else draws from its
    distribution.

    vocabulary: where the ids of draft and target differ, the tokens they share; the distribution is then restricted to those.

    mask_token_id: the draft's token in the place of what is not drafted yet; None for a model that drafts token by token.

    key: that the draft came from, which errors name.
    """

    def __init__(
        self,
        draft: Any,
        *,
        vocabulary: SharedVocabulary | None = None,
        mask_token_id: int | None = None,
        target_max_length: int = sys.maxsize,
        key: str = "eval.draft",
    ) -> None:
        of_target = (
            ()
            if vocabulary is None
            else (vocabulary.target_ids_W.to(draft.device), vocabulary.target_vocab_size)
        )
        super().__init__(draft, *of_target)
        self.key = key
        self.head = examine(draft, "the draft", key=key).head
        self.layers: Any = (
            LlamaLayers(draft) if is_plain_llama(draft) else TransformersLayers(draft)
        )
        self.shared_vocabulary = vocabulary
        self.mask_token_id = mask_token_id
        stated = getattr(draft.config.get_text_config(), "max_position_embeddings", None)
        self.max_positions: int = sys.maxsize if stated is None else stated
        self.target_max_length = target_max_length
        if vocabulary:
            self.settings["heterogeneous_vocab"] = True
            if vocabulary.replacements:
                self.settings["token_replacements"] = dict(vocabulary.replacements)
            self._draft_ids_W = vocabulary.draft_ids_W.to(draft.device)
        self.rows: list[DraftText] = []
        self._is_batchable = isinstance(self.layers, LlamaLayers)

    def passes(self, k: int) -> int:
        return k if self.mask_token_id is None else min(k, 1)

    def begin(self, max_lengths: Sequence[int]) -> None:
        """Raises UserError, too, when the draft's context is too short for a sequence."""
        if len(max_lengths) > 1 and not self._is_batchable:
            check_batchable(self.draft, "the draft")
            self._is_batchable = True
        longest = min(
            max(max_lengths), self.target_max_length
        )  # tokens drafted past the target's own end are never accepted
        if longest > self.max_positions:
            self._refuse(longest)
        self.rows = [DraftText(self.shared_vocabulary) for _ in max_lengths]
        self.layers.begin(len(max_lengths))

    def propose(
        self, state: DecodingState, k: int, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        """Chains. Rows that have no more room in the draft's context are padded until the others are done."""
        feeds, steps = self._feed(state, k)
        counts, next_ids = [len(feed) for feed in feeds], padded(feeds, self.draft.device)
        logits_BKW = self._in_one_pass(feeds, steps)
        fed: list[Tensor] = []  # [B] each

        def next_logits(step: int, index_B: Tensor | None) -> tuple[Tensor, None]:
            nonlocal counts, next_ids
            if logits_BKW is not None:
                return logits_BKW[:, step], None
            if index_B is not None:
                fed.append(self._draft_ids(index_B))
                counts, next_ids = [int(step < most) for most in steps], fed[-1].unsqueeze(1)
            return self._logits(last_of(self.layers(next_ids, counts), counts)), None

        proposals = self.chains(k, sampling, generators, next_logits, steps)
        if fed:
            for row, ids, most in zip(self.rows, torch.stack(fed, 1).tolist(), steps, strict=True):
                row.cached += ids[: max(0, most - 1)]
        return proposals

    def propose_tree(
        self, state: DecodingState, shape: TreeShape, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        """Trees, all of which stop where one has no more room in the draft's context; what of them is accepted is read again in the next
        round.
        """
        feeds, depths = self._feed(state, shape.depth)
        if not any(feeds):
            return [Proposal([])] * len(feeds)
        counts, held = [len(feed) for feed in feeds], [len(row.cached) for row in self.rows]
        logits_BKW = self._in_one_pass(feeds, depths)
        if logits_BKW is None:
            logits_BKW = self._logits(
                last_of(self.layers(padded(feeds, self.draft.device), counts), counts)
            ).unsqueeze(1)
        levels, step = itertools.count(1), Step.before(held, self.draft.device)

        def expand(index_BT: Tensor, rows_BT: Tensor) -> Tensor:
            nonlocal step
            if self.mask_token_id is not None:
                return logits_BKW[:, next(levels), None].expand(-1, rows_BT.shape[1], -1)
            step = step.descend(rows_BT)
            return self._logits(
                self.layers(self._draft_ids(index_BT), [rows_BT.shape[1]] * len(rows_BT), step)
            )

        drawn = [
            generator if feed else torch.Generator()
            for generator, feed in zip(generators, feeds, strict=True)
        ]
        drafts = shape.cut(min(filter(None, depths))).grow(
            logits_BKW[:, 0], expand, sampling, drawn
        )
        self.layers.truncate(held)
        return [
            self.proposal(index_N, probs_NW, tree) if feed else Proposal([])
            for feed, (index_N, tree, probs_NW) in zip(feeds, drafts, strict=True)
        ]

    def keep(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
        self.layers.cache.keep(rows)

    def _feed(self, state: DecodingState, k: int) -> tuple[list[list[int]], list[int]]:
        """What each row is fed first, and how many tokens can be drafted for it; nothing and 0 where the draft's tokens say none of its
        text. What the cache holds of rejected tokens is cut off.
        """
        feeds, steps = [], []
        for row, token_ids in zip(self.rows, state.token_ids, strict=True):
            unchanged = row.read(token_ids)
            room = self.max_positions - len(row.ids) + 1  # the last draft token is never fed
            if room < 1:  # the target's sequence fits, but takes more of the draft's tokens
                self._refuse(len(row.ids))
            steps.append(min(k, room) if row.ids else 0)
            feeds.append(row.uncached(unchanged) if row.ids else [])
        self.layers.truncate(
            [len(row.cached) - len(feed) for row, feed in zip(self.rows, feeds, strict=True)]
        )
        return feeds, steps

    def _in_one_pass(self, feeds: Sequence[list[int]], steps: Sequence[int]) -> Tensor | None:
        """Logits [B, K, W], of row b after its last token and each of steps[b] - 1 masks; None for a model that drafts token by token."""
        if self.mask_token_id is None or not any(steps):
            return None
        rows = [
            feed + [self.mask_token_id] * (count - 1)
            for feed, count in zip(feeds, steps, strict=True)
        ]
        hidden_BTH = self.layers(padded(rows, self.draft.device), [len(row) for row in rows])
        self.layers.truncate([len(row.cached) for row in self.rows])
        last_B1 = torch.tensor(
            [[max(len(feed) - 1, 0)] for feed in feeds], device=hidden_BTH.device
        )
        index_BK = (last_B1 + torch.arange(max(steps), device=last_B1.device)).clamp_max(
            hidden_BTH.shape[1] - 1
        )
        return self._logits(
            hidden_BTH.gather(1, index_BK.unsqueeze(2).expand(-1, -1, hidden_BTH.shape[2]))
        )

    def _logits(self, hidden_BH: Tensor) -> Tensor:
        """[B, W], or [B, K, W] of hidden states [B, K, H]."""
        logits_BV: Tensor = self.head(hidden_BH)
        return logits_BV if self.shared_vocabulary is None else logits_BV[..., self._draft_ids_W]

    def _draft_ids(self, index: Tensor) -> Tensor:
        """The draft's ids of tokens among the W."""
        return index if self.shared_vocabulary is None else self._draft_ids_W[index]

    def _refuse(self, length: int) -> NoReturn:
        got = f"a draft whose context is {self.max_positions} tokens for a sequence of {length}"
        raise UserError(
            self.key, got=got, expected="a draft with a longer context, or shorter sequences"
        )
