"""A target that reads one sequence piece by piece, over a KV cache that forgets what was rejected.

Shapes: T positions of one pass, D target hidden size, V vocabulary.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specdistill.decoding.transformers_models import keep_path, read
from specdistill.decoding.tree import Step, Tree
from specdistill.targets.cache import new_cache, roll_back, snapshot
from specdistill.targets.frozen import Features, FrozenTarget


class SequenceReader(Protocol):
    """`begin` reads a prompt. Then, round by round, `read` reads the sequence's last token and the draft tokens proposed after it, and
    `keep` says which of those the sequence continues with.
    """

    def begin(self, token_ids: Sequence[int]) -> tuple[Tensor, Features]:
        """Logits [1, 1, V] after the last token, and features [1, T, D] of all."""

    def read(self, token_ids: Sequence[int], tree: Tree | None = None) -> tuple[Tensor, Features]:
        """Logits [1, T, V] and features [1, T, D] of a chain, or of a tree's root and nodes."""

    def keep(self, path: Sequence[int]) -> None:
        """Forget the draft tokens read last but those of these indices: a chain's first, or a path of the tree."""


class CachedTarget:
    """A `SequenceReader` of any target. What a pass costs beside the target's own work does not depend on the sequence's length."""

    def __init__(self, target: FrozenTarget, aux_layers: Sequence[int]) -> None:
        self.target = target
        self.aux_layers = aux_layers

    def begin(self, token_ids: Sequence[int]) -> tuple[Tensor, Features]:
        self.cache = new_cache(self.target.config)
        features = read(self.target, token_ids, self.cache, self.aux_layers)
        return self.target.logits(features.last_hidden[:, -1:]), features

    def read(self, token_ids: Sequence[int], tree: Tree | None = None) -> tuple[Tensor, Features]:
        self._last, self._tree = token_ids, tree
        self._before = snapshot(self.cache) if self.target.is_recurrent and len(token_ids) > 1 else None
        step = Step.whole(tree, self.cache.get_seq_length(), self.target.device) if tree else None
        features = read(self.target, token_ids, self.cache, self.aux_layers, step)
        return self.target.logits(features.last_hidden), features

    def keep(self, path: Sequence[int]) -> None:
        num_drafted = len(self._last) - 1
        if self._tree:
            keep_path(self.cache, num_drafted, path)
        elif len(path) == num_drafted:
            pass
        elif self._before is None:
            self.cache.crop(len(path) - num_drafted)
        else:  # recurrent states have read what is rejected: back to before it, and over what is kept again
            roll_back(self.cache, len(self._last), self._before)
            read(self.target, self._last[: 1 + len(path)], self.cache)
