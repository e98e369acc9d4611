"""Train a block drafter: it learns the target's distribution at the slots of many blocks.

Shapes: B rows, T positions, N blocks, P slots, K slots that predict, H hidden size, D target hidden
size, W draft vocabulary, E width of a correction, r rows of a chunk.

The blocks begin at many tokens of a row. The slot that predicts x_s learns the target's
distribution after x_{s-1}. A correction reads the text's tokens before a slot. In drafting it does
the same as long as draft tokens are accepted, and after a rejection nothing counts.

`draw_blocks` chooses the anchors, where the blocks of a batch begin, and which slots of each block
are trained. In it S = B T, and the N anchors are padded.

An anchor is the last token that is known when a block is drafted. The target's features of all
tokens before it are known, its own are not. In the first round after a prompt, the anchor is the
last token of the prompt. So the anchor of the first token of an answer has no loss itself.
"""

import math
import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdistill.methods.blocks.attention import BlockKVCache
from specdistill.methods.blocks.module import BlockDraft
from specdistill.targets.frozen import Features, FrozenTarget
from specdistill.training.losses.divergence import Divergence
from specdistill.training.losses.head_loss import compute_head_loss
from specdistill.training.objective import (
    Objective,
    SoftTargets,
    StepSums,
    TargetDistributions,
    chain_products,
    compute_d_pace_weights,
    compute_geometric_weights,
)

# Slots of the blocks that attend together on a CPU. More slots share a mask that is mostly empty;
# fewer make many small products.
SLOTS_PER_CHUNK = 256
# How many different numbers of blocks batches are padded to. More sizes waste less padding, but a
# step is compiled again for each of them.
NUM_BATCH_SIZES = 8


