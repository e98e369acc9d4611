"""What a draft model learns: the target's distribution, position by position (DistillSpec, arXiv 2310.08461), some of it on-policy.

Shapes: B rows, T positions, R loss tokens, V vocabulary, K drafted positions.

At every position t whose next token has a loss, the draft's distribution after x_t is compared with the target's. With `labels="hard"`
the target does not run: the loss is the cross-entropy of the sequence's own next token, which is sequence-level distillation on the
target's completions and plain language modelling on other sequences.

Token selection (AdaSPEC, arXiv 2510.19779): given a frozen reference draft, the loss counts only the share of the tokens where the draft
is furthest behind the reference, KL(p || q) - KL(p || q_ref). They are selected in each micro-batch.

On-policy data: the draft generates, the target scores (GKD, arXiv 2306.13649; DistillSpec). A draft that is trained on the target's
completions alone never sees the prefixes that its own mistakes lead to. In a share of the batches, therefore, the rows are cut to their
first tokens and the draft generates the rest.
"""

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specdistill.data.batch_generate import generate, generation_mode
from specdistill.errors import UserError
from specdistill.losses.divergence import Divergence, LossSum, acceptance
from specdistill.targets.anatomy import Anatomy, examine
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.arguments import shards_weights
from specdistill.training.objective import SoftTargets, StepSums, compute_soft_targets, has_loss, shift_left


class Distillation(nn.Module):
    """The draft model as the trainer sees it: rows in, loss sums out.

    Args:
        temperature: divides both sets of logits in the loss.
        labels: `soft` of the target, or the sequence's own `hard`.
        num_positions: K of the simulated acceptance length.
        reference, selected: a frozen draft of the same vocabulary, and the share of the loss tokens that is kept.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        divergence: Divergence,
        *,
        temperature: float = 1.0,
        labels: str = "soft",
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
        self._draft = examine(draft, "the draft", key="draft.init")
        # No submodule: it is neither trained nor saved.
        self._reference = None if reference is None else examine(reference, "the reference", key="loss.reference")
        # transformers' Trainer reads this name: what is the same tensor under another name is saved once.
        self._keys_to_ignore_on_save = repeated_names(self)

    def tie_weights(self) -> None:
        """Called by transformers' Trainer after it has loaded a checkpoint without the repeated names."""
        self.draft.tie_weights()

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """Called by transformers' Trainer for `train.gradient_checkpointing`, as the next one by older versions."""
        self.draft.activation_checkpointing_enable(**options)

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        self.draft.gradient_checkpointing_enable(**options)

    def num_loss_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        """How many tokens the loss of a batch is summed over, up to the rounding of a selection."""
        return self.selected * has_loss(batch["document_ids"], batch["loss_mask"], ahead=1).sum()

    def read_target(self, target: FrozenTarget, inputs: dict[str, Tensor]) -> dict[str, Any]:
        """Soft targets at temperature 1 and the reference's loss; neither when hard labels are all that the loss needs."""
        if self.training and self.labels == "hard" and self._reference is None:
            return {"soft_targets": None}
        has_loss_BT = has_loss(inputs["document_ids"], inputs["loss_mask"], ahead=1)
        features = target.features(inputs["input_ids"], (), position_ids_BT=inputs["position_ids"])
        all_ids = torch.arange(target.vocab_size, device=target.device)
        soft_targets = compute_soft_targets(target.logits, features.last_hidden, has_loss_BT, all_ids, 1.0)
        if self._reference is None:
            return {"soft_targets": soft_targets}
        logits_RV = logits_of_rows(self._reference, inputs["input_ids"], inputs["position_ids"], has_loss_BT)
        return {"soft_targets": soft_targets, "reference_loss_R": rowwise_kl(logits_RV, soft_targets.probs_RW)}

    def forward(
        self,
        input_ids: Tensor,
        loss_mask: Tensor,
        document_ids: Tensor,
        position_ids: Tensor,
        soft_targets: SoftTargets | None,
        reference_loss_R: Tensor | None = None,
        measure: bool = False,
    ) -> tuple[Tensor, StepSums]:
        """The loss summed over the loss tokens of packed rows [B, T] (see specdistill.data.packing), and the sums of the metrics."""
        has_loss_BT = has_loss(document_ids, loss_mask, ahead=1)
        logits_RV = logits_of_rows(self._draft, input_ids, position_ids, has_loss_BT)
        next_R = shift_left(input_ids, 1, 0)[has_loss_BT]
        probs_RV = None if soft_targets is None else soft_targets.probs_RW
        sums = StepSums()
        if measure:
            assert soft_targets is not None
            self._measure(sums, logits_RV.detach(), soft_targets, has_loss_BT)
        elif reference_loss_R is not None:
            assert probs_RV is not None
            gap_R = rowwise_kl(logits_RV.detach(), probs_RV) - reference_loss_R
            rows = gap_R.topk(math.ceil(self.selected * len(gap_R))).indices
            logits_RV, probs_RV, next_R = logits_RV[rows], probs_RV[rows], next_R[rows]
        if self.labels == "hard":
            loss = LossSum(F.cross_entropy(logits_RV.float(), next_R, reduction="sum"), len(next_R))
        else:
            assert probs_RV is not None
            if self.temperature != 1.0:
                probs_RV = probs_RV.clamp_min(torch.finfo(torch.float32).tiny).log().div(self.temperature).softmax(-1)
            loss = self.divergence(logits_RV / self.temperature, probs_RV)
        sums.loss.append(loss.total.detach())
        sums.loss_tokens.append(torch.tensor(loss.count, device=logits_RV.device))
        return loss.total, sums

    def _measure(self, sums: StepSums, logits_RV: Tensor, soft_targets: SoftTargets, has_loss_BT: Tensor) -> None:
        """Accuracy, acceptance at temperature 1, and chains of K correct draft tokens in a row."""
        hit_R = logits_RV.argmax(-1) == soft_targets.top1_R
        sums.correct.append(hit_R.sum())
        sums.accepted.append(acceptance(logits_RV.float().softmax(-1), soft_targets.probs_RW).sum())
        hit_BT = torch.zeros_like(has_loss_BT).masked_scatter_(has_loss_BT, hit_R)
        chain_BT, correct_BT = torch.ones_like(has_loss_BT), torch.ones_like(has_loss_BT)
        for k in range(self.num_positions):
            # Consecutive positions with a loss are in one document: its last token has none.
            chain_BT = chain_BT & shift_left(has_loss_BT.long(), k, 0).bool()
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


