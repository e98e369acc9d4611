"""How a target reads a sequence piece by piece, over a KV cache that forgets what was rejected: pass by pass, or by one compiled graph; and
several sequences, whose passes are one.

Of a `CompiledTarget` all passes over proposals have one shape (`eval.compile`). Its KV cache is allocated whole: slot s holds position s,
and the mask hides what lies behind a query. The graph is told how many tokens are held, so forgetting the rejected ones is counting: the
next pass writes over them. A proposal of fewer than K tokens is padded. Prompts differ in length; they are read uncompiled.

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

from specdistill.decoding.kv_cache import BatchKVCache
from specdistill.decoding.transformers_models import cache_of, keep_path, last_of, read
from specdistill.decoding.tree import ROOT, Step, Tree
from specdistill.errors import UserError, one_line
from specdistill.targets.anatomy import CLASS_ERRORS, reads_alike
from specdistill.targets.cache import roll_back, snapshot
from specdistill.targets.frozen import Features, FrozenTarget, allow_graphs, capture

KEY = "eval.compile"
LEAST_SIZE = 256  # positions
WARM_UP = 3  # passes before CUDA graphs are replayed
PROMPT, REJECTED, NEXT = (
    [1, 2, 3],
    [4, 5],
    [4, 6],
)  # of the sequence that shows whether the graph computes the target


class CachedTarget:
    """Any target, pass by pass; of several sequences a pass is as long as the longest of their proposals. What a pass costs besides the
    target's own work does not depend on a sequence's length.
    """

    def __init__(self, target: FrozenTarget, aux_layers: Sequence[int]) -> None:
        self.target = target
        self.aux_layers = aux_layers

    def begin(self, token_ids: Sequence[Sequence[int]]) -> tuple[Tensor, Features]:
        """Read the prompt of each row: logits [B, 1, V] after its last token, and features [B, T, D] of all."""
        self.cache: Any = cache_of(self.target.config, len(token_ids), self.target.device)
        features = self.features(token_ids)
        last_B1D = last_of(features.last_hidden, [*map(len, token_ids)]).unsqueeze(1)
        return self.target.logits(last_B1D), features

    def features(self, token_ids: Sequence[Sequence[int]], step: Step | None = None) -> Features:
        """Of tokens that continue each row's cached ones, as a chain or as the nodes of a tree."""
        return read(self.target, token_ids, self.cache, self.aux_layers, step)

    def read(
        self, token_ids: Sequence[Sequence[int]], trees: Sequence[Tree | None] = (None,)
    ) -> tuple[Tensor, Features]:
        """Read each sequence's last token and the draft tokens proposed after it, a chain or the nodes of a tree.

        Returns logits [B, T, V] and features [B, T, D].
        """
        self._last, self._trees = token_ids, trees
        self._before = (
            snapshot(self.cache) if self.target.is_recurrent and len(token_ids[0]) > 1 else None
        )
        self._held = (
            [*self.cache.lengths]
            if isinstance(self.cache, BatchKVCache)
            else [self.cache.get_seq_length()]
        )
        step = None
        if any(trees):
            chains = (Tree(tuple(range(ROOT, len(row) - 2))) for row in token_ids)
            all_trees = [tree or chain for tree, chain in zip(trees, chains, strict=True)]
            step = Step.whole(all_trees, self._held, self.target.device)
        features = self.features(token_ids, step)
        return self.target.logits(features.last_hidden), features

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Forget the draft tokens read last but those of these indices: a chain's first, or a path of the tree."""
        if isinstance(self.cache, BatchKVCache):
            self.cache.keep_paths([held + 1 for held in self._held], paths)
            return
        (path,), (last,) = paths, self._last
        num_rejected = len(last) - 1 - len(path)
        if any(self._trees):
            keep_path(self.cache, len(last) - 1, path)
        elif num_rejected and self._before:
            # Recurrent states have read what is rejected: back to before it, and over what is kept again.
            roll_back(self.cache, len(last), self._before)
            read(self.target, [last[: 1 + len(path)]], self.cache)
        elif num_rejected:
            self.cache.crop(-num_rejected)


def cache_size(num_tokens: int) -> int:
    """Positions that are allocated for a sequence: a power of two, so that few sizes are compiled."""
    return max(LEAST_SIZE, 1 << (num_tokens - 1).bit_length())


