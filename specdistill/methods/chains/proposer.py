"""The proposer of heads: chains or trees, for one sequence or several.

A head drafts from the target's features and its own hidden states.

Shapes: B rows, T positions of a pass, F freshly committed positions, H draft hidden size, K draft
tokens, V target vocabulary, W draft vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdistill.decoding.kv_cache import DraftKVCache
from specdistill.decoding.proposer import DecodingState, Proposal
from specdistill.decoding.readers import round_up_cache_size
from specdistill.decoding.sampling import Generators, Sampling
from specdistill.decoding.transformers_models import gather_last, pad_rows
from specdistill.decoding.tree import TreePass, TreeShape, gather_nodes
from specdistill.methods.chains.head import Head
from specdistill.methods.feature_proposer import FeatureProposer
from specdistill.methods.layers import check_window
from specdistill.targets.frozen import allow_graphs


class CompiledSteps:
    """A head's passes over few tokens, compiled as graphs (`eval.compile`).

    There are two graphs: one over K + 1 tokens, which reads what was committed, and one over a
    single token.

    As for the target (see specdistill.decoding.readers), the KV cache of `size` positions is
    allocated as a whole, and an uncompiled pass reads the prompt into it. The graph is told how
    many positions are held. If fewer tokens were committed than the graph reads, they are padded.
    The next pass overwrites the slots of the padding.
    """

    def __init__(self, head: Head, cache: DraftKVCache, size: int) -> None:
        """Allocate the KV cache for `size` positions, and compile the pass of a head."""
        self.head = head
        self.logits = head.logits
        self.cache = cache
        cache.allocate(size)

        # Compile the pass once per width, with static shapes. On a GPU, torch's "reduce-overhead"
        # mode records CUDA graphs.
        allow_graphs()
        mode = "reduce-overhead" if self.logits.linear.weight.is_cuda else None
        self._graph = torch.compile(self._run_padded, fullgraph=True, dynamic=False, mode=mode)

    def read(self, next_ids_1T: Tensor, hidden_1TH: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Run the head over T <= `width` tokens with the compiled graph of `width` tokens.

        Args:
            next_ids_1T: the token after each position.
            hidden_1TH: the hidden states that the head reads, of size H.
            width: the fixed number of tokens of the graph.

        Returns:
            The logits [1, W] and the next hidden state [1, H], both after the last token.
        """
        count = next_ids_1T.shape[1]
        device = next_ids_1T.device
        # Pad the input to the width of the graph. These are new tensors instead of padded views,
        # because a graph is made for each memory layout.
        ids = next_ids_1T.new_zeros(1, width)
        hidden = hidden_1TH.new_zeros(1, width, hidden_1TH.shape[-1])
        ids[:, :count] = next_ids_1T
        hidden[:, :count] = hidden_1TH

        # A CUDA graph may only write to buffers whose address does not change.
        if device.type == "cuda":
            for buffer in self.cache.buffers:
                torch._dynamo.mark_static_address(buffer)

        # Run the graph. Numbers are passed as tensors: a graph would be made for each plain number.
        # Then forget the padding.
        (length,) = self.cache.lengths
        num_cached = torch.tensor(length, device=device)
        last = torch.tensor(count - 1, device=device)
        logits_1W, next_hidden_1H = self._graph(ids, hidden, num_cached, last)
        self.cache.truncate([length + count])
        return logits_1W, next_hidden_1H

    def _run_padded(
        self, ids_1T: Tensor, hidden_1TH: Tensor, num_cached: Tensor, last: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the head over padded tokens. This function is compiled.

        Args:
            ids_1T: the token after each of T positions.
            hidden_1TH: the hidden states that the head reads, of size H.
            num_cached: how many positions the cache holds.
            last: the last position that is not padding.

        Returns:
            The logits [1, W] and the next hidden state [1, H] at the position `last`.
        """
        rotary, slots = self.cache.begin_graph(num_cached, ids_1T.shape[1])
        normed, next_hidden = self.head(ids_1T, hidden_1TH, rotary, slots)
        # Of both outputs [1, T, H], only the last position is needed.
        normed_1H = normed.index_select(1, last.unsqueeze(0)).squeeze(1)
        next_hidden_1H = next_hidden.index_select(1, last.unsqueeze(0)).squeeze(1)
        return self.logits(normed_1H), next_hidden_1H


class HeadProposer(FeatureProposer[Head]):
    """The proposer of a head, for chains and trees.

    The head reads true features at committed positions, and its own hidden state at drafted ones.
    """

    def __init__(self, head: Head) -> None:
        """Prepare a head for decoding."""
        super().__init__(head)
        self.compiled = False  # whether passes for one sequence are compiled as graphs
        self._graphs: dict[int, CompiledSteps] = {}  # by the number of positions of the KV cache
        self._graph: CompiledSteps | None = None

    def begin(self, max_lengths: Sequence[int]) -> None:
        """Start new sequences with an empty KV cache, and choose compiled graphs if enabled.

        Args:
            max_lengths: the most tokens of each sequence, draft tokens included.
        """
        # Graphs are compiled for one sequence only.
        self._graph = None
        if not (self.compiled and len(max_lengths) == 1):
            super().begin(max_lengths)
            return

        # Reuse the graphs of an earlier sequence whose cache had the same size. Sizes are rounded
        # up, so that there are few of them. `truncate` forgets the earlier sequence.
        size = round_up_cache_size(*max_lengths)
        if size not in self._graphs:
            cache = DraftKVCache(1, self.rotary, self.device, self.config.sliding_window)
            self._graphs[size] = CompiledSteps(self.draft, cache, size)
        self._graph = self._graphs[size]
        self.cache = self._graph.cache
        self.cache.truncate([0])

    def propose(
        self, state: DecodingState, k: int, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        """Draft a chain of up to k tokens for each row, one pass of the head for each token.

        See `Proposer.propose` for the arguments.
        """
        check_window(self.draft.config, k, key="eval.num_speculative_tokens")
        # The first pass reads the tokens and features that were added since the last round.
        next_ids, hidden, num_committed = self._gather_fresh(state)
        counts = state.num_fresh

        def next_logits(step: int, index_B: Tensor | None) -> Tensor:
            """Run one pass of the head, and return its logits [B, W].

            `chains` calls this once for each draft token.

            Args:
                step: not used.
                index_B: the tokens that the pass before drafted, as indices among the draft's W
                    tokens. None in the first pass, which reads the new tokens of the round.
            """
            nonlocal next_ids, hidden, counts
            # After the first pass, each pass reads one token of each row: the one just drafted.
            if index_B is not None:
                next_ids = self.map_to_target(index_B).unsqueeze(1)
                counts = [1] * len(counts)
            # Compiled passes read at most 1 + k tokens. That is the most that a round adds: k
            # accepted ones and the target's own. If a lookup proposed in the rounds before, there
            # may be more; then the first pass runs uncompiled.
            logits_BW, hidden_BH = self._run_head(next_ids, hidden, counts, width=1 + k)
            hidden = hidden_BH.unsqueeze(1)
            return logits_BW

        proposals = self.chains(k, sampling, generators, next_logits)
        # At drafted positions the head read its own hidden states instead of the target's features.
        # So these positions are dropped from its KV cache.
        self.cache.truncate(num_committed)
        return proposals

    def propose_tree(
        self, state: DecodingState, shape: TreeShape, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        """Draft a tree of tokens for each row, one pass of the head for each level.

        See `TreeProposer.propose_tree` for the arguments.
        """
        check_window(self.draft.config, shape.depth, key="eval.tree.depth")
        # The first pass reads the tokens and features that were added since the last round, and
        # gives the candidates of the first level. Graphs are compiled for chains only, so it runs
        # without them (width 0).
        next_ids, hidden, num_committed = self._gather_fresh(state)
        logits_BW, hidden_BH = self._run_head(next_ids, hidden, state.num_fresh, width=0)
        hidden_BTH = hidden_BH.unsqueeze(1)
        tree_pass = TreePass.begin_at_root(num_committed, self.device)

        def expand(index_BT: Tensor, parents_BT: Tensor) -> Tensor:
            """Run one pass of the head; return its logits [B, T, W] after the T nodes of a level.

            `grow` calls this for one level after the other.

            Args:
                index_BT: the tokens of the nodes, as indices among the draft's W tokens.
                parents_BT: the parent of each node, as an index into the level before.
            """
            nonlocal hidden_BTH, tree_pass
            # A node sees its ancestors, and reads the hidden state that its parent returned.
            tree_pass = tree_pass.add_level(parents_BT)
            rotary = self.cache.begin_level(tree_pass)
            parent_hidden_BTH = gather_nodes(hidden_BTH, parents_BT)
            normed, hidden_BTH = self.draft(
                self.map_to_target(index_BT), parent_hidden_BTH, rotary, self.cache
            )
            return self.draft.logits(normed)

        # Grow the trees level by level, then forget all drafted positions.
        drafts = shape.grow(logits_BW, expand, sampling, generators)
        self.cache.truncate(num_committed)
        return [self.build_proposal(index_N, probs_NW, tree) for index_N, tree, probs_NW in drafts]

    def _run_head(
        self, next_ids_BT: Tensor, hidden_BTH: Tensor, counts: Sequence[int], width: int
    ) -> tuple[Tensor, Tensor]:
        """Run the head once; return logits and hidden state after the last position of each row.

        If compiling is enabled, there are two compiled graphs: one reads a single token, the other
        up to `width` tokens. Passes over more tokens, and over prompts, run uncompiled.

        Args:
            next_ids_BT: the token after each position [B, T].
            hidden_BTH: the hidden states that the head reads [B, T, H].
            counts: how many of the T positions are valid in each row.
            width: the most tokens that a compiled pass reads; 0: run uncompiled.

        Returns:
            Logits [B, W] over the draft's W tokens, and the next hidden states [B, H].
        """
        # Use a graph if the tokens fit into it. If the cache is still empty, this pass reads the
        # prompt, which is left out because its length varies.
        num_tokens = max(counts)
        is_prompt = self.cache.lengths == [0]
        if self._graph is not None and not is_prompt and num_tokens <= width:
            graph_width = 1 if num_tokens == 1 else width
            return self._graph.read(next_ids_BT, hidden_BTH, graph_width)

        # Rows with fewer positions than the longest are padded on the right.
        normed, next_hidden = self.draft(
            next_ids_BT, hidden_BTH, self.cache.begin_chain(counts), self.cache
        )
        return self.draft.logits(gather_last(normed, counts)), gather_last(next_hidden, counts)

    def _gather_fresh(self, state: DecodingState) -> tuple[Tensor, Tensor, list[int]]:
        """Return the input of the head at the positions that were added since the last round.

        Args:
            state: the sequences so far, with the target's features at the F new positions.

        Returns:
            The token after each position [B, F]; the hidden states [B, F, H]; and for each row, the
            number of positions that the target has read (`num_committed`).
        """
        # At a position, a head reads the target's features there, and the token after it. For
        # example, a row has the tokens 1 to 10. The target has read 1 to 9, of which 7 to 9 are
        # new. The tokens after these are 8 to 10: the last three of the row.
        counts = state.num_fresh
        num_committed = self.count_committed(state)
        next_ids = pad_rows(
            [ids[-count:] for ids, count in zip(state.token_ids, counts, strict=True)], self.device
        )
        return next_ids, self.draft.fuse(state.fresh.first(max(counts))), num_committed
