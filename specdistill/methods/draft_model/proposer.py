"""A small language model drafts for a larger one: any causal language model of transformers, with keys and values of its own.

What makes it fast is what it leaves out. Between rounds the draft keeps its cache: positions of rejected tokens are cut off, and only
tokens committed since go through it, usually one, two after a round accepted in full (the last draft token was never fed). A step
is the decoder layers and one row of the head, and the draft token stays a tensor until the round ends.

Shapes: B rows, T positions of one step, H hidden size, V the target's vocabulary, W tokens both vocabularies hold, K draft tokens.
"""

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor

from specdistill.decoding.proposer import BatchProposer, BatchState, DecodingState, Proposal
from specdistill.decoding.sampling import Generators, Sampling, draw, uniforms
from specdistill.decoding.transformers_models import TransformersBatch, check_batchable, last_of, padded
from specdistill.decoding.tree import DynamicTree, StaticTree, Step, Tree, candidates_are_drawn
from specdistill.errors import UserError, sibling_key
from specdistill.methods.draft_model.layers import LlamaBatch, LlamaLayers, TransformersLayers, is_plain_llama
from specdistill.methods.draft_model.vocabulary import SharedVocabulary
from specdistill.targets.anatomy import examine

WINDOW_SHARE = 0.75  # of the context a window restarts with: rebuilding then costs one step in N/4 tokens