class CompiledTarget:
    """`CachedTarget` by one graph: `read` takes up to `num_tokens` tokens, within a KV cache of `size` positions, drafted ones included.

    Raises UserError for a target with layers that do not hold a position in a slot, that does not compile, or computes something else then.
    """

    def __init__(
        self, target: FrozenTarget, aux_layers: Sequence[int], num_tokens: int, size: int
    ) -> None:
        self.target = target
        self.aux_layers = aux_layers
        self.num_tokens = num_tokens
        self.cache = static_cache(target, size)
        self._length = 0  # tokens held
        hooks = ExitStack()
        self._captured = hooks.enter_context(capture(target.layers, aux_layers))
        weakref.finalize(self, hooks.close)
        allow_graphs()
        mode = "reduce-overhead" if target.device.type == "cuda" else None
        self._graph = torch.compile(self._pass, fullgraph=True, dynamic=False, mode=mode)
        self._check()

    def begin(self, token_ids: Sequence[Sequence[int]]) -> tuple[Tensor, Features]:
        self._set_length(torch.tensor(0))
        ids = torch.tensor(token_ids, device=self.target.device)
        features = self.target.features(ids, self.aux_layers, past_key_values=self.cache)
        self._length = ids.shape[1]
        return self.target.logits(features.last_hidden[:, -1:]), features

    def read(
        self, token_ids: Sequence[Sequence[int]], trees: Sequence[Tree | None] = (None,)
    ) -> tuple[Tensor, Features]:
        (given,) = token_ids
        assert not any(trees) and len(given) <= self.num_tokens, (trees, given)
        filled = [*given, *[0] * (self.num_tokens - len(given))]
        ids, length = (
            torch.tensor(numbers, device=self.target.device) for numbers in ([filled], self._length)
        )
        logits, aux, last_hidden = self._graph(ids, length)
        return logits[:, : len(given)], Features(aux, last_hidden).first(len(given))

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        self._length += 1 + len(paths[0])

    def _pass(self, ids_1T: Tensor, length: Tensor) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        self._set_length(length)
        output = self.target.backbone(input_ids=ids_1T, past_key_values=self.cache, use_cache=True)
        aux = tuple(self._captured[layer] for layer in self.aux_layers)
        return self.target.logits(output.last_hidden_state), aux, output.last_hidden_state

    def _set_length(self, length: Tensor) -> None:
        layer: Any
        for layer in self.cache.layers:
            if isinstance(layer, StaticLayer):
                layer.cumulative_length.copy_(length)

    @torch.inference_mode()
    def _check(self) -> None:
        """A rejection and a padded pass on a short sequence. Compiles."""
        target = self.target
        try:
            for _ in range(WARM_UP if target.device.type == "cuda" else 1):
                self.begin([PROMPT])
                self.read([REJECTED[: self.num_tokens]])
                self.keep([[]])
                _, found = self.read([NEXT[1:]])
        except torch.OutOfMemoryError:
            raise
        except CLASS_ERRORS as error:  # a cache that the class does not take, a graph that breaks, a compiler that is missing
            got = f"true for {target.name}, a {type(target.model).__name__}: {one_line(str(error))[:160]}"
            raise UserError(
                KEY, got=got, expected="false for this target, or on this machine"
            ) from error
        whole = CachedTarget(target, ())
        _, expected = whole.begin([[*PROMPT, *NEXT]])
        if not reads_alike(found.last_hidden[0], expected.last_hidden[0, -1:]):
            got = f"true for {target.name}, a {type(target.model).__name__}, which reads padded proposals differently"
            raise UserError(KEY, got=got, expected="false for this target")


def static_cache(target: FrozenTarget, size: int) -> StaticCache:
    """An empty KV cache of `size` positions. Full layers even for sliding windows, as in `new_cache`."""
    cache = StaticCache(target.config, max_cache_len=size)
    cache.layers = [
        StaticLayer(size) if type(layer) is StaticSlidingWindowLayer else layer
        for layer in cache.layers
    ]
    if other := {type(layer).__name__ for layer in cache.layers} - {
        StaticLayer.__name__,
        DummyLayer.__name__,
    }:
        got = f"true for {target.name}, which has layers of kind {', '.join(sorted(other))}"
        raise UserError(
            KEY,
            got=got,
            expected="false: passes of one shape need full attention or a sliding window",
        )
    return cache


SequenceReader = CachedTarget | CompiledTarget