def draw_blocks(
    batch: Mapping[str, Tensor], num_anchors: int, num_drafted: int, seed: int | None
) -> tuple[Tensor, Tensor]:
    """Choose where the blocks of a batch begin, and which tokens of each block are learned.

    A block begins at its anchor t, whose token is known. The slots j = 1 to K of the block predict
    the tokens t + 1 to t + K. A token can be an anchor if the next token has a loss. Slot j is
    learned if all tokens t + 1 to t + j have a loss, because drafting reaches token t + j only
    through the tokens before it.

    Args:
        batch: packed rows [B, T], with their loss positions.
        num_anchors: the most blocks per row, on average. If more anchors are possible, they are
            drawn at random.
        num_drafted: K, the tokens that a block predicts.
        seed: the seed of the draw; None: take anchors at even distances.

    Returns:
        The anchors, which are ascending positions [N] in the flattened batch; and whether each slot
        is learned, bool [N, K].
    """
    # Mark the tokens of the flattened batch that have a loss. The first token of a document never
    # has one, so a run of marked tokens is in one document. K positions past the end, which are not
    # marked, spare a bounds check.
    num_tokens = batch["position_ids"].numel()
    has_loss_S = torch.zeros(num_tokens + num_drafted, dtype=torch.bool).index_fill(
        0, batch["loss_positions"], True
    )
    has_loss_S[0] = False  # loss positions are padded with 0

    # Find the possible anchors: the tokens i whose next token has a loss. In the slice from 1 on,
    # index i has the flag of token i + 1, so the indices that `nonzero` returns are the anchors. If
    # there are too many of them, draw some, or take some at even distances.
    candidates = has_loss_S[1:num_tokens].nonzero().flatten()
    max_anchors = min(num_anchors * len(batch["position_ids"]), num_tokens)
    if len(candidates) > max_anchors:
        if seed is None:
            indices = [index * len(candidates) // max_anchors for index in range(max_anchors)]
        else:
            indices = sorted(random.Random(seed).sample(range(len(candidates)), max_anchors))
        candidates = candidates[indices]

    # Pad the number of anchors to one of a few sizes, because a step is compiled for each of them.
    # The padding repeats an anchor and learns nothing.
    num_learned = len(candidates)
    step = max(1, max_anchors // NUM_BATCH_SIZES)
    size = max(1, math.ceil(num_learned / step)) * step
    padding_anchor = int(candidates[-1]) if num_learned else 1
    anchors_N = F.pad(candidates, (0, size - num_learned), value=padding_anchor)

    # A slot is learned if its token and all tokens between anchor and token have a loss.
    label_NK = anchors_N.unsqueeze(1) + torch.arange(1, num_drafted + 1)
    is_learned_NK = has_loss_S[label_NK].cumprod(1).bool()
    is_learned_NK[num_learned:] = False
    return anchors_N, is_learned_NK


def split_blocks(
    batch: Mapping[str, Tensor], anchors_N: Tensor, block_size: int
) -> list[tuple[int, int, int, int]]:
    """Split the N blocks of a batch into chunks, whose attention a CPU computes one by one.

    The chunks are computed before the training step, so that the step can be compiled.

    Args:
        batch: packed rows [B, T].
        anchors_N: where each block begins: ascending positions in the flattened batch.
        block_size: P, the slots of a block.

    Returns:
        Four integers for each chunk: its first block, the block after its last one, the first token
        of the flattened batch that any of its blocks attends to, and the token after the last one.
    """
    # A block sees the tokens of its document before its anchor. Find where these documents start in
    # the flattened batch. For example, the anchor 10 with position 3 in its document: the document
    # starts at 7.
    position_in_document_N = batch["position_ids"].flatten()[anchors_N]
    document_starts_N = anchors_N - position_in_document_N

    # The tokens that a chunk sees start with its first document, and end before its last anchor.
    size = max(1, SLOTS_PER_CHUNK // block_size)
    chunks = []
    for first_block in range(0, len(anchors_N), size):
        end_block = min(first_block + size, len(anchors_N))
        first_token = int(document_starts_N[first_block:end_block].min())
        end_token = int(anchors_N[first_block:end_block].max())
        chunks.append((first_block, end_block, first_token, end_token))
    return chunks


class BlockObjective(Objective):
    """The objective of a block drafter: computes the loss of many blocks from target features."""

    def __init__(
        self,
        draft: BlockDraft,
        divergence: Divergence,
        num_anchors: int,
        *,
        step_decay: float = 1.0,
        temperature: float = 1.0,
        alpha: float | None = None,
        confidence_weight: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Create the objective.

        Args:
            draft: the block drafter.
            divergence: the loss of one token.
            num_anchors: the most blocks per row, on average (see `draw_blocks`).
            step_decay: the loss weight of drafted position k is step_decay ** k.
            temperature: divides both sets of logits.
            alpha: the smoothing of D-PACE, which weights a position by how many tokens are expected
                to be accepted from it on, in place of `step_decay`; None: no D-PACE.
            confidence_weight: the weight of the confidence head's loss, if the draft has such a
                head: the cross-entropy of its confidence with the expected acceptance.
            seed: the seed with which the beginnings of the blocks (anchors) are drawn.
        """
        super().__init__(
            draft,
            divergence,
            temperature,
            compute_geometric_weights(step_decay, draft.config.num_drafted),
        )
        self.num_anchors = num_anchors
        self.seed = seed
        self.alpha = alpha
        self.confidence_weight = confidence_weight

    def prepare(self, batch: dict[str, Tensor], number: int | None) -> dict[str, object]:
        """Draw the blocks that are trained on a batch, and return them with the batch.

        Args:
            batch: packed rows.
            number: the number of the batch in the run, by which each batch gets other blocks. None
                in an evaluation, whose blocks are not random.
        """
        # Each batch of the run has its own seed. The factor is a prime above the usual number of
        # batches, so that runs with other seeds draw other blocks. Evaluation draws nothing.
        seed = None if number is None else self.seed * 1_000_003 + number
        anchors_N, has_loss_NK = draw_blocks(batch, self.num_anchors, len(self.step_weights), seed)
        return batch | {
            "anchors": anchors_N,
            "has_loss": has_loss_NK,
            "spans": split_blocks(batch, anchors_N, self.draft.config.block_size),
        }

    def count_loss_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the number of blocks that learn, by which the loss of a batch is divided.

        Other objectives return the number of their loss tokens here, hence the name. A block learns
        if its first slot does. Later slots learn only if all slots before them do.
        """
        return batch["has_loss"][:, 0].sum()

    def read_target(self, target: FrozenTarget, inputs: dict[str, Tensor]) -> dict[str, object]:
        """Return the target's features, and its distributions of the tokens that blocks predict.

        Args:
            target: the target.
            inputs: the batch, as `prepare` returns it.
        """
        labels_NK = self._find_labels(inputs["anchors"], inputs["input_ids"].numel())
        return self.read_target_outputs(target, inputs, labels_NK.flatten())

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        anchors: Tensor,
        has_loss: Tensor,
        spans: list[tuple[int, int, int, int]],
        features: Features,
        soft_targets: SoftTargets,
        measure: bool = False,
        **other_columns: object,
    ) -> tuple[Tensor, StepSums]:
        """Compute the loss of N blocks, each of which predicts K tokens in one pass of the draft.

        A block is a known token (its anchor) and masks; its positions are called slots.

        Args:
            input_ids: token ids [B, T] of packed rows, which hold several documents each.
            position_ids: [B, T], positions within the documents.
            anchors: where each block begins: positions [N] in the flattened rows.
            has_loss: which slots of the blocks are learned, [N, K].
            spans: how the attention is split on a CPU, which computes it for a few blocks at a time
                (see `split_blocks`). A GPU does not read this.
            features: the target's features (hidden states) at all positions.
            soft_targets: the target's distributions of the tokens that the slots predict.
            measure: whether to also fill the metrics that cost time.
            **other_columns: columns of the batch that are not read.

        Returns:
            The weighted sum of the losses of all slots, and the sums of loss and metrics for each
            of the K drafted positions.
        """
        # Run the draft over all blocks, [N, K, H], and find the tokens that the slots predict.
        draft = self.draft
        ids_S = input_ids.flatten()
        rows_NKH = self._run_draft(ids_S, position_ids, anchors, spans, features)
        labels_NK = self._find_labels(anchors, ids_S.numel())

        # A draft with a correction (DSpark) adds to each slot's logits what depends on the token
        # before. In training that is the token of the text.
        correction = None
        if draft.markov_head is not None:
            correction_NKE, embedded_NKE = draft.markov_head(rows_NKH, ids_S[labels_NK - 1])
            correction = (
                correction_NKE.flatten(0, 1).unsqueeze(0),
                draft.markov_head.markov_w2.weight,
            )

        # The confidence head learns the expected acceptance, so this must be measured.
        trains_confidence = draft.confidence_head is not None and self.confidence_weight > 0
        select_targets = partial(
            _select_targets,
            soft_targets,
            ids_S[labels_NK].flatten(),
            has_loss.flatten(),
            measure or trains_confidence,
        )

        # Compute the loss of all slots, R = N K of them in one row. Positions are weighed by fixed
        # weights here, or by D-PACE in `compute_row_losses`.
        weights_NK = has_loss * (1.0 if self.alpha is not None else self.step_weights)
        compute_loss = partial(
            compute_head_loss,
            rows_NKH.flatten(0, 1).unsqueeze(0),
            weights_NK.flatten().float().unsqueeze(0),
            draft.logits,
            select_targets,
            self.compute_row_losses,
            group_size=draft.config.num_drafted,
        )
        total, metrics_M1R = compute_loss(correction=correction)
        # The metrics are the loss and, if they are measured, correct tokens and acceptance.
        losses_NK, *measures = metrics_M1R[:, 0].unflatten(1, has_loss.shape) * has_loss

        # Add the cross-entropy of the stated confidence with the expected acceptance.
        if trains_confidence:
            _, accepted_NK = measures
            confidence_NK = draft.confidence_head(rows_NKH, embedded_NKE)
            error_NK = F.binary_cross_entropy_with_logits(
                confidence_NK.float(), accepted_NK, reduction="none"
            )
            total = total + self.confidence_weight * (error_NK * has_loss * self.step_weights).sum()
        # Metrics that were measured only for the confidence head are left out of the sums.
        sums = StepSums.from_losses(
            has_loss.float().T, losses_NK.T, *(values_NK.T for values_NK in measures if measure)
        )

        # Measure how long the accepted chains would be without the correction.
        if measure and correction is not None:
            _, (_, correct_1R, _) = compute_loss()
            correct_NK = correct_1R[0].unflatten(0, has_loss.shape) * has_loss
            sums.chain_uncorrected = chain_products(correct_NK.T)
        return total, sums

    def _run_draft(
        self,
        ids_S: Tensor,
        position_ids: Tensor,
        anchors: Tensor,
        spans: list[tuple[int, int, int, int]],
        features: Features,
    ) -> Tensor:
        """Run the draft over all blocks at once, and return the hidden states of their slots.

        A block is a known token (its anchor) followed by masks. Its positions are called slots.
        K of them predict a token: all, or all but the anchor's.

        Args:
            ids_S: the tokens of the flattened batch.
            position_ids: [B, T], positions within the documents.
            anchors: where each block begins: positions [N] in the flattened batch.
            spans: how the attention is split on a CPU, which computes it for a few blocks at a time
                (see `split_blocks`). A GPU does not read this.
            features: the target's features at all positions.

        Returns:
            Hidden states [N, K, H] of the K slots of each block that predict a token.
        """
        draft = self.draft
        shape = draft.config
        position_S = position_ids.flatten()
        # `position_S` counts from the start of each document. So this is where the document of each
        # anchor starts in the flattened batch.
        document_starts = anchors - position_S[anchors]
        kv_cache = BlockKVCache(
            anchors,
            document_starts,
            spans,
            shape.block_size,
            shape.sliding_window,
            shape.is_causal,
        )

        # Every block attends to the context before its anchor, and within itself. Its slot k, from
        # 0 on, stands at the position of the anchor + k. Rotary tables have the dtype of features.
        context = (draft.context(features), draft.rotary(features.last_hidden, position_ids))
        slots = torch.arange(shape.block_size, device=anchors.device)
        slot_position_NP = position_S[anchors].unsqueeze(1) + slots
        slot_rotary = draft.rotary(features.last_hidden, slot_position_NP)
        normed_NPH: Tensor = draft(ids_S[anchors], slot_rotary, kv_cache, context)
        return normed_NPH[:, shape.first_slot :]

    def compute_row_losses(self, logits_rW: Tensor, targets: Any, k: int) -> tuple[Tensor, Tensor]:
        """Return the loss and the metrics of r slots; with D-PACE, weight each loss by position.

        A slot is a position of a block that predicts a token.

        Args:
            logits_rW: the draft's logits at the slots of whole blocks, over its W tokens.
            targets: the target's distributions, the text's tokens [r], and whether the tokens have
                a loss [r], as `_select_targets` returns them.
            k: not used here; the index of a drafted position in other objectives.
        """
        soft, token_r, has_loss_r = targets
        losses_r, metrics_Mr = super().compute_row_losses(logits_rW, soft, k)
        if self.alpha is None:
            return losses_r, metrics_Mr

        # D-PACE weights a position by how many tokens are expected to be accepted from it on. No
        # gradient flows through the weights.
        with torch.no_grad():
            # Compute the draft's probability of the text's token. It is 0 for a token that is not
            # in the draft vocabulary, whose ids are sorted.
            logits_rW = logits_rW / self.temperature
            ids_W = self.draft.target_ids_W
            index_r = torch.searchsorted(ids_W, token_r).clamp_max(len(ids_W) - 1)
            logit_r = logits_rW.float().gather(1, index_r.unsqueeze(1)).squeeze(1)
            log_q_r = logit_r - logits_rW.float().logsumexp(1)
            chance_r = log_q_r.exp() * (ids_W[index_r] == token_r)
            # The rows are whole blocks of K slots.
            blocks = (-1, len(self.step_weights))
            weights_r = compute_d_pace_weights(
                chance_r.view(blocks), has_loss_r.view(blocks), self.alpha
            ).flatten()
        return losses_r * weights_r, metrics_Mr

    def _find_labels(self, anchors_N: Tensor, num_tokens: int) -> Tensor:
        """Return the positions [N, K] of the tokens that each block predicts.

        Args:
            anchors_N: where each block begins, in the flattened batch.
            num_tokens: the tokens of the flattened batch. Later positions are clamped to the last
                token, and have no loss.
        """
        ahead = torch.arange(1, 1 + len(self.step_weights), device=anchors_N.device)
        return (anchors_N.unsqueeze(1) + ahead).clamp_max(num_tokens - 1)


def _select_targets(
    soft_targets: SoftTargets, token_R: Tensor, has_loss_R: Tensor, measure: bool, rows: slice
) -> tuple[TargetDistributions, Tensor, Tensor]:
    """Select what the loss compares the draft's logits with, for some of the slots.

    A slot is a position of a block that predicts a token.

    Args:
        soft_targets: the target model's distributions of the R tokens that all slots predict.
        token_R: these tokens, as they are in the text.
        has_loss_R: whether the tokens have a loss.
        measure: whether acceptance is measured, which needs the target model's whole vocabulary.
        rows: which of the R slots to select.

    Returns:
        Distributions, tokens and loss flags of the selected slots.
    """
    return soft_targets.at(rows, measure=measure), token_R[rows], has_loss_R[rows]
