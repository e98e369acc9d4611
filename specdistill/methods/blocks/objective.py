"""What a block drafter learns: the target's distribution at every slot of blocks that begin at many tokens of a row.

Shapes: B rows, T positions, N blocks, P slots, K slots that predict, H hidden size, D target hidden size, W draft vocabulary, E width of a
correction, r rows of a chunk.

The slot that predicts x_s learns the target's distribution after x_{s-1}. A correction reads the text's tokens before a slot, as it does in
drafting as long as drafts are accepted; after that nothing counts.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdistill.losses.chunked import head_loss
from specdistill.losses.divergence import Divergence, build_divergence
from specdistill.losses.position_weights import d_pace, geometric
from specdistill.methods.blocks.anchors import draw_blocks, spans
from specdistill.methods.blocks.attention import BlockMemory
from specdistill.methods.blocks.module import BlockDraft
from specdistill.methods.blocks.recipe import BlockRecipe
from specdistill.targets.frozen import Features, FrozenTarget
from specdistill.training.objective import (
    Objective,
    SoftTargets,
    StepSums,
    TargetDistributions,
    chain_products,
)


class BlockObjective(Objective):
    """A block drafter as the trainer sees it: target features in, loss sums of each drafted position out.

    Args:
        num_anchors: blocks of a row.
        step_decay: drafted position k counts step_decay ** k; alpha: or by D-PACE.
        confidence_weight: of the cross-entropy of the confidence in each slot, where the draft states one, with its expected acceptance.
    """

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
        super().__init__(
            draft, divergence, temperature, geometric(step_decay, draft.config.num_drafted)
        )
        self.num_anchors, self.seed = num_anchors, seed
        self.alpha, self.confidence_weight = alpha, confidence_weight

    def prepare(self, batch: dict[str, Any], number: int | None) -> dict[str, Any]:
        """The batch with its blocks, which are drawn anew each time that a row is read."""
        seed = None if number is None else self.seed * 1_000_003 + number
        anchors_N, has_loss_NK = draw_blocks(batch, self.num_anchors, len(self.step_weights), seed)
        own = spans(batch, anchors_N, self.draft.config.block_size)
        return batch | {"anchors": anchors_N, "has_loss": has_loss_NK, "spans": own}

    def num_loss_tokens(self, batch: dict[str, Any]) -> Tensor:
        """Blocks: what the loss of a batch is divided by."""
        blocks: Tensor = batch["has_loss"][:, 0].sum()
        return blocks

    def read_target(self, target: FrozenTarget, inputs: dict[str, Any]) -> dict[str, Any]:
        """Features, and the target's distributions where slots predict."""
        return self.of_target(
            target, inputs, self._labels(inputs["anchors"], inputs["input_ids"].numel()).flatten()
        )

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
        **unread: Any,  # the batch's other columns
    ) -> tuple[Tensor, StepSums]:
        """The loss summed over the blocks of packed rows [B, T] (see specdistill.rows.packing), each the weighted sum over its slots, and
        the sums of each drafted position. measure: also fill the metrics that cost time.
        """
        draft, shape = self.draft, self.draft.config
        position_S, ids_S = position_ids.flatten(), input_ids.flatten()
        slots = torch.arange(shape.block_size, device=anchors.device)
        starts = anchors - position_S[anchors]
        memory = BlockMemory(
            anchors, starts, spans, shape.block_size, shape.sliding_window, shape.is_causal
        )
        like = features.last_hidden
        context = draft.context(features), draft.rotary(like, position_ids)
        rotary = draft.rotary(like, position_S[anchors].unsqueeze(1) + slots)
        normed_NPH = draft(ids_S[anchors], rotary, memory, context)
        rows_NKH = normed_NPH[:, shape.first_slot :]
        labels_NK = self._labels(anchors, ids_S.numel())
        correction = None
        if draft.markov_head is not None:
            correction_NKE, embedded_NKE = draft.markov_head(rows_NKH, ids_S[labels_NK - 1])
            correction = (
                correction_NKE.flatten(0, 1).unsqueeze(0),
                draft.markov_head.markov_w2.weight,
            )
        confident = draft.confidence_head is not None and self.confidence_weight > 0
        tokens_R, has_loss_R = ids_S[labels_NK].flatten(), has_loss.flatten()

        def targets_of(rows: slice) -> tuple[TargetDistributions, Tensor, Tensor]:
            return (
                soft_targets.at(rows, measure=measure or confident),
                tokens_R[rows],
                has_loss_R[rows],
            )

        weights_NK = has_loss * (1.0 if self.alpha is not None else self.step_weights)
        weights_1R = weights_NK.flatten().float().unsqueeze(0)
        losses = partial(
            head_loss,
            rows_NKH.flatten(0, 1).unsqueeze(0),
            weights_1R,
            draft.logits,
            targets_of,
            self.row_losses,
            together=shape.num_drafted,
        )
        total, metrics_M1R = losses(correction=correction)
        losses_NK, *measured = metrics_M1R[:, 0].unflatten(1, has_loss.shape) * has_loss
        if confident:
            confidence_NK = draft.confidence_head(rows_NKH, embedded_NKE)
            error_NK = F.binary_cross_entropy_with_logits(
                confidence_NK.float(), measured[1], reduction="none"
            )
            total = total + self.confidence_weight * (error_NK * has_loss * self.step_weights).sum()
        sums = StepSums.of(
            has_loss.float().T, losses_NK.T, *(values_NK.T for values_NK in measured if measure)
        )
        if measure and correction is not None:
            _, uncorrected_M1R = losses()
            sums.chain_uncorrected = chain_products(
                (uncorrected_M1R[1, 0].unflatten(0, has_loss.shape) * has_loss).T
            )
        return total, sums

    def row_losses(self, logits_rW: Tensor, targets: Any, k: int) -> tuple[Tensor, Tensor]:
        """As all objectives', of whole blocks. targets: distributions, the text's tokens [r], and whether they have a loss [r]."""
        soft, token_r, has_loss_r = targets
        losses_r, metrics_Mr = super().row_losses(logits_rW, soft, k)
        if self.alpha is None:
            return losses_r, metrics_Mr
        with torch.no_grad():
            # The chance of the text's token; a token that the draft does not have is never right.
            logits_rW, ids_W = logits_rW / self.temperature, self.draft.target_ids_W
            index_r = torch.searchsorted(ids_W, token_r).clamp_max(len(ids_W) - 1)
            log_q_r = logits_rW.float().gather(1, index_r.unsqueeze(1)).squeeze(
                1
            ) - logits_rW.float().logsumexp(1)
            chance_r = log_q_r.exp() * (ids_W[index_r] == token_r)
            blocks = (-1, len(self.step_weights))
            weights_r = d_pace(chance_r.view(blocks), has_loss_r.view(blocks), self.alpha).flatten()
        return losses_r * weights_r, metrics_Mr

    def _labels(self, anchors_N: Tensor, num_tokens: int) -> Tensor:
        """[N, K] flattened positions of the tokens that slots predict; those past the end have no loss."""
        ahead = torch.arange(1, 1 + len(self.step_weights), device=anchors_N.device)
        return (anchors_N.unsqueeze(1) + ahead).clamp_max(num_tokens - 1)


def objective(draft: BlockDraft, recipe: BlockRecipe, target: FrozenTarget) -> BlockObjective:
    """The objective that a recipe describes."""
    loss = recipe.loss.model_dump(exclude={"divergence", "d_pace"})
    divergence = build_divergence(recipe.loss.divergence)
    return BlockObjective(
        draft,
        divergence,
        recipe.draft.num_anchors,
        alpha=recipe.loss.d_pace,
        seed=recipe.seed,
        **loss,
    )
