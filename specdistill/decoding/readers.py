"""Read sequences piece by piece with a target, over a KV cache that forgets rejected tokens.

`CachedTarget` reads any target, and several sequences in one pass. `CompiledTarget` reads one
sequence by a compiled graph (`eval.compile`). All its passes over proposals have one shape:

- Its KV cache is allocated at once. Slot s holds position s, and the mask hides the slots behind a
  query.
- The graph is told how many tokens are held. That number grows only by the tokens that are kept,
  so the next pass overwrites the rejected ones.
- A proposal of fewer than K tokens is padded.
- Prompts differ in length, and are read without the graph.

Shapes: T positions of a pass, D target hidden size, V vocabulary.
"""

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import DummyLayer, StaticLayer, StaticSlidingWindowLayer

from specdistill.common.errors import UserError, join_lines
from specdistill.decoding.kv_cache import BatchKVCache
from specdistill.decoding.transformers_models import (
    create_cache,
    gather_last,
    keep_path,
    run_target,
)
from specdistill.decoding.tree import ROOT, Tree, TreePass
from specdistill.targets.anatomy import CLASS_ERRORS, reads_alike
from specdistill.targets.cache import copy_state, roll_back
from specdistill.targets.frozen import Features, FrozenTarget, allow_graphs, capture

KEY = "eval.compile"
# Positions. Larger sizes are powers of two, so that sequences of similar length share one graph.
MIN_CACHE_SIZE = 256
# How often the check of a graph is run on CUDA. torch runs a new graph eagerly at first, and then
# records it. Only later passes replay the recording, and such a pass is compared.
NUM_WARM_UP_PASSES = 3
# Token ids of the sequence that shows whether a reader computes what the target computes. After the
# prompt a pass reads REJECTED_TOKENS: the root, which is kept, and a draft token, which is not.
# NEXT_TOKENS has the same root, and the token that replaces the rejected one.
PROMPT = [1, 2, 3]
REJECTED_TOKENS = [4, 5]
NEXT_TOKENS = [4, 6]


