"""A small language model drafts for a larger one: any causal language model of transformers, with keys and values of its own.

What makes it fast is what it leaves out. Between rounds the draft keeps its cache: positions of rejected tokens are cut off, and only
tokens committed since go through it, usually one, two after a round accepted in full (the last draft token was never fed). A step
is the decoder layers and one row of the head, and the draft token stays a tensor until the round ends.

Shapes: T positions of one step, V the target's vocabulary, W tokens both vocabularies hold, K draft tokens.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specdistill.decoding.kv_cache import DraftKVCache
from specdistill.decoding.proposer import BatchProposer, DecodingState, Proposal
from specdistill.decoding.sampling import Sampling, draw
from specdistill.decoding.transformers_models import attention_masks
from specdistill.decoding.tree import DynamicTree, StaticTree, Step, candidates_are_drawn
from specdistill.errors import UserError
from specdistill.methods.draft_model.llama import LlamaStack, is_plain_llama
from specdistill.methods.draft_model.vocabulary import SharedVocabulary

WINDOW_SHARE = 0.75  # of the context a window restarts with: rebuilding then costs one step in N/4 tokens


class TransformersLayers:
    """Any causal language model's layers, and the keys and values of the sequence so far: new ids [1, T] -> hidden states [1, T, H]."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.backbone: Any = model.get_decoder()
        self.config = model.config.get_text_config()
        self.restart()

    def restart(self) -> None:
        # Plain layers even for a model with sliding windows, whose own would not give back what they dropped; the mask does the rest.
        self.cache = DynamicCache()

    def crop(self, count: int) -> None:
        """Forget the last `count` positions."""
        self.cache.crop(-count)

    def __call__(self, ids_1T: Tensor) -> Tensor:
        hidden: Tensor = self.backbone(input_ids=ids_1T, past_key_values=self.cache, use_cache=True).last_hidden_state
        return hidden

    def level(self, ids_1T: Tensor, step: Step) -> Tensor:
        """A level of a tree; `step` says what the cache holds with it."""
        hidden: Tensor = self.backbone(
            input_ids=ids_1T,
            position_ids=torch.tensor([step.positions_T], device=ids_1T.device),
            attention_mask=attention_masks(step, self.config, self.backbone.dtype),
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        return hidden


class LlamaLayers:
    """`TransformersLayers` of a plain Llama, faster."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.stack = LlamaStack(model)
        self.device = model.device
        self.restart()

    def restart(self) -> None:
        self.cache = DraftKVCache(len(self.stack.layers), self.stack.rotary, self.device)

    def crop(self, count: int) -> None:
        self.cache.length -= count

    def __call__(self, ids_1T: Tensor) -> Tensor:
        hidden: Tensor = self.stack(ids_1T, self.cache.next_rotary(ids_1T.shape[1]), self.cache)
        return hidden

    def level(self, ids_1T: Tensor, step: Step) -> Tensor:
        hidden: Tensor = self.stack(ids_1T, self.cache.level(step), self.cache)
        return hidden


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
    """

    aux_layers: tuple[int, ...] = ()

    def __init__(
        self,
        draft: Any,
        *,
        vocabulary: SharedVocabulary | None = None,
        confidence_threshold: float | None = None,
        context: str = "refuse",
        target_max_length: int | None = None,
    ) -> None:
        if confidence_threshold is not None and not 0 <= confidence_threshold <= 1:
            raise UserError("eval.confidence_threshold", got=confidence_threshold, expected="null or 0..1")
        if context not in ("refuse", "window"):
            raise UserError("eval.draft_context", got=context, expected="refuse or window")
        self.draft = draft.eval()
        self.head = draft.get_output_embeddings()
        self.layers = LlamaLayers(draft) if is_plain_llama(draft) else TransformersLayers(draft)
        self.config = draft.config.get_text_config()
        self.shared_vocabulary = vocabulary
        self.confidence_threshold = confidence_threshold
        self.context = context
        self.max_positions: int | None = getattr(self.config, "max_position_embeddings", None)
        self.target_max_length = target_max_length
        self.num_parameters = sum(parameter.numel() for parameter in draft.parameters())
        self.num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in draft.parameters())
        if vocabulary:
            self._target_ids_W = vocabulary.target_ids_W.to(draft.device)
            self._draft_ids_W = vocabulary.draft_ids_W.to(draft.device)
            self._draft_id_of = vocabulary.draft_id_of()

    @property
    def vocabulary(self) -> frozenset[int] | None:
        return frozenset(self.shared_vocabulary.target_ids_W.tolist()) if self.shared_vocabulary else None

    @property
    def settings(self) -> dict[str, Any]:
        threshold = {} if self.confidence_threshold is None else {"confidence_threshold": self.confidence_threshold}
        return {**threshold, "draft_context": self.context}

    def draws(self, sampling: Sampling, tree: StaticTree | DynamicTree | None) -> bool:
        return candidates_are_drawn(sampling, tree)

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
        unchanged = self._read(state.token_ids)
        if not self._context:  # none of it can be said in the draft's tokens
            return Proposal([])
        steps = self._make_room(k)
        next_ids = torch.tensor([self._uncached(unchanged)], device=self.draft.device)
        uniforms_K = uniforms_K.to(self.draft.device)
        chosen: list[Tensor] = []  # [1] each, indices into the W tokens
        distributions: list[Tensor] = []
        for step in range(steps):
            num_fed = step  # draft tokens in the cache: all but the last drafted
            logits_1W = self._forward(next_ids)
            if self._is_unsure(logits_1W, sampling):
                break
            if sampling.is_greedy:
                index = logits_1W.argmax(-1)
            else:
                probs_1W = sampling.probabilities(logits_1W)
                index = draw(probs_1W, uniforms_K[step : step + 1])
                distributions.append(probs_1W)
            chosen.append(index)
            next_ids = (index if self.shared_vocabulary is None else self._draft_ids_W[index]).unsqueeze(0)
        return self._proposal(chosen, distributions, num_fed)

    def propose_tree(
        self, state: DecodingState, shape: StaticTree | DynamicTree, sampling: Sampling, generator: torch.Generator | None
    ) -> Proposal:
        """A tree, which stops at the draft's own context; what of it is accepted is read again in the next round."""
        if self.confidence_threshold is not None:
            got = f"{self.confidence_threshold} with a tree"
            raise UserError("eval.confidence_threshold", got=got, expected="null: eval.tree.budget bounds a tree")
        unchanged = self._read(state.token_ids)
        if not self._context:
            return Proposal([])
        shape = shape.cut(self._make_room(shape.depth))
        logits_1W = self._forward(torch.tensor([self._uncached(unchanged)], device=self.draft.device))
        step = Step.before(len(self._cached), self.draft.device)

        def expand(index_T: Tensor, rows_T: Tensor) -> Tensor:
            nonlocal step
            step = step.descend(rows_T)
            ids_T = index_T if self.shared_vocabulary is None else self._draft_ids_W[index_T]
            logits_TV: Tensor = self.head(self.layers.level(ids_T.unsqueeze(0), step)[0])
            return logits_TV if self.shared_vocabulary is None else logits_TV[:, self._draft_ids_W]

        index_N, tree, probs_NW = shape.grow(logits_1W, expand, sampling, generator)
        if step.positions:
            self.layers.crop(len(step.positions))
        if self.shared_vocabulary is None:
            return Proposal(index_N.tolist(), probs_NW, tree)
        probs_NV = None if probs_NW is None else self._over_target_vocabulary(probs_NW)
        return Proposal(self._target_ids_W[index_N].tolist(), probs_NV, tree)

    def batched(self) -> BatchProposer:
        from specdistill.methods.draft_model.batch_proposer import BatchDraftModel  # which is made of this class

        return BatchDraftModel(self)

    def _forward(self, ids_1T: Tensor) -> Tensor:
        """Logits [1, W] of the token after the last of the new ones."""
        logits_1V: Tensor = self.head(self.layers(ids_1T)[:, -1])
        return logits_1V if self.shared_vocabulary is None else logits_1V[:, self._draft_ids_W]

    def _is_unsure(self, logits_1W: Tensor, sampling: Sampling) -> bool:
        if self.confidence_threshold is None:
            return False
        probs_1W = (logits_1W.float() / (sampling.temperature or 1.0)).softmax(-1)
        return float(probs_1W.max()) < self.confidence_threshold

    def _proposal(self, chosen: list[Tensor], distributions: list[Tensor], num_fed: int) -> Proposal:
        """The proposal in the target's ids; notes that the first `num_fed` draft tokens are in the cache."""
        if not chosen:
            return Proposal([])
        index_K = torch.cat(chosen)
        probs_KW = torch.cat(distributions) if distributions else None
        if self.shared_vocabulary is None:
            tokens = fed = index_K.tolist()
        else:
            tokens, fed = self._target_ids_W[index_K].tolist(), self._draft_ids_W[index_K].tolist()
            probs_KW = None if probs_KW is None else self._over_target_vocabulary(probs_KW)
        self._cached += fed[:num_fed]
        return Proposal(tokens, probs_KW)

    def _over_target_vocabulary(self, probs_TW: Tensor) -> Tensor:
        assert self.shared_vocabulary is not None
        probs_TV = probs_TW.new_zeros(len(probs_TW), self.shared_vocabulary.target_vocab_size)
        return probs_TV.index_copy_(1, self._target_ids_W, probs_TW)

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
            same = self._draft_id_of.get(token)
            if same is None:
                self._lacking.append(token)
            else:
                self._encode_lacking()
                self._context.append(same)
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
        text = self._context[self._start :] if self._start else self._context
        most = min(len(self._cached), len(text) - 1)
        agrees = max(0, min(unchanged - self._start, most))
        while agrees < most and self._cached[agrees] == text[agrees]:
            agrees += 1
        surplus = len(self._cached) - agrees
        if surplus:
            self.layers.crop(surplus)
            del self._cached[agrees:]
        fresh = text[agrees:]
        self._cached += fresh
        return fresh

    def _refuse(self, length: int) -> NoReturn:
        got = f"a draft whose context is {self.max_positions} tokens for a sequence of {length}"
        raise UserError("eval.draft_context", got=got, expected="window, a draft with a longer context, or shorter sequences")
