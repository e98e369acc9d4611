"""A block drafter drafts: one pass over a block of masks, for chains of one sequence or several, or for a tree.

Shapes: B rows, F freshly committed positions, H hidden size, K draft tokens, T nodes of a level, V target vocabulary, W draft vocabulary, E
width of a correction.

A tree costs no other pass. Without a correction the nodes of a level have one distribution of children (JetSpec, arXiv 2606.18394), with
one each node its own (PCTree, arXiv 2608.02123).
"""

import torch
from torch import Tensor

from specdistill.decoding.proposer import DecodingState, Proposal
from specdistill.decoding.sampling import Generators, Random, Sampling, draw, uniforms
from specdistill.decoding.tree import TreeShape
from specdistill.errors import UserError
from specdistill.methods.blocks.module import BlockDraft
from specdistill.methods.feature_proposer import FeatureProposer


class BlockProposer(FeatureProposer):
    """Keys and values of committed positions are kept; a block's are forgotten after its pass."""

    def __init__(self, draft: BlockDraft) -> None:
        super().__init__(draft)
        self.draft, self.depends_on_width = draft, not draft.config.is_causal
        self.settings = {"block_size": draft.config.block_size}

    def passes(self, k: int) -> int:
        return 1 if k else 0

    def propose(self, state: DecodingState, k: int, sampling: Sampling, generators: Generators) -> list[Proposal]:
        """Chains of k draft tokens, or as many as are enough."""
        uniforms_BK = None if sampling.is_greedy else uniforms(k, generators).to(self.device)
        slots = self._block(state, k, key="eval.num_speculative_tokens")
        tokens: list[Tensor] = []
        distributions: list[Tensor] = []
        for step in range(k):
            logits_BW, confidence_B = slots.next(step, tokens[-1] if tokens else None, sampling)
            if uniforms_BK is None:
                token_B = self.target_ids_W[logits_BW.argmax(-1)]
            else:
                distributions.append(self.over_target_vocabulary(sampling.probabilities(logits_BW)))
                token_B = draw(distributions[-1], uniforms_BK[:, step])
            tokens.append(token_B)
            if self.is_enough and self.is_enough(confidence_B):
                break
        return self.chains(tokens, distributions)

    def propose_tree(self, state: DecodingState, shape: TreeShape, sampling: Sampling, generator: Random) -> Proposal:
        slots = self._block(state, shape.depth, key="eval.tree.depth")
        logits_1W, _ = slots.next(0, None, sampling)
        level = 0

        def expand(index_T: Tensor, rows_T: Tensor) -> Tensor:
            nonlocal level
            level += 1
            slots.follow(rows_T)
            return slots.next(level, self.target_ids_W[index_T], sampling)[0]

        index_N, tree, probs_NW = shape.grow(logits_1W, expand, sampling, generator)
        probs_NV = None if probs_NW is None else self.over_target_vocabulary(probs_NW)
        return Proposal(self.target_ids_W[index_N].tolist(), probs_NV, tree)

    def _block(self, state: DecodingState, k: int, *, key: str) -> "_Slots":
        """The pass over the block of each row, after what was committed since the last one entered the cache."""
        config = self.config
        if k > config.num_drafted:
            got = f"{k} with a draft of blocks of {config.block_size}"
            raise UserError(key, got=got, expected=f"at most {config.num_drafted}")
        counts, committed = state.num_fresh, self.committed(state)
        self.draft.remember(state.fresh.first(max(counts)), self.cache.extend(counts), self.cache)
        anchor_ids_B = torch.tensor([ids[-1] for ids in state.token_ids], device=self.device)
        rotary = self.cache.extend([k + config.first_slot] * len(counts), is_causal=config.is_causal)
        hidden_BKH = self.draft(anchor_ids_B, rotary, self.cache)[:, config.first_slot :]
        self.cache.truncate(committed)
        return _Slots(self.draft, hidden_BKH, anchor_ids_B)


class _Slots:
    """A block after its pass: slot by slot the logits, corrected by the tokens before, of each row, or of each node of a tree."""

    def __init__(self, draft: BlockDraft, hidden_BKH: Tensor, anchor_ids_B: Tensor) -> None:
        self.draft, self.hidden_BKH, self.previous_B = draft, hidden_BKH, anchor_ids_B
        self.logits_BKW = draft.logits(hidden_BKH)
        self.state_BE = draft.correction.start(hidden_BKH) if draft.correction else None

    def follow(self, rows_T: Tensor) -> None:
        """From now on the nodes of a level, rows_T being each one's parent in the level before."""
        self.state_BE = None if self.state_BE is None else self.state_BE[rows_T]

    def next(self, slot: int, token_B: Tensor | None, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Logits [B, W] of a slot after the tokens drafted in the one before it, and the confidence [B] in its best token."""
        draft = self.draft
        previous_B = self.previous_B if token_B is None else token_B
        logits_BW = self.logits_BKW[:, slot].expand(len(previous_B), -1)
        if draft.correction is None:
            return logits_BW, sampling.confidence(logits_BW)
        hidden_BH = self.hidden_BKH[:, slot].expand(len(previous_B), -1)
        assert self.state_BE is not None
        correction_BE, embedded_BE, self.state_BE = draft.correction.step(hidden_BH, previous_B, self.state_BE)
        logits_BW = logits_BW + correction_BE @ draft.correction.weight.T
        if draft.confidence is None:
            return logits_BW, sampling.confidence(logits_BW)
        return logits_BW, draft.confidence(hidden_BH, embedded_BE).float().sigmoid()