class DraftModelProposer:
    """A chain or a tree drafted by a model of its own: its best tokens where the target is greedy, else draws from its distribution.

    vocabulary: where the ids of draft and target differ, the tokens they share; the distribution is then restricted to those.

    confidence_threshold: drafting stops as soon as the most probable next token has less than this probability (the softmax at the
    sampling temperature, at 1 when greedy, before top-k and top-p), and that token is not drafted; None never stops.
    The output stays exact, because the draft's distribution alone decides whether there is a next draft token, before one is drawn. A
    draft token therefore follows the distribution q that it is verified with, and where drafting stops the next token is drawn from p.
    Deciding by the probability of the token drawn would not be exact: the tokens that are kept would no longer follow q.

    context: what happens to a sequence longer than the draft's own context of N positions. `refuse` raises UserError; `window` shows the
    draft between 3N/4 and N of the last tokens, at positions that start again at 0 each time the window moves.

    key: that the draft came from, which errors name.
    """

    aux_layers: tuple[int, ...] = ()
    vocabulary: frozenset[int] | None = None
    draws = staticmethod(candidates_are_drawn)
    depends_on_width = False

    def __init__(
        self,
        draft: Any,
        *,
        vocabulary: SharedVocabulary | None = None,
        confidence_threshold: float | None = None,
        context: str = "refuse",
        target_max_length: int | None = None,
        key: str = "eval.draft",
    ) -> None:
        self.draft = draft.eval()
        self.key = key
        self.is_enough: Callable[[Tensor], bool] | None = None  # see `ConfidentProposer`
        self.head = examine(draft, "the draft", key=key).head
        self.layers: Any = LlamaLayers(draft) if is_plain_llama(draft) else TransformersLayers(draft)
        self.shared_vocabulary = vocabulary
        self.confidence_threshold = confidence_threshold
        self.context = context
        text_config = draft.config.get_text_config()
        self.max_positions: int | None = getattr(text_config, "max_position_embeddings", None)
        self.target_max_length = target_max_length
        self.num_parameters = sum(parameter.numel() for parameter in draft.parameters())
        self.num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in draft.parameters())
        if vocabulary:
            self._target_ids_W = vocabulary.target_ids_W.to(draft.device)
            self._draft_ids_W = vocabulary.draft_ids_W.to(draft.device)
            pairs = zip(vocabulary.target_ids_W.tolist(), vocabulary.draft_ids_W.tolist(), strict=True)
            self._draft_ids_of = {token: [same] for token, same in pairs}
            self.vocabulary = frozenset(self._draft_ids_of)
            self._draft_ids_of |= vocabulary.read_as

    @property
    def settings(self) -> dict[str, Any]:
        threshold = {} if self.confidence_threshold is None else {"confidence_threshold": self.confidence_threshold}
        shared = {"heterogeneous_vocab": True} if self.shared_vocabulary else {}
        replaced = self.shared_vocabulary.replacements if self.shared_vocabulary else {}
        replacements = {"token_replacements": dict(replaced)} if replaced else {}
        return {**threshold, "draft_context": self.context, **shared, **replacements}

    def passes(self, k: int) -> int:
        return k

    def begin(self, max_length: int) -> None:
        """Forget the last sequence. Raises UserError when the draft's context is too short for the next one and is not to be a window."""
        self._context: list[int] = []  # the sequence so far, in the draft's ids
        self._num_final = 0  # how many of them nothing that follows can change
        self._num_read = 0  # tokens of the target's sequence that are in it
        self._lacking: list[int] = []  # target tokens at its end that the draft's vocabulary lacks
        self._restart(0)
        if self.target_max_length is not None:
            max_length = min(max_length, self.target_max_length)  # tokens drafted past the target's own end are never accepted
        if self.context == "refuse" and self.max_positions is not None and max_length > self.max_positions:
            self._refuse(max_length)

    def propose(self, state: DecodingState, k: int, sampling: Sampling, generator: torch.Generator | None) -> Proposal:
        uniforms_K = torch.zeros(k) if sampling.is_greedy else torch.rand(k, generator=generator, dtype=torch.float64)
        return self.propose_from_uniforms(state, k, sampling, uniforms_K)

    def propose_from_uniforms(self, state: DecodingState, k: int, sampling: Sampling, uniforms_K: Tensor) -> Proposal:
        """`propose` as a function of its randomness: one uniform in [0, 1) for each draft token, unused when greedy."""
        feed, steps = self._feed(state.token_ids, k)
        if not feed:
            return Proposal([])
        uniforms_1K = None if sampling.is_greedy else uniforms_K.unsqueeze(0)
        (proposal,) = draft_chains(lambda ids, _: self.layers(ids)[:, -1], [self], [feed], [steps], sampling, uniforms_1K)
        return proposal

    def propose_tree(
        self, state: DecodingState, shape: StaticTree | DynamicTree, sampling: Sampling, generator: torch.Generator | None
    ) -> Proposal:
        """A tree, which stops at the draft's own context; what of it is accepted is read again in the next round."""
        if self.confidence_threshold is not None:
            got = f"{self.confidence_threshold} with a tree"
            raise UserError("eval.confidence_threshold", got=got, expected="null: eval.tree.budget bounds a tree")
        feed, depth = self._feed(state.token_ids, shape.depth)
        if not feed:
            return Proposal([])
        shape = shape.cut(depth)
        logits_1W = self._logits(self.layers(torch.tensor([feed], device=self.draft.device))[:, -1])
        step = Step.before(len(self._cached), self.draft.device)

        def expand(index_T: Tensor, rows_T: Tensor) -> Tensor:
            nonlocal step
            step = step.descend(rows_T)
            return self._logits(self.layers(self._draft_ids(index_T).unsqueeze(0), step)[0])

        index_N, tree, probs_NW = shape.grow(logits_1W, expand, sampling, generator)
        if step.positions:
            self.layers.crop(len(step.positions))
        return self._proposal(index_N, probs_NW, tree)

    def batched(self) -> BatchProposer:
        return BatchDraftModel(self)

    def _feed(self, token_ids: Sequence[int], k: int) -> tuple[list[int], int]:
        """What is fed first, and how many tokens can be drafted; nothing and 0 where the draft's tokens say none of it."""
        unchanged = self._read(token_ids)
        if not self._context:
            return [], 0
        steps = self._make_room(k)
        return self._uncached(unchanged), steps

    def _logits(self, hidden_BH: Tensor) -> Tensor:
        """[B, W]"""
        logits_BV: Tensor = self.head(hidden_BH)
        return logits_BV if self.shared_vocabulary is None else logits_BV[:, self._draft_ids_W]

    def _draft_ids(self, index: Tensor) -> Tensor:
        """The draft's ids of tokens among the W."""
        return index if self.shared_vocabulary is None else self._draft_ids_W[index]

    def _is_unsure(self, logits_1W: Tensor, sampling: Sampling) -> bool:
        if self.confidence_threshold is None:
            return False
        return float(sampling.confidence(logits_1W)) < self.confidence_threshold

    def _proposal(self, index_N: Tensor, probs_NW: Tensor | None, tree: Tree | None = None) -> Proposal:
        """In the target's ids."""
        if self.shared_vocabulary is None:
            return Proposal(index_N.tolist(), probs_NW, tree)
        if probs_NW is not None:
            probs_NV = probs_NW.new_zeros(len(probs_NW), self.shared_vocabulary.target_vocab_size)
            probs_NW = probs_NV.index_copy_(1, self._target_ids_W, probs_NW)
        return Proposal(self._target_ids_W[index_N].tolist(), probs_NW, tree)

    def _read(self, token_ids: Sequence[int]) -> int:
        """Extend the draft's sequence by the target's new tokens; returns how many of the draft's tokens are unchanged.

        Tokens that the draft lacks are encoded in its own, a run of them together, so a run's encoding may change as it grows.
        """
        fresh = token_ids[self._num_read :]
        self._num_read = len(token_ids)
        unchanged = self._num_final
        if self.shared_vocabulary is None:
            self._context += fresh
            self._num_final = len(self._context)
            return unchanged
        for token in fresh:
            same = self._draft_ids_of.get(token)
            if same is None:
                self._lacking.append(token)
            else:
                self._encode_lacking()
                self._context += same
                self._num_final, self._lacking = len(self._context), []
        self._encode_lacking()
        return unchanged

    def _encode_lacking(self) -> None:
        assert self.shared_vocabulary is not None
        self._context[self._num_final :] = self.shared_vocabulary.reencode(self._lacking) if self._lacking else []

    def _make_room(self, k: int) -> int:
        """How many tokens can be drafted within the draft's context, after moving the window if there is one."""
        limit, length = self.max_positions, len(self._context) - self._start
        if limit is None or length + k - 1 <= limit:  # the last draft token is never fed
            return k
        if self.context == "refuse":
            if length > limit:  # the target's sequence fits, but takes more of the draft's tokens
                self._refuse(length)
            return limit - length + 1
        steps = min(k, limit)
        self._restart(max(0, len(self._context) - max(1, min(int(WINDOW_SHARE * limit), limit - steps + 1))))
        return steps

    def _restart(self, start: int) -> None:
        """Show the draft the sequence from token `start` on, with nothing cached."""
        self._start = start
        self._cached: list[int] = []  # tokens whose keys and values the cache holds, from `start` on
        self.layers.restart()

    def _uncached(self, unchanged: int) -> list[int]:
        """Cut off what the cache holds of rejected tokens; returns what must be fed, at least the last token. Notes it as fed."""
        start, most = self._start, min(len(self._cached), len(self._context) - self._start - 1)
        agrees = max(0, min(unchanged - start, most))
        while agrees < most and self._cached[agrees] == self._context[start + agrees]:
            agrees += 1
        surplus = len(self._cached) - agrees
        if surplus:
            self.layers.crop(surplus)
            del self._cached[agrees:]
        fresh = self._context[start + agrees :]
        self._cached += fresh
        return fresh

    def _refuse(self, length: int) -> NoReturn:
        got = f"a draft whose context is {self.max_positions} tokens for a sequence of {length}"
        expected = "window, a draft with a longer context, or shorter sequences"
        raise UserError(sibling_key(self.key, "draft_context"), got=got, expected=expected)