class CachedTarget:
    """Reads any target pass by pass.

    A pass over several sequences is as long as the longest of their proposals. The work of the
    reader itself does not grow with the length of a sequence.
    """

    def __init__(self, target: FrozenTarget, aux_layers: Sequence[int]) -> None:
        self.target = target
        self.aux_layers = aux_layers

    def begin(self, token_ids: Sequence[Sequence[int]]) -> tuple[Tensor, Features]:
        """Run the target over the prompt of each row, with a new KV cache.

        Args:
            token_ids: the prompt of each of the B rows.

        Returns:
            Logits [B, 1, V] after the last token of each prompt, and features [B, T, D] (hidden
            states) of all prompt tokens.
        """
        self.cache: Any = create_cache(self.target.config, len(token_ids), self.target.device)
        features = self.compute_features(token_ids)
        prompt_lengths = [len(row_ids) for row_ids in token_ids]
        last_B1D = gather_last(features.last_hidden, prompt_lengths).unsqueeze(1)
        return self.target.logits(last_B1D), features

    def compute_features(
        self, token_ids: Sequence[Sequence[int]], tree_pass: TreePass | None = None
    ) -> Features:
        """Run the target over new tokens of each row; return their features (hidden states).

        Args:
            token_ids: the new tokens of each row.
            tree_pass: the nodes' ancestors and positions, if the tokens are nodes of trees. None if
                each token follows the one before.
        """
        return run_target(self.target, token_ids, self.cache, self.aux_layers, tree_pass)

    def read(
        self, token_ids: Sequence[Sequence[int]], trees: Sequence[Tree | None] = (None,)
    ) -> tuple[Tensor, Features]:
        """Run the target over the last token of each sequence and its draft tokens.

        The caller then decides which draft tokens are accepted, and calls `keep`.

        Args:
            token_ids: for each row, its last token (the root) and the draft tokens.
            trees: the tree of each row's draft tokens; None for a chain.

        Returns:
            Logits [B, T, V] and features (hidden states) [B, T, D] after each of these tokens.
        """
        # `keep` will need the state before the pass to forget rejected tokens. Recurrent layers
        # cannot forget single tokens, so their state is copied if there is a draft token, which may
        # be rejected. A recurrent target reads one row at a time.
        self._token_ids = token_ids
        self._trees = trees
        self._snapshot = None
        if self.target.is_recurrent and len(token_ids[0]) > 1:
            self._snapshot = copy_state(self.cache)
        if isinstance(self.cache, BatchKVCache):
            self._num_cached = [*self.cache.lengths]
        else:  # any other cache holds a single row
            self._num_cached = [self.cache.get_seq_length()]

        # If one row has a tree, the chains of other rows are passed as trees with one branch, whose
        # parents are the root, node 0, node 1 and so on.
        tree_pass = None
        if any(trees):
            all_trees = []
            for tree, row_ids in zip(trees, token_ids, strict=True):
                all_trees.append(tree or Tree(tuple(range(ROOT, len(row_ids) - 2))))
            tree_pass = TreePass.cover_trees(all_trees, self._num_cached, self.target.device)
        features = self.compute_features(token_ids, tree_pass)
        return self.target.logits(features.last_hidden), features

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the accepted draft tokens of the last pass in the KV cache, and drop the others.

        For each row, that pass has read the last token of the sequence (the root) and the draft
        tokens. The root is always kept.

        Args:
            paths: for each row, the indices of the accepted draft tokens: the first tokens of a
                chain, or the nodes of a path through a tree.
        """
        if isinstance(self.cache, BatchKVCache):
            # Before the draft tokens, the cache holds what it held before the pass, and the root.
            num_before_draft = [num_cached + 1 for num_cached in self._num_cached]
            self.cache.keep_paths(num_before_draft, paths)
            return

        # Any other cache holds a single row.
        (path,) = paths
        (token_ids,) = self._token_ids
        num_draft_tokens = len(token_ids) - 1  # all but the root
        num_rejected = num_draft_tokens - len(path)
        if any(self._trees):
            keep_path(self.cache, num_draft_tokens, path)
        elif num_rejected and self._snapshot:
            # Recurrent states have read the rejected tokens. Go back to the state before the pass,
            # and read the root and the accepted tokens again.
            roll_back(self.cache, len(token_ids), self._snapshot)
            run_target(self.target, [token_ids[: 1 + len(path)]], self.cache)
        elif num_rejected:
            self.cache.crop(-num_rejected)


def round_up_cache_size(num_tokens: int) -> int:
    """Return how many positions to allocate in the KV cache for a sequence of `num_tokens` tokens.

    The next power of two, and at least MIN_CACHE_SIZE: each size needs a compiled graph of its own,
    so there should be few sizes.
    """
    return max(MIN_CACHE_SIZE, 1 << (num_tokens - 1).bit_length())


class CompiledTarget:
    """Reads one sequence by a compiled graph.

    Args:
        num_tokens: the most tokens of a pass.
        size: positions of the KV cache, draft tokens included.

    Raises:
        UserError: for a target with layers that do not hold a position in a slot, that does not
            compile, or that computes something else when compiled.
    """

    def __init__(
        self, target: FrozenTarget, aux_layers: Sequence[int], num_tokens: int, size: int
    ) -> None:
        self.target = target
        self.aux_layers = aux_layers
        self.num_tokens = num_tokens
        self.cache = create_static_cache(target, size)
        self._num_held = 0  # tokens
        # Hooks capture the outputs of the auxiliary layers in every pass. They are removed from the
        # target once this object is deleted.
        hooks = ExitStack()
        self._captured = hooks.enter_context(capture(target.layers, aux_layers))
        weakref.finalize(self, hooks.close)
        allow_graphs()
        self._graph = torch.compile(
            self._run_pass,
            fullgraph=True,
            dynamic=False,
            mode="reduce-overhead" if target.device.type == "cuda" else None,
        )
        self._check()

    def begin(self, token_ids: Sequence[Sequence[int]]) -> tuple[Tensor, Features]:
        """Run the target over the prompt, without the compiled graph; see `CachedTarget.begin`.

        Prompts differ in length, and the graph has a fixed one.
        """
        self._set_length(torch.tensor(0))  # forget the previous sequence
        ids = torch.tensor(token_ids, device=self.target.device)
        features = self.target.features(ids, self.aux_layers, past_key_values=self.cache)
        self._num_held = ids.shape[1]
        return self.target.logits(features.last_hidden[:, -1:]), features

    def read(
        self, token_ids: Sequence[Sequence[int]], trees: Sequence[Tree | None] = (None,)
    ) -> tuple[Tensor, Features]:
        """Run the compiled graph over the sequence's last token and its draft tokens.

        The tokens are padded to the fixed length of the graph.

        Args:
            token_ids: one row: its last token and the draft tokens.
            trees: one None, because a compiled graph reads chains only.

        Returns:
            Logits [1, T, V] and features (hidden states) [1, T, D] of the tokens without padding.
        """
        (row_ids,) = token_ids
        assert not any(trees) and len(row_ids) <= self.num_tokens, (trees, row_ids)
        padded_ids = [*row_ids, *[0] * (self.num_tokens - len(row_ids))]
        device = self.target.device
        ids_1T = torch.tensor([padded_ids], device=device)
        # The graph takes the number of cached tokens as a tensor. For each int, torch would compile
        # another graph.
        num_held = torch.tensor(self._num_held, device=device)
        logits, aux, last_hidden = self._graph(ids_1T, num_held)
        return logits[:, : len(row_ids)], Features(aux, last_hidden).first(len(row_ids))

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the root and the accepted draft tokens of the last pass.

        Only their number is stored. The next pass overwrites the rejected tokens after them.

        Args:
            paths: one row: the indices of the accepted draft tokens.
        """
        self._num_held += 1 + len(paths[0])

    def _run_pass(
        self, ids_1T: Tensor, length: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """Run the target over padded tokens that follow `length` cached positions.

        This is the function that `torch.compile` compiles.

        Returns:
            The logits, the outputs of the auxiliary layers, and the last hidden states.
        """
        self._set_length(length)
        output = self.target.backbone(input_ids=ids_1T, past_key_values=self.cache, use_cache=True)
        return (
            self.target.logits(output.last_hidden_state),
            tuple(self._captured[layer] for layer in self.aux_layers),
            output.last_hidden_state,
        )

    def _set_length(self, length: Tensor) -> None:
        """Tell each layer of the cache how many positions it holds, so that later ones are unused.

        The number is written into each layer's tensor, which the compiled graph reads. Layers of
        another class (`DummyLayer`) hold no positions of their own.
        """
        layer: Any
        for layer in self.cache.layers:
            if isinstance(layer, StaticLayer):
                layer.cumulative_length.copy_(length)

    @torch.inference_mode()
    def _check(self) -> None:
        """Compile the graph, and check that it computes the same hidden states as the target.

        The graph reads a short sequence, with a rejected draft token and with padding. An ordinary
        pass over the same sequence must give the same hidden state.

        Raises:
            UserError: if the graph cannot be compiled, or gives other hidden states.
        """
        target = self.target

        # Read the prompt, and then the root with a draft token. Reject the draft token, and read
        # the next token in its place. (In plain decoding, `num_tokens` is 1, and there is no draft
        # token.)
        # On CUDA all this is repeated, so that the compared pass replays the recorded graph.
        root, next_token = NEXT_TOKENS
        try:
            for _ in range(NUM_WARM_UP_PASSES if target.device.type == "cuda" else 1):
                self.begin([PROMPT])
                self.read([REJECTED_TOKENS[: self.num_tokens]])  # the root and the draft token
                self.keep([[]])  # keeps the root, and no draft token
                _, features = self.read([[next_token]])
        except torch.OutOfMemoryError:  # says nothing about the model class
            raise
        except CLASS_ERRORS as error:
            # The model class does not accept the cache, or its graph breaks, or this machine has
            # no compiler.
            raise UserError(
                KEY,
                got=(
                    f"true for {target.name}, a {type(target.model).__name__}:"
                    f" {join_lines(str(error))[:160]}"
                ),
                expected="false for this target, or on this machine",
            ) from error

        # Compare the hidden state after the last token with that of one ordinary pass.
        _, expected = CachedTarget(target, ()).begin([[*PROMPT, root, next_token]])
        if not reads_alike(features.last_hidden[0], expected.last_hidden[0, -1:]):
            raise UserError(
                KEY,
                got=(
                    f"true for {target.name}, a {type(target.model).__name__}, whose compiled"
                    " passes give other hidden states than its ordinary passes"
                ),
                expected=(
                    "false for this target: its outputs may depend on the padding that compiled"
                    " passes add to each proposal"
                ),
            )


def create_static_cache(target: FrozenTarget, size: int) -> StaticCache:
    """Return an empty KV cache for compiled passes, with `size` preallocated positions.

    Even layers with a sliding window hold all positions, so that the slot of a token is its
    position. The attention mask applies the window.

    Raises:
        UserError: if the target has other layers than full or sliding-window attention.
    """
    cache = StaticCache(target.config, max_cache_len=size)
    cache.layers = [
        StaticLayer(size) if type(layer) is StaticSlidingWindowLayer else layer
        for layer in cache.layers
    ]
    # A `DummyLayer` holds nothing: its layer needs no cache, or uses that of another layer.
    other_kinds = {type(layer).__name__ for layer in cache.layers}
    other_kinds -= {StaticLayer.__name__, DummyLayer.__name__}
    if other_kinds:
        raise UserError(
            KEY,
            got=(
                f"true for {target.name}, which has layers of kind {', '.join(sorted(other_kinds))}"
            ),
            expected="false: compiled passes need full attention or a sliding window",
        )
    return cache


SequenceReader = CachedTarget | CompiledTarget
