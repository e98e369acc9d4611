"""A small draft learns the target's law, position by position (DistillSpec, arXiv 2310.08461).

Shapes: B rows, T positions, R kept rows, V vocabulary, K drafted positions.

Every position t whose next token is supervised teaches: the draft's law after x_t is compared with the target's. With `labels="tokens"`
the target is not asked: the loss is the cross-entropy of the text's own next token, which on text that the target wrote is sequence-level
distillation, and on other text plain language modelling.

Token selection (AdaSPEC, arXiv 2510.19779): given a frozen reference draft, only the share of the rows is learnt from where the draft
is furthest behind the reference, KL(p || q) - KL(p || q_ref): those it can learn. The choice is made in each micro-batch.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdistill.losses.divergence import Divergence, LossSum, acceptance
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.soft_targets import Teacher, predicts, shift_left, teach
from specdistill.training.step_sums import StepSums


class Distillation(nn.Module):
    """The small draft as the trainer sees it: rows in, loss sums out.

    Args:
        temperature: divides both sets of logits in the loss.
        labels: `laws` of the target, or the text's own `tokens`.
        num_positions: K of the simulated acceptance length.
        reference, selected: a frozen draft of the same vocabulary, and the share of the rows that is kept.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        divergence: Divergence,
        *,
        temperature: float = 1.0,
        labels: str = "laws",
        num_positions: int = 4,
        reference: PreTrainedModel | None = None,
        selected: float = 1.0,
    ) -> None:
        super().__init__()
        self.draft = draft
        self.divergence = divergence
        self.temperature = temperature
        self.labels = labels
        self.num_positions = num_positions
        self.selected = selected if reference is not None else 1.0
        self._reference = (reference,)  # in a tuple, so that it is neither trained nor saved
        # transformers' Trainer reads this name: what is the same tensor under another name is written once.
        self._keys_to_ignore_on_save = repeated_names(self)

    def tie_weights(self) -> None:
        """Called by transformers' Trainer after it has loaded a checkpoint without the repeated names."""
        self.draft.tie_weights()

    def num_kept(self, batch: dict[str, Tensor]) -> Tensor:
        """How many rows the loss of a batch is summed over, up to the rounding of a selection."""
        return self.selected * predicts(batch["document_ids"], batch["supervise"], ahead=1).sum()

    def teach(self, target: FrozenTarget, inputs: dict[str, Tensor]) -> dict[str, Any]:
        """The target's laws at temperature 1, and which rows the reference finds learnable; nothing where the text's tokens teach alone."""
        (reference,) = self._reference
        if self.training and self.labels == "tokens" and reference is None:
            return {"teacher": None}
        kept_BT = predicts(inputs["document_ids"], inputs["supervise"], ahead=1)
        features = target.features(inputs["input_ids"], (), position_ids_BT=inputs["position_ids"])
        all_ids = torch.arange(target.vocab_size, device=target.device)
        teacher = teach(target.lm_head, features.last_hidden, kept_BT, all_ids, 1.0)
        if reference is None:
            return {"teacher": teacher}
        logits_RV = logits_of_rows(reference, inputs["input_ids"], inputs["position_ids"], kept_BT)
        return {"teacher": teacher, "reference_loss_R": rowwise_kl(logits_RV, teacher.probs_RW)}

    def forward(
        self,
        input_ids: Tensor,
        supervise: Tensor,
        document_ids: Tensor,
        position_ids: Tensor,
        teacher: Teacher | None,
        reference_loss_R: Tensor | None = None,
        measure: bool = False,
    ) -> tuple[Tensor, StepSums]:
        """The loss summed over the kept rows of packed rows [B, T] (see specdistill.data.packing), and the sums of the metrics."""
        kept_BT = predicts(document_ids, supervise, ahead=1)
        logits_RV = logits_of_rows(self.draft, input_ids, position_ids, kept_BT)
        next_R = shift_left(input_ids, 1, 0)[kept_BT]
        probs_RV = None if teacher is None else teacher.probs_RW
        sums = StepSums()
        if measure:
            assert teacher is not None
            self._measure(sums, logits_RV.detach(), teacher, kept_BT)
        elif reference_loss_R is not None:
            assert probs_RV is not None
            rows = self._learnable(logits_RV.detach(), probs_RV, reference_loss_R)
            logits_RV, probs_RV, next_R = logits_RV[rows], probs_RV[rows], next_R[rows]
        loss = self._loss(logits_RV, probs_RV, next_R)
        sums.loss.append(loss.total.detach())
        sums.kept.append(torch.tensor(loss.count, device=logits_RV.device))
        return loss.total, sums

    def _loss(self, logits_RV: Tensor, probs_RV: Tensor | None, next_R: Tensor) -> LossSum:
        if self.labels == "tokens":
            return LossSum(F.cross_entropy(logits_RV.float(), next_R, reduction="sum"), len(next_R))
        assert probs_RV is not None
        if self.temperature != 1.0:
            probs_RV = probs_RV.clamp_min(torch.finfo(torch.float32).tiny).log().div(self.temperature).softmax(-1)
        return self.divergence(logits_RV / self.temperature, probs_RV)

    def _learnable(self, logits_RV: Tensor, probs_RV: Tensor, reference_loss_R: Tensor) -> Tensor:
        gap_R = rowwise_kl(logits_RV, probs_RV) - reference_loss_R
        return gap_R.topk(math.ceil(self.selected * len(gap_R))).indices

    def _measure(self, sums: StepSums, logits_RV: Tensor, teacher: Teacher, kept_BT: Tensor) -> None:
        """Accuracy, acceptance at temperature 1, and chains of K right guesses in a row."""
        hit_R = logits_RV.argmax(-1) == teacher.best_R
        sums.correct.append(hit_R.sum())
        sums.accepted.append(acceptance(logits_RV.float().softmax(-1), teacher.probs_RW).sum())
        hit_BT = torch.zeros_like(kept_BT).masked_scatter_(kept_BT, hit_R)
        chain_BT, correct_BT = torch.ones_like(kept_BT), torch.ones_like(kept_BT)
        for k in range(self.num_positions):
            # Positions in a row that all teach are in one document: its last token never teaches.
            chain_BT = chain_BT & shift_left(kept_BT.long(), k, 0).bool()
            correct_BT = correct_BT & shift_left(hit_BT.long(), k, 0).bool()
            sums.chains.append(chain_BT.sum())
            sums.chain_correct.append((chain_BT & correct_BT).sum())


def repeated_names(module: nn.Module) -> list[str]:
    """Names in a module's state that stand for a tensor named before: a head that is the embedding."""
    first: dict[tuple[int, torch.Size], str] = {}
    return [
        name
        for name, tensor in module.state_dict().items()
        if first.setdefault((tensor.data_ptr(), tensor.shape), name) != name
    ]


def logits_of_rows(model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, kept_BT: Tensor) -> Tensor:
    """A causal language model's logits [R, V] at the kept positions of packed rows; its head sees no others."""
    hidden = model.get_decoder()(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
    logits: Tensor = model.get_output_embeddings()(hidden[kept_BT])
    return logits


def rowwise_kl(logits_RV: Tensor, probs_RV: Tensor) -> Tensor:
    """KL(p || q) up to the entropy of p, which differences of two drafts do not see: -sum_v p_v log q_v, [R]."""
    return -(probs_RV * logits_RV.float().log_softmax(-1)).sum(-1)
