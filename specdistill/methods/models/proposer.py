"""Draft with a small language model for a larger one.

The draft is any causal language model of transformers, with keys and values of its own. It is fast
because it leaves work out:

- Between rounds it keeps its cache. Positions of rejected tokens are cut off, and only the tokens
  that were committed since go through the model. That is usually one token, and two after a round
  that was accepted in full, because the last draft token was never fed.
- A step is the decoder layers and one row of the head.
- A draft token stays a tensor until the round ends.

A model that knows a mask (PARD, arXiv 2504.18583) drafts all K tokens in one step: K - 1 masks
follow the last token, and their keys and values are forgotten. A tree then needs no further step:
all nodes of a level have the same distribution of children.

Shapes: B rows, T positions of one step, H hidden size, V the target's vocabulary, W tokens that
both vocabularies hold, K draft tokens.

Most of the time of a draft model's step goes into launches, not into arithmetic. On two CPU cores
two layers of 128 take 0.70 ms in transformers, and 0.39 ms in `LlamaLayers`, which is built of the
parts of draft heads. The tests compare it with transformers' own model, which runs all other
architectures.
"""

import itertools
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdistill.common.errors import UserError
from specdistill.decoding.kv_cache import DraftKVCache
from specdistill.decoding.proposer import DecodingState, Proposal
from specdistill.decoding.sampling import Generators, Sampling
from specdistill.decoding.transformers_models import (
    TransformersLayers,
    check_batchable,
    gather_last,
    pad_rows,
)
from specdistill.decoding.tree import TreePass, TreeShape
from specdistill.methods.feature_proposer import TokenProposer
from specdistill.methods.layers import PlainLayer
from specdistill.methods.models.vocabulary import SharedVocabulary
from specdistill.targets.anatomy import examine_model