def draft_chains(
    forward: Callable[[Tensor, Sequence[int]], Tensor],
    rows: Sequence[DraftModelProposer],
    feeds: Sequence[list[int]],
    steps: Sequence[int],
    sampling: Sampling,
    uniforms_BK: Tensor | None,
) -> list[Proposal]:
    """A chain of up to steps[b] tokens for each of B sequences of one draft, which feed feeds[b] first; notes what is in the cache.

    forward: new ids [B, T], of which counts[b] are valid -> hidden states [B, H] at each row's last one. uniforms_BK: None when greedy.
    Rows that stop early, or have no more room in the draft's context, are padded until the others are done.
    """
    draft, device = rows[0], rows[0].draft.device
    counts, next_ids = [len(feed) for feed in feeds], padded(feeds, device)
    uniforms_BK = None if uniforms_BK is None else uniforms_BK.to(device)
    chosen: list[Tensor] = []  # [B] each, indices into the W tokens
    distributions: list[Tensor] = []
    num_passes, num_drafted = [0] * len(rows), [0] * len(rows)
    for step in range(max(steps)):
        logits_BW = draft._logits(forward(next_ids, counts))
        if uniforms_BK is None:
            chosen.append(logits_BW.argmax(-1))
        else:
            distributions.append(sampling.probabilities(logits_BW))
            chosen.append(draw(distributions[-1], uniforms_BK[:, step]))
        for b, count in enumerate(counts):
            if count:
                num_passes[b] += 1
                sure = not draft._is_unsure(logits_BW[b : b + 1], sampling)
                num_drafted[b] += sure
                counts[b] = int(sure and step + 1 < steps[b])
        if (draft.is_enough and draft.is_enough(sampling.confidence(logits_BW))) or not any(counts):
            break
        next_ids = draft._draft_ids(chosen[-1]).unsqueeze(1)
    proposals = [Proposal([])] * len(rows)
    for b, (row, drafted, passes) in enumerate(zip(rows, num_drafted, num_passes, strict=True)):
        if drafted:
            index_K = torch.stack([index_B[b] for index_B in chosen[:drafted]])
            probs_KW = torch.stack([probs_BW[b] for probs_BW in distributions[:drafted]]) if distributions else None
            proposals[b] = row._proposal(index_K, probs_KW)
            row._cached += row._draft_ids(index_K).tolist()[: passes - 1]
    return proposals