def logits_of_rows(draft: Anatomy, input_ids: Tensor, position_ids: Tensor, has_loss_BT: Tensor) -> Tensor:
    """A causal language model's logits [R, V] at the positions of packed rows that have a loss; its head sees no others."""
    hidden = draft.backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
    return draft.head(hidden[has_loss_BT])


def rowwise_kl(logits_RV: Tensor, probs_RV: Tensor) -> Tensor:
    """KL(p || q) up to the entropy of p, which differences of two drafts do not see: -sum_v p_v log q_v, [R]."""
    return -(probs_RV * logits_RV.float().log_softmax(-1)).sum(-1)


@dataclass(frozen=True)
class OnPolicyGeneration:
    """Replaces a `fraction` of the batches. Lengths in tokens; `end_ids` end a completion. The seed makes a run repeatable."""

    draft: PreTrainedModel
    fraction: float
    temperature: float
    prompt_tokens: int
    num_tokens: int
    end_ids: tuple[int, ...]
    seed: int

    def __post_init__(self) -> None:
        """Raises UserError where no process has the whole draft, which each would need for as many tokens as its own rows take."""
        if self.fraction and shards_weights():
            expected = "0, or a launch that leaves weights whole: ddp, zero1, zero2"
            raise UserError("on_policy.fraction", got=f"{self.fraction} with sharded weights", expected=expected)

    def __call__(self, batch: dict[str, Tensor], number: int) -> dict[str, Tensor]:
        """The batch with this `number` in the run, or what the draft generates after the first tokens of its rows.

        Rows whose first document has at most `prompt_tokens` have nothing to continue; a batch of such rows alone is returned as it is.
        """
        if random.Random(self.seed * 1_000_003 + number).random() >= self.fraction:
            return batch
        first_document = (batch["document_ids"][:, : self.prompt_tokens + 1] == 0).all(1)
        prompts = batch["input_ids"][first_document, : self.prompt_tokens].tolist()
        if not prompts:
            return batch
        with generation_mode(self.draft, self.draft.dtype) as draft:
            completions = generate(
                draft,
                prompts,
                [self.temperature] * len(prompts),
                max_new_tokens=self.num_tokens,
                end_ids=self.end_ids,
                seed=self.seed * 1_000_003 + number,
                num_parts=1,
            )
        return self._rows(prompts, completions, batch["input_ids"].device)

    def _rows(self, prompts: list[list[int]], completions: list[list[int]], device: torch.device) -> dict[str, Tensor]:
        """One document a row; only generated tokens have a loss."""
        rows = [torch.tensor(prompt + completion) for prompt, completion in zip(prompts, completions, strict=True)]
        ids_BT = pad_sequence(rows, batch_first=True).to(device)
        position_BT = torch.arange(ids_BT.shape[1], device=device).expand_as(ids_BT)
        is_token_BT = position_BT < torch.tensor([len(row) for row in rows], device=device).unsqueeze(1)
        return {
            "input_ids": ids_BT,
            "loss_mask": (is_token_BT & (position_BT >= self.prompt_tokens)).long(),
            "document_ids": is_token_BT.long() - 1,
            "position_ids": position_BT * is_token_BT,
        }
