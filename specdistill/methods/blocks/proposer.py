"""The proposer of block drafters: chains or trees, for one sequence or several.

One pass over a block of masks drafts all tokens of a round.

Shapes: B rows, F freshly committed positions, H hidden size, K draft tokens, T nodes of a level, V
target vocabulary, W draft vocabulary, E width of a correction.

A tree needs no further pass. Without a correction all nodes of a level have the same distribution
of children (JetSpec, arXiv 2606.18394). With a correction each node has its own (PCTree, arXiv
2608.02123).
"""

import itertools

import torch
from torch import Tensor

from specdistill.common.errors import UserError
from specdistill.decoding.proposer import DecodingState, Proposal
from specdistill.decoding.sampling import Generators, Sampling
from specdistill.decoding.tree import TreeShape, gather_nodes
from specdistill.methods.blocks.module import BlockDraft
from specdistill.methods.feature_proposer import FeatureProposer


class BlockProposer(FeatureProposer[BlockDraft]):
    """The proposer of a block drafter, for chains and trees.

    The cache keeps keys and values of committed positions. The keys and values of a block are
    forgotten after its pass.
    """

    def __init__(self, draft: BlockDraft) -> None:
        """Prepare a draft for decoding."""
        super().__init__(draft)
        # If slots see each other, a wider block drafts other tokens.
        self.depends_on_width = not draft.config.is_causal
        self.settings = {"block_size": draft.config.block_size}

    def count_passes(self, k: int) -> int:
        """Return the draft's passes in a round: one, however many tokens are drafted."""
        return 1 if k else 0

    def propose(
        self, state: DecodingState, k: int, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        """Draft a chain of up to k tokens for each row, from one pass of the draft over a block.

        The positions of the block that predict a token are called slots here. See
        `Proposer.propose` for the arguments.
        """
        slots = self._run_block(state, k, key="eval.num_speculative_tokens")

        def next_logits(step: int, index_B: Tensor | None) -> Tensor:
            """Return the logits [B, W] of slot `step` of each row's block.

            `chains` calls this once for each draft token. If the draft is a DSpark draft, it adds a
            correction to the logits, which depends on the token drafted in the slot before.

            Args:
                step: the index of the slot.
                index_B: the tokens drafted in the slot before, as indices among the draft's W
                    tokens; None in the first slot.
            """
            # `compute_logits` is made for trees, in which a slot has T candidate tokens [B, T]. A
            # chain has one token for each slot, so T is 1.
            token_B1 = None if index_B is None else self.map_to_target(index_B).unsqueeze(1)
            return slots.compute_logits(step, token_B1)[:, 0]

        return self.chains(k, sampling, generators, next_logits)

    def propose_tree(
        self, state: DecodingState, shape: TreeShape, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        """Draft a tree of tokens for each row, from one pass of the draft over a block.

        Each slot of the block gives the candidates of one level of the tree. See
        `TreeProposer.propose_tree` for the arguments.
        """
        # Slot 0 gives the first level of the tree, slot 1 the second level, and so on. Each call of
        # `expand` reads the next slot.
        slots = self._run_block(state, shape.depth, key="eval.tree.depth")
        next_slots = itertools.count(1)

        def expand(index_BT: Tensor, parents_BT: Tensor) -> Tensor:
            """Return the logits [B, T, W] of the tokens that may follow each of T nodes.

            `grow` calls this for each level of the tree in turn; the T nodes are one level. All
            logits of the next level come from one position of the block, the next slot. So they are
            the same for all T nodes, unless the draft is a DSpark draft. DSpark adds a correction
            to the logits, which depends on the node's token. If the correction is an RNN, it
            depends on all tokens from the root to the node.

            Args:
                index_BT: the tokens of the nodes, as indices among the draft's W tokens.
                parents_BT: for each node, the index of its parent in the level before.
            """
            # Each node has its own state of the RNN. It begins with a copy of the parent's state.
            # Then `compute_logits` lets the RNN read the node's token.
            slots.inherit_states(parents_BT)
            return slots.compute_logits(next(next_slots), self.map_to_target(index_BT))

        logits_B1W = slots.compute_logits(slot=0, token_BT=None)
        drafts = shape.grow(logits_B1W[:, 0], expand, sampling, generators)
        return [self.build_proposal(index_N, probs_NW, tree) for index_N, tree, probs_NW in drafts]

    def _run_block(self, state: DecodingState, k: int, *, key: str) -> "_Slots":
        """Run the draft once over one block for each row; a block begins at the row's last token.

        The block is this token, which is called the anchor, and mask tokens after it.

        Before it runs over the blocks, the draft reads the tokens that were added since the last
        round: it computes their keys and values from the target's features, and stores these in the
        KV cache.

        Args:
            state: the sequences so far, with the target's features of the added tokens.
            k: how many positions of the block must predict a token: the draft tokens of a chain, or
                the levels of a tree.
            key: the recipe key to name in errors.

        Returns:
            The positions (slots) that predict, from which the logits are read.

        Raises:
            UserError: if fewer than k positions of the block predict.
        """
        config = self.config
        if k > config.num_drafted:
            raise UserError(
                key,
                got=f"{k} with a draft whose block_size is {config.block_size}",
                expected=f"at most {config.num_drafted}",
            )

        # Add keys and values of the added tokens to the cache. `counts` says how many tokens were
        # added to each row. In `state.fresh`, rejected draft tokens may follow them.
        counts = state.num_fresh
        num_committed = self.count_committed(state)
        features = state.fresh.first(max(counts))
        self.draft.remember(features, self.cache.begin_chain(counts), self.cache)

        # Run the draft over the blocks, and drop the keys and values of their positions again. A
        # block needs k + 1 positions if the one of the anchor, which comes first, does not predict
        # a token (`first_slot` is 1).
        anchor_ids_B = torch.tensor([ids[-1] for ids in state.token_ids], device=self.device)
        rotary = self.cache.begin_chain(
            [k + config.first_slot] * len(counts), is_causal=config.is_causal
        )
        hidden_BKH = self.draft(anchor_ids_B, rotary, self.cache)[:, config.first_slot :]
        self.cache.truncate(num_committed)
        return _Slots(self.draft, hidden_BKH, anchor_ids_B)


class _Slots:
    """The positions of a block that predict a token (slots), read one at a time after its pass.

    DSpark adds a correction to the logits of a slot, which depends on the token drafted before the
    slot. The logits are therefore computed for one such token of each row, or for T nodes of each
    row's tree. Other drafts have no correction.
    """

    def __init__(self, draft: BlockDraft, hidden_BKH: Tensor, anchor_ids_B: Tensor) -> None:
        """Compute the logits of all slots, without corrections.

        Args:
            draft: the draft.
            hidden_BKH: the hidden states of the K slots.
            anchor_ids_B: the anchors' tokens, which come before the first slot.
        """
        self.draft = draft
        self.hidden_BKH = hidden_BKH
        self.previous_B1 = anchor_ids_B.unsqueeze(1)
        self.logits_BKW = draft.logits(hidden_BKH)
        # The states of the correction, which may be an RNN: one for each row before the first slot,
        # and one for each of T nodes of a tree later. None without a correction.
        self.state_BTE = (
            draft.markov_head.start(hidden_BKH).unsqueeze(1) if draft.markov_head else None
        )

    def inherit_states(self, parents_BT: Tensor) -> None:
        """Copy the RNN state of each parent in the last level of a tree to the parent's children.

        DSpark adds a correction to the logits of each node. One kind of correction is an RNN over
        the tokens on the path to the node (kind `rnn` of `MarkovHead`), so each node has a state of
        its own. Without an RNN this changes no logits.

        Args:
            parents_BT: the parent of each of the T children, as an index into the last level.
        """
        if self.state_BTE is not None:
            self.state_BTE = gather_nodes(self.state_BTE, parents_BT)

    def compute_logits(self, slot: int, token_BT: Tensor | None) -> Tensor:
        """Return the logits [B, T, W] of a slot, for each of T candidates in the slot before.

        DSpark corrects the logits by the token in the slot before. A chain has one such token for
        each row (T = 1). A tree has T candidates for it, the nodes of a level. Other drafts have no
        correction, so their logits are the same for all candidates.

        Args:
            slot: the number of the slot, from 0 to K - 1. (All K slots predict a token.)
            token_BT: the candidate tokens in the slot before. None for slot 0: the token before its
                prediction is the anchor, the known token with which the block begins.
        """
        # Take the logits and the hidden state of the slot for all T candidates.
        draft = self.draft
        previous_BT = self.previous_B1 if token_BT is None else token_BT
        num_nodes = previous_BT.shape[1]
        logits_BTW = self.logits_BKW[:, slot : slot + 1].expand(-1, num_nodes, -1)
        hidden_BTH = self.hidden_BKH[:, slot : slot + 1].expand(-1, num_nodes, -1)
        if draft.markov_head is None:
            return logits_BTW

        # Add the correction by the token before. It may be an RNN, so keep its state for the next
        # slot.
        assert self.state_BTE is not None
        correction_BTE, _, self.state_BTE = draft.markov_head.step(
            hidden_BTH, previous_BT, self.state_BTE
        )
        output: Tensor = logits_BTW + correction_BTE @ draft.markov_head.markov_w2.weight.T
        return output