class LlamaLayers(nn.Module):
    """The layers of a plain Llama, faster than `TransformersLayers`, on the model's own weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take over the weights of a model for which `is_plain_llama` holds."""
        super().__init__()
        assert is_plain_llama(model), model.config
        config: Any = model.config
        decoder = model.get_decoder()

        # Build the modules without memory, and let them share the tensors of the model
        # (`assign=True`).
        self.rotary = decoder.rotary_emb
        with torch.device("meta"):
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(
                PlainLayer(config, index) for index in range(config.num_hidden_layers)
            )
            self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.load_state_dict(decoder.state_dict(), assign=True)

    def begin(self, num_rows: int) -> None:
        """Start `num_rows` new sequences with an empty KV cache."""
        # A rotary embedding takes hidden states and positions, but reads only the dtype and device
        # of the hidden states. So a weight of the norm is passed in their place.
        norm_weight = self.norm.weight
        self.cache = DraftKVCache(num_rows, partial(self.rotary, norm_weight), norm_weight.device)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget all but the first lengths[b] tokens of each row."""
        self.cache.truncate(lengths)

    def forward(
        self, ids_BT: Tensor, counts: Sequence[int], level: TreePass | None = None
    ) -> Tensor:
        """Run new tokens, and return their hidden states [B, T, H] after the final norm.

        Args:
            ids_BT: [B, T], the ids of up to T new tokens in each of B rows.
            counts: how many of the T tokens of each row are valid; the others are padding.
            level: describes the tokens if they are one level of each row's tree; None if they are a
                chain that continues the row.
        """
        rotary = self.cache.begin_level(level) if level else self.cache.begin_chain(counts)
        hidden = self.embed_tokens(ids_BT)
        for layer in self.layers:
            hidden = layer(hidden, rotary, self.cache)
        normed: Tensor = self.norm(hidden)
        return normed


def is_plain_llama(model: PreTrainedModel) -> bool:
    """Return whether `LlamaLayers` computes the same as the model.

    This holds for a Llama without quantization and biases, with SiLU, and with rotary angles that
    do not depend on a sequence's length. The types `dynamic` and `longrope` do depend on it.
    """
    config = model.config
    return (
        config.model_type == "llama"
        and getattr(config, "quantization_config", None) is None
        and not config.attention_bias
        and not config.mlp_bias
        and config.hidden_act == "silu"
        and config.rope_parameters.get("rope_type", "default") not in ("dynamic", "longrope")
    )


class DraftText:
    """A sequence in the draft's own tokens, and the tokens that its KV cache holds.

    Attributes:
        vocabulary: the tokens that draft and target share; None if all tokens are the same.
        ids: the sequence so far, in the draft's tokens.
        cached: the tokens whose keys and values the cache holds.
    """

    def __init__(self, vocabulary: SharedVocabulary | None) -> None:
        self.vocabulary = vocabulary
        self.ids: list[int] = []
        self.cached: list[int] = []
        self._num_final = 0  # so many of the first `ids` can no longer change
        self._num_read = 0  # so many tokens of the target's sequence were read
        # Target tokens at the end of the sequence that the draft's vocabulary lacks.
        self._untranslated: list[int] = []

    def read(self, token_ids: Sequence[int]) -> int:
        """Extend `ids`, the sequence in the draft's tokens, by the target's new tokens.

        Target tokens that the draft lacks are encoded in the draft's own tokens. Neighbouring
        tokens of this kind are encoded together, so their encoding may change when another one
        follows.

        Args:
            token_ids: the whole sequence, in the target's tokens.

        Returns:
            The length of the prefix of `ids` that this call has left unchanged.
        """
        # Find the target's new tokens. The first `_num_final` of the draft's ids can no longer
        # change. If draft and target have the same tokens, nothing has to be translated.
        new_tokens = token_ids[self._num_read :]
        self._num_read = len(token_ids)
        num_unchanged = self._num_final
        if self.vocabulary is None:
            self.ids += new_tokens
            self._num_final = len(self.ids)
            return num_unchanged

        # Translate token by token. Tokens that the draft lacks are collected, and encoded together
        # at the next shared token. Tokens that still wait at the end of the sequence are encoded
        # now, too, but this encoding is not final: the next token may have to be encoded with them.
        for token in new_tokens:
            draft_ids = self.vocabulary.draft_ids_of.get(token)
            if draft_ids is None:
                self._untranslated.append(token)
            else:
                self._encode_untranslated(self.vocabulary)
                self.ids += draft_ids
                self._num_final = len(self.ids)
                self._untranslated = []
        self._encode_untranslated(self.vocabulary)
        return num_unchanged

    def _encode_untranslated(self, vocabulary: SharedVocabulary) -> None:
        """Encode the target tokens in `_untranslated`, and put the result at the end of `ids`.

        These are the last tokens that were read. The draft's vocabulary lacks them, so their text
        is encoded in the draft's tokens, all of it together. If the next token is lacking, too, it
        joins them, and the encoding may change. So `ids` has two parts. The first `_num_final` ids
        never change. The ids after them are the encoding that the call before has made, and this
        call replaces them.
        """
        self.ids[self._num_final :] = (
            vocabulary.encode_for_draft(self._untranslated) if self._untranslated else []
        )

    def take_uncached(self, num_unchanged: int) -> list[int]:
        """Return the ids that must be fed to the draft, and note them as cached.

        These are all ids after the part that the cache already holds, and at least the last one.
        Cached draft tokens that the target rejected differ from the sequence, so they are replaced.

        Args:
            num_unchanged: how many of the first ids are unchanged, as `read` returned it.
        """
        # Find the longest common prefix of the cached tokens and the sequence. The unchanged ids
        # need no comparison, so it begins after them. The last token is never part of the prefix:
        # it is fed again, because the draft begins with the logits after it.
        max_prefix = min(len(self.cached), len(self.ids) - 1)
        prefix = max(0, min(num_unchanged, max_prefix))
        while prefix < max_prefix and self.cached[prefix] == self.ids[prefix]:
            prefix += 1
        uncached_ids = self.ids[prefix:]
        self.cached[prefix:] = uncached_ids
        return uncached_ids


class DraftModelProposer(TokenProposer[PreTrainedModel]):
    """Drafts chains or trees with a language model.

    If the target is greedy, the draft tokens are the model's best tokens. Otherwise they are drawn
    from the model's distribution.

    Args:
        draft: the model.
        vocabulary: the tokens that draft and target share, if their ids differ. The distribution is
            then restricted to these tokens. None if the ids are the same.
        mask_token_id: the draft's token in the place of tokens that are not drafted yet. None for a
            model that drafts token by token.
        target_max_length: the longest sequence of the target, in tokens.
        key: the recipe key that the draft came from, which errors name.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        *,
        vocabulary: SharedVocabulary | None = None,
        mask_token_id: int | None = None,
        target_max_length: int = sys.maxsize,
        key: str = "eval.draft",
    ) -> None:
        # Tell the base class which of the target's tokens the distributions span.
        target_tokens = (
            ()
            if vocabulary is None
            else (vocabulary.target_ids_W.to(draft.device), vocabulary.target_vocab_size)
        )
        super().__init__(draft, *target_tokens)
        self.key = key
        self.head = examine_model(draft, "the draft", key=key).head

        # A plain Llama runs in the faster layers.
        self.layers = LlamaLayers(draft) if is_plain_llama(draft) else TransformersLayers(draft)
        self.shared_vocabulary = vocabulary
        self.mask_token_id = mask_token_id

        # Read how long a sequence the draft can take. Without a limit in its config, only the
        # target's limit counts.
        context_length = getattr(draft.config.get_text_config(), "max_position_embeddings", None)
        self.max_positions: int = sys.maxsize if context_length is None else context_length
        self.target_max_length = target_max_length

        # Reports state the settings with which the tokens are translated.
        if vocabulary:
            self.settings["heterogeneous_vocab"] = True
            if vocabulary.replacements:
                self.settings["token_replacements"] = dict(vocabulary.replacements)
            self._draft_ids_W = vocabulary.draft_ids_W.to(draft.device)
        self.rows: list[DraftText] = []
        self._is_batchable = isinstance(self.layers, LlamaLayers)

    def count_passes(self, k: int) -> int:
        """Return the draft's forward passes in a round of k draft tokens."""
        return k if self.mask_token_id is None else min(k, 1)

    def begin(self, max_lengths: Sequence[int]) -> None:
        """Start new sequences.

        Args:
            max_lengths: the most tokens of each row, draft tokens included.

        Raises:
            UserError: if there are several sequences and the draft cannot be batched, or if the
                draft's context is too short for a sequence.
        """
        # Whether the draft can be batched is checked only once.
        if len(max_lengths) > 1 and not self._is_batchable:
            check_batchable(self.draft, "the draft")
            self._is_batchable = True

        # `max_lengths` includes draft tokens. Those beyond the target's context are never accepted,
        # so the draft's context need not hold them.
        longest = min(max(max_lengths), self.target_max_length)
        if longest > self.max_positions:
            self._raise_context_error(longest)
        self.rows = [DraftText(self.shared_vocabulary) for _ in max_lengths]
        self.layers.begin(len(max_lengths))

    def propose(
        self, state: DecodingState, k: int, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        """Draft a chain of up to k tokens after each of B rows.

        A row with little room in the draft's context gets a shorter chain. Once this chain is
        complete, the row is fed no more tokens and waits for the other rows.
        """
        # Find the tokens that each row must be fed, and its number of draft steps. A model with a
        # mask token computes the logits [B, K, W] of all K steps in one pass (W: tokens that draft
        # and target share). For other models `logits_BKW` is None.
        feeds, steps = self._begin_round(state, k)
        feeds_BT = pad_rows(feeds, self.draft.device)
        logits_BKW = self._draft_in_one_pass(feeds, steps)
        fed: list[Tensor] = []  # the draft tokens [B] that were fed, step by step

        def next_logits(step: int, index_B: Tensor | None) -> Tensor:
            """Return the logits [B, W] of one draft step.

            A model with a mask token has computed them already. Another model is fed the tokens of
            the step before.

            Args:
                step: the number of the draft step.
                index_B: [B], the tokens that the step before drafted, as indices into the W tokens
                    that draft and target share. None in the first step.
            """
            if logits_BKW is not None:
                return logits_BKW[:, step]
            if index_B is None:
                # Begin with the tokens of the sequences that the KV cache lacks.
                ids_BT = feeds_BT
                counts = [len(feed) for feed in feeds]
            else:
                draft_ids_B = self._select_draft_ids(index_B)
                fed.append(draft_ids_B)
                ids_BT = draft_ids_B.unsqueeze(1)
                # Rows whose chain is complete are fed no token.
                counts = [int(step < num_steps) for num_steps in steps]
            return self._compute_logits(gather_last(self.layers(ids_BT, counts), counts))

        # Draft the chains, step by step.
        proposals = self.chains(k, sampling, generators, next_logits, steps)

        # The cache also holds the draft tokens that were fed: all but the last of each chain.
        if fed:
            # A row stops after its own number of steps, so it has fewer cached tokens than others.
            fed_ids = torch.stack(fed, 1).tolist()
            for row, ids, num_steps in zip(self.rows, fed_ids, steps, strict=True):
                row.cached += ids[: max(0, num_steps - 1)]
        return proposals

    def propose_tree(
        self, state: DecodingState, shape: TreeShape, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        """Draft a tree of the given shape after each of B rows.

        All trees have as many levels as fit into the draft's context in the row with the least
        room. The tree's nodes leave the cache at the end, so accepted ones are fed again in the
        next round.
        """
        # Find the tokens that each row's cache lacks. A row whose text has no tokens in the draft's
        # vocabulary gets an empty list; if all rows are like this, nothing is drafted.
        feeds, depths = self._begin_round(state, shape.depth)
        if not any(feeds):
            return [Proposal([])] * len(feeds)
        counts = [len(feed) for feed in feeds]
        num_cached = [len(row.cached) for row in self.rows]

        # A model with a mask token computes the logits [B, K, W] of all K levels in one pass (W:
        # tokens that draft and target share). Another model computes those of the first level here
        # (K = 1). `expand` then runs one pass for each further level.
        logits_BKW = self._draft_in_one_pass(feeds, depths)
        if logits_BKW is None:
            hidden_BTH = self.layers(pad_rows(feeds, self.draft.device), counts)
            logits_BKW = self._compute_logits(gather_last(hidden_BTH, counts)).unsqueeze(1)
        later_levels = itertools.count(1)  # the numbers of the levels after the first, which is 0
        # The nodes that the draft has read so far, at first none. Not used with a mask token.
        tree_pass = TreePass.begin_at_root(num_cached, self.draft.device)

        def expand(index_BT: Tensor, parents_BT: Tensor) -> Tensor:
            """Return the draft's logits [B, T, W] after the T nodes of the last level of each tree.

            It is called once for each level after the first, in order.

            Args:
                index_BT: [B, T], the tokens of the nodes of the last level, as indices into the W
                    tokens that draft and target share.
                parents_BT: [B, T], the index of each node's parent in the level before.
            """
            nonlocal tree_pass
            num_nodes = parents_BT.shape[1]
            # A model with a mask token has computed the logits already. Those after all nodes of a
            # level are the same.
            if self.mask_token_id is not None:
                level_logits_BW = logits_BKW[:, next(later_levels)]
                return level_logits_BW.unsqueeze(1).expand(-1, num_nodes, -1)
            # Another model runs all T nodes of each row, none of which is padding.
            tree_pass = tree_pass.add_level(parents_BT)
            node_counts = [num_nodes] * len(parents_BT)
            return self._compute_logits(
                self.layers(self._select_draft_ids(index_BT), node_counts, tree_pass)
            )

        # Rows without a tree must not draw from their generators, so that their later random
        # numbers stay the same. They get a generator that nobody else uses.
        row_generators = [
            generator if feed else torch.Generator()
            for generator, feed in zip(generators, feeds, strict=True)
        ]

        # Grow the trees, cut to the depth that all rows have room for. Then drop the tree's
        # positions from the cache.
        drafts = shape.cut(min(depth for depth in depths if depth)).grow(
            logits_BKW[:, 0], expand, sampling, row_generators
        )
        self.layers.truncate(num_cached)
        return [
            self.build_proposal(index_N, probs_NW, tree) if feed else Proposal([])
            for feed, (index_N, tree, probs_NW) in zip(feeds, drafts, strict=True)
        ]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, and their keys and values."""
        self.rows = [self.rows[row] for row in rows]
        self.layers.cache.keep(rows)

    def _begin_round(self, state: DecodingState, k: int) -> tuple[list[list[int]], list[int]]:
        """Find the tokens that each row must be fed, and cut rejected tokens off the cache.

        Args:
            state: the sequences in the target's tokens.
            k: the most tokens to draft.

        Returns:
            For each row the tokens that must be fed first, and the number of tokens that can be
            drafted. A row whose text has no tokens in the draft's vocabulary gets [] and 0.

        Raises:
            UserError: if a sequence is longer than the draft's context.
        """
        feeds = []
        steps = []
        for row, token_ids in zip(self.rows, state.token_ids, strict=True):
            # Translate the target's new tokens into ids of the draft, and add them to `row.ids`.
            num_unchanged = row.read(token_ids)
            # The draft is fed the sequence and all draft tokens but the last one. So one more token
            # can be drafted than there are free positions in the draft's context, hence the + 1.
            # A sequence that fits into the target's context can still be too long for the draft's,
            # because the draft's tokenizer may need more tokens for the same text.
            room = self.max_positions - len(row.ids) + 1
            if room < 1:
                self._raise_context_error(len(row.ids))
            steps.append(min(k, room) if row.ids else 0)
            feeds.append(row.take_uncached(num_unchanged) if row.ids else [])

        # Cut rejected tokens off the KV cache. `row.cached` lists the tokens that the cache will
        # hold after the feed: `take_uncached` has already put the tokens of the feed at its end. So
        # the tokens before the feed are those that the cache keeps now.
        num_kept = [len(row.cached) - len(feed) for row, feed in zip(self.rows, feeds, strict=True)]
        self.layers.truncate(num_kept)
        return feeds, steps

    def _draft_in_one_pass(self, feeds: Sequence[list[int]], steps: Sequence[int]) -> Tensor | None:
        """Return the logits of all K draft steps from one pass, for a model with a mask token.

        Each row is fed its tokens and then masks. The result holds the logits after the row's last
        token and after each mask: [B, K, W], over the W tokens that draft and target share.

        Args:
            feeds: the tokens that each row is fed.
            steps: how many tokens are drafted for each row. Row b is fed steps[b] - 1 masks.

        Returns:
            The logits; None for a model that drafts token by token.
        """
        if self.mask_token_id is None or not any(steps):
            return None

        # Put steps[b] - 1 masks after the tokens of row b, and run all rows in one pass.
        rows = [
            feed + [self.mask_token_id] * (count - 1)
            for feed, count in zip(feeds, steps, strict=True)
        ]
        hidden_BTH = self.layers(pad_rows(rows, self.draft.device), [len(row) for row in rows])

        # Forget the masks.
        self.layers.truncate([len(row.cached) for row in self.rows])

        # Gather K states of each row: that of the last token before the masks, and the K - 1 states
        # after it. Rows with fewer than K draft steps have fewer masks. Their further states are
        # not read later, so any states will do: the clamp keeps the indices inside the tensor. A
        # row that was fed nothing has no draft steps, and its states are not read at all.
        last_B = torch.tensor([max(len(feed) - 1, 0) for feed in feeds], device=hidden_BTH.device)
        steps_K = torch.arange(max(steps), device=hidden_BTH.device)
        index_BK = (last_B.unsqueeze(1) + steps_K).clamp_max(hidden_BTH.shape[1] - 1)
        index_BKH = index_BK.unsqueeze(2).expand(-1, -1, hidden_BTH.shape[2])
        return self._compute_logits(hidden_BTH.gather(1, index_BKH))

    def _compute_logits(self, hidden_BH: Tensor) -> Tensor:
        """Return logits [B, W] for hidden states [B, H], or [B, K, W] for [B, K, H].

        W is the number of tokens that draft and target share. With the same vocabulary these are
        all tokens.
        """
        logits_BV: Tensor = self.head(hidden_BH)
        return logits_BV if self.shared_vocabulary is None else logits_BV[..., self._draft_ids_W]

    def _select_draft_ids(self, index: Tensor) -> Tensor:
        """Return the draft's ids of tokens that are given as indices into the W shared tokens."""
        return index if self.shared_vocabulary is None else self._draft_ids_W[index]

    def _raise_context_error(self, length: int) -> NoReturn:
        """Raise UserError for a sequence that is longer than the draft's context."""
        raise UserError(
            self.key,
            got=(
                f"a draft whose context is {self.max_positions} tokens for a sequence of"
                f" {length} tokens"
            ),
            expected="a draft with a longer context, or shorter sequences",
        )
