"""A head drafts: chains or trees, for one sequence or several, from the target's features and its own hidden states.

Shapes: B rows, F freshly committed positions, H draft hidden size, K draft tokens, V target vocabulary, W draft vocabulary.
"""

from collections.abc import Sequence

from torch import Tensor

from specdistill.decoding.kv_cache import DraftKVCache
from specdistill.decoding.proposer import DecodingState, Proposal
from specdistill.decoding.readers import cache_size
from specdistill.decoding.sampling import Generators, Sampling, draw, uniforms
from specdistill.decoding.transformers_models import last_of, padded
from specdistill.decoding.tree import Step, TreeShape, at_nodes
from specdistill.methods.chains.compiled import CompiledSteps
from specdistill.methods.chains.head import Head
from specdistill.methods.feature_proposer import FeatureProposer
from specdistill.methods.layers import check_window


class HeadProposer(FeatureProposer):
    """Chains or trees: true features for committed positions, the head's own hidden state for the drafted ones."""

    depends_on_width = False

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self.head = head
        self.compiled = False
        self._graphs: dict[int, CompiledSteps] = {}  # by positions of the KV cache
        self._graph: CompiledSteps | None = None

    def passes(self, k: int) -> int:
        return k

    def begin(self, max_lengths: Sequence[int]) -> None:
        self._graph = None
        if not (self.compiled and len(max_lengths) == 1):
            super().begin(max_lengths)
            return
        size = cache_size(*max_lengths)
        if size not in self._graphs:
            cache = DraftKVCache(self.rotary, self.device, self.config.sliding_window)
            self._graphs[size] = CompiledSteps(self.head, cache, size)
        self._graph = self._graphs[size]
        self.cache = self._graph.cache
        self.cache.truncate([0])

    def propose(self, state: DecodingState, k: int, sampling: Sampling, generators: Generators) -> list[Proposal]:
        """Chains of k draft tokens, or as many as are enough."""
        check_window(self.head.config, k, key="eval.num_speculative_tokens")
        uniforms_BK = None if sampling.is_greedy else uniforms(k, generators).to(self.device)
        next_ids, hidden, committed = self._fresh(state)
        counts = state.num_fresh
        tokens: list[Tensor] = []
        distributions: list[Tensor] = []
        for step in range(k):
            logits_BW, hidden_BH = self._step(next_ids, hidden, counts, 1 + k)
            if uniforms_BK is None:
                token_B = self.target_ids_W[logits_BW.argmax(-1)]
            else:
                distributions.append(self.over_target_vocabulary(sampling.probabilities(logits_BW)))
                token_B = draw(distributions[-1], uniforms_BK[:, step])
            tokens.append(token_B)
            if self.is_enough and self.is_enough(sampling.confidence(logits_BW)):
                break
            next_ids, hidden, counts = token_B.unsqueeze(1), hidden_BH.unsqueeze(1), [1] * len(counts)
        self.cache.truncate(committed)  # drafted positions used the head's own states: forget them
        return self.chains(tokens, distributions)

    def propose_tree(
        self, state: DecodingState, shape: TreeShape, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        check_window(self.head.config, shape.depth, key="eval.tree.depth")
        next_ids, hidden, committed = self._fresh(state)
        logits_BW, hidden_BH = self._step(next_ids, hidden, state.num_fresh, 0)
        hidden_BTH, step = hidden_BH.unsqueeze(1), Step.before(committed, self.device)

        def expand(index_BT: Tensor, rows_BT: Tensor) -> Tensor:
            nonlocal hidden_BTH, step
            step = step.descend(rows_BT)
            rotary, above_BTH = self.cache.level(step), at_nodes(hidden_BTH, rows_BT)
            normed, hidden_BTH = self.head(self.target_ids_W[index_BT], above_BTH, rotary, self.cache)
            logits_BTW: Tensor = self.head.logits(normed)
            return logits_BTW

        drafts = shape.grow(logits_BW, expand, sampling, generators)
        self.cache.truncate(committed)
        return self.trees(drafts)

    def _step(self, next_ids_BT: Tensor, hidden_BTH: Tensor, counts: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
        """Logits [B, W] and the next hidden state [B, H] at each row's last position. width: of the wider graph; a prompt has none."""
        if self._graph is not None and self.cache.lengths != [0] and max(counts) <= width:
            return self._graph.read(next_ids_BT, hidden_BTH, 1 if max(counts) == 1 else width)
        normed, next_hidden = self.head(next_ids_BT, hidden_BTH, self.cache.extend(counts), self.cache)
        return self.head.logits(last_of(normed, counts)), last_of(next_hidden, counts)

    def _fresh(self, state: DecodingState) -> tuple[Tensor, Tensor, list[int]]:
        """What the first step reads: next tokens [B, F] and hidden states [B, F, H] of what was committed; and how much that is in all."""
        counts, committed = state.num_fresh, self.committed(state)  # pairs (x_{t+1}, g_t) exist for t < committed
        next_ids = padded([ids[-count:] for ids, count in zip(state.token_ids, counts, strict=True)], self.device)
        return next_ids, self.head.fuse(state.fresh.first(max(counts))), committed