class BatchDraftModel:
    """`DraftModelProposer` for B sequences: each row has one, which reads its sequence and says what to feed; the passes are shared."""

    def __init__(self, proposer: DraftModelProposer) -> None:
        if not isinstance(proposer.layers, LlamaLayers):
            check_batchable(proposer.draft, "the draft")
        self.proposer = proposer
        self.rows: list[DraftModelProposer] = []
        self.layers: LlamaBatch | TransformersBatch

    def begin(self, max_lengths: Sequence[int]) -> None:
        self.rows = [copy.copy(self.proposer) for _ in max_lengths]
        for row, max_length in zip(self.rows, max_lengths, strict=True):
            # The batch's layers are told once for all rows what to forget.
            row.layers = SimpleNamespace(restart=lambda: None, crop=lambda count: None)
            row.begin(max_length)
        layers = self.proposer.layers
        if isinstance(layers, LlamaLayers):
            self.layers = LlamaBatch(layers, len(self.rows))
        else:
            self.layers = TransformersBatch(self.proposer.draft, len(self.rows))

    def propose(self, state: BatchState, k: int, sampling: Sampling, generators: Generators) -> list[Proposal]:
        fed = [row._feed(token_ids, k) for row, token_ids in zip(self.rows, state.token_ids, strict=True)]
        feeds, steps = [feed for feed, _ in fed], [num_steps for _, num_steps in fed]
        self.layers.cache.truncate([len(row._cached) - len(feed) for row, feed in zip(self.rows, feeds, strict=True)])

        def forward(ids_BT: Tensor, counts: Sequence[int]) -> Tensor:
            return last_of(self.layers(ids_BT, counts), counts)

        uniforms_BK = None if sampling.is_greedy else uniforms(k, generators)
        return draft_chains(forward, self.rows, feeds, steps, sampling, uniforms_BK)

    def keep(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
        self.layers.cache.keep(rows)
