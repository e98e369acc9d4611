"""A block drafter drafts: one pass over a block of masks, for chains or trees of one sequence or several.

Shapes: B rows, F freshly committed positions, H hidden size, K draft tokens, T nodes of a level, V target vocabulary, W draft vocabulary, E
width of a correction.

A tree costs no other pass. Without a correction the nodes of a level have one distribution of children (JetSpec, arXiv 2606.18394), with
one each node its own (PCTree, arXiv 2608.02123).
"""

import itertools

import torch
from torch import Tensor

from specdistill.decoding.proposer import DecodingState, Proposal
from specdistill.decoding.sampling import Generators, Sampling
from specdistill.decoding.tree import TreeShape, at_nodes
from specdistill.errors import UserError
from specdistill.methods.blocks.module import BlockDraft
from specdistill.methods.feature_proposer import FeatureProposer


class BlockProposer(FeatureProposer):
    """Keys and values of committed positions are kept; a block's are forgotten after its pass."""

    def __init__(self, draft: BlockDraft) -> None:
        super().__init__(draft)
        self.depends_on_width = not draft.config.is_causal
        self.settings = {"block_size": draft.config.block_size}

    def passes(self, k: int) -> int:
        return 1 if k else 0

    def propose(
        self, state: DecodingState, k: int, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        slots = self._block(state, k, key="eval.num_speculative_tokens")

        def next_logits(step: int, index_B: Tensor | None) -> tuple[Tensor, Tensor | None]:
            logits_B1W, confidence_B1 = slots.next(
                step, None if index_B is None else self.in_target(index_B).unsqueeze(1)
            )
            return logits_B1W[:, 0], None if confidence_B1 is None else confidence_B1[:, 0]

        return self.chains(k, sampling, generators, next_logits)

    def propose_tree(
        self, state: DecodingState, shape: TreeShape, sampling: Sampling, generators: Generators
    ) -> list[Proposal]:
        slots = self._block(state, shape.depth, key="eval.tree.depth")
        levels = itertools.count(1)

        def expand(index_BT: Tensor, rows_BT: Tensor) -> Tensor:
            slots.follow(rows_BT)
            return slots.next(next(levels), self.in_target(index_BT))[0]

        logits_B1W, _ = slots.next(0, None)
        drafts = shape.grow(logits_B1W[:, 0], expand, sampling, generators)
        return [self.proposal(index_N, probs_NW, tree) for index_N, tree, probs_NW in drafts]

    def _block(self, state: DecodingState, k: int, *, key: str) -> "_Slots":
        """The pass over the block of each row, after what was committed since the last one entered the cache."""
        config = self.config
        if k > config.num_drafted:
            got = f"{k} with a draft of blocks of {config.block_size}"
            raise UserError(key, got=got, expected=f"at most {config.num_drafted}")
        counts, committed = state.num_fresh, self.committed(state)
        self.draft.remember(state.fresh.first(max(counts)), self.cache.extend(counts), self.cache)
        anchor_ids_B = torch.tensor([ids[-1] for ids in state.token_ids], device=self.device)
        rotary = self.cache.extend(
            [k + config.first_slot] * len(counts), is_causal=config.is_causal
        )
        hidden_BKH = self.draft(anchor_ids_B, rotary, self.cache)[:, config.first_slot :]
        self.cache.truncate(committed)
        return _Slots(self.draft, hidden_BKH, anchor_ids_B)


class _Slots:
    """A block after its pass: slot by slot the logits, corrected by the tokens before, of one node of each row, or of T of its tree."""

    def __init__(self, draft: BlockDraft, hidden_BKH: Tensor, anchor_ids_B: Tensor) -> None:
        self.draft, self.hidden_BKH, self.previous_B1 = draft, hidden_BKH, anchor_ids_B.unsqueeze(1)
        self.logits_BKW = draft.logits(hidden_BKH)
        self.state_BTE = (
            draft.markov_head.start(hidden_BKH).unsqueeze(1) if draft.markov_head else None
        )

    def follow(self, rows_BT: Tensor) -> None:
        """From now on the nodes of a level, rows_BT being each one's parent in the level before."""
        self.state_BTE = None if self.state_BTE is None else at_nodes(self.state_BTE, rows_BT)

    def next(self, slot: int, token_BT: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Logits [B, T, W] of a slot after the tokens drafted in the one before, and the confidence [B, T] of a draft that states one."""
        draft, previous_BT = self.draft, self.previous_B1 if token_BT is None else token_BT
        logits_BTW, hidden_BTH = (
            of_slots[:, slot : slot + 1].expand(-1, previous_BT.shape[1], -1)
            for of_slots in (self.logits_BKW, self.hidden_BKH)
        )
        if draft.markov_head is None:
            return logits_BTW, None
        assert self.state_BTE is not None
        correction_BTE, embedded_BTE, self.state_BTE = draft.markov_head.step(
            hidden_BTH, previous_BT, self.state_BTE
        )
        logits_BTW = logits_BTW + correction_BTE @ draft.markov_head.markov_w2.weight.T
        confidence = draft.confidence_head
        return logits_BTW, None if confidence is None else confidence(
            hidden_BTH, embedded_BTE
        ).float().sigmoid()
