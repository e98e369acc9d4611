"""What a draft model learns: the target's distribution, position by position (DistillSpec, arXiv 2310.08461), some of it on-policy.

Shapes: B rows, T positions, R loss tokens (padded), r of a chunk of them, H hidden size, V vocabulary, K drafted positions, S = B T chains.

At every position t whose next token has a loss, the draft's distribution after x_t is compared with the target's. With `labels="hard"`
the target does not run: the loss is the cross-entropy of the sequence's own next token, which is sequence-level distillation on the
target's completions and plain language modelling on other sequences.

On-policy data: the draft generates, the target scores (GKD, arXiv 2306.13649; DistillSpec). A draft that is trained on the target's
completions alone never sees the prefixes that its own mistakes lead to. In a share of the batches, therefore, the rows are cut to their
first tokens and the draft generates the rest.
"""

import random
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specdistill.errors import UserError
from specdistill.losses.chunked import head_loss
from specdistill.losses.divergence import Divergence
from specdistill.rows.packing import indexed
from specdistill.targets.anatomy import examine
from specdistill.targets.batch_generate import generate, generation_mode
from specdistill.targets.frozen import FrozenTarget
from specdistill.targets.packed_rows import Documents, attending, configs_with_lengths, lengths_of
from specdistill.training.arguments import shards_weights
from specdistill.training.objective import (
    Objective,
    SoftTargets,
    StepSums,
    TargetDistributions,
    before,
    in_a_row,
    loss_rows,
)


class Distillation(Objective):
    """The draft model as the trainer sees it: rows in, loss sums out.

    Args:
        temperature: divides both sets of logits in the loss.
        labels: `soft` of the target, or the sequence's own `hard`.
        num_positions: K of the simulated acceptance length.
        on_policy: generates some of the batches; None: none.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        divergence: Divergence,
        *,
        temperature: float = 1.0,
        labels: str = "soft",
        num_positions: int = 4,
        on_policy: "OnPolicyGeneration | None" = None,
    ) -> None:
        super().__init__(draft, divergence, temperature, torch.ones(1))
        self.labels = labels
        self.num_positions = num_positions
        self.on_policy = on_policy
        self.anatomy = examine(draft, "the draft", key="draft.init")
        self.packed_configs = configs_with_lengths(
            draft
        )  # of a draft that reads documents by their lengths
        # transformers' Trainer reads this name: what is the same tensor under another name is saved once.
        self._keys_to_ignore_on_save = repeated_names(self)

    @property
    def layers(self) -> nn.ModuleList:
        return self.anatomy.layers

    def tie_weights(self) -> None:
        """Called by transformers' Trainer after it has loaded a checkpoint without the repeated names."""
        self.draft.tie_weights()

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Called by transformers' Trainer for `train.activation_checkpointing`. Layers attend as at first when they are computed again."""
        own = {
            "use_reentrant": False,
            "context_fn": lambda: (nullcontext(), attending(self.packed_configs)),
        }
        self.draft.activation_checkpointing_enable(
            {**(activation_checkpointing_kwargs or {}), **own}, **options
        )

    def prepare(self, batch: dict[str, Any], number: int | None) -> dict[str, Any]:
        """The batch, or in training one that the draft generated in its place."""
        return batch if self.on_policy is None or number is None else self.on_policy(batch, number)

    def read_target(self, target: FrozenTarget, inputs: dict[str, Any]) -> dict[str, Any]:
        """Soft targets at temperature 1, by which acceptance is measured; none where hard labels are all that the loss needs."""
        if self.training and self.labels == "hard":
            return {"soft_targets": None}
        return {
            "soft_targets": replace(
                super().read_target(target, inputs)["soft_targets"], temperature=1.0
            )
        }

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        loss_positions: Tensor,
        cumulative_lengths: Tensor,
        longest: int,
        soft_targets: SoftTargets | None,
        measure: bool = False,
        **unread: Any,  # the batch's other columns
    ) -> tuple[Tensor, StepSums]:
        """The loss summed over the loss tokens of packed rows [B, T] (see specdistill.rows.packing), and the sums of the metrics."""
        packed = (
            lengths_of(input_ids, Documents(cumulative_lengths, longest))
            if self.packed_configs
            else {}
        )
        with attending(self.packed_configs):
            output = self.anatomy.backbone(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, **packed
            )
        rows_RH = before(output.last_hidden_state, loss_positions, 1)
        weights_R = loss_rows(position_ids, loss_positions, ahead=1).float()
        next_R = input_ids.flatten()[loss_positions]
        total, metrics_MR = self.losses(rows_RH, weights_R, next_R, soft_targets, measure)
        by_chain = partial(in_a_row, loss_positions, input_ids.shape, self.num_positions)
        return total, StepSums.of(
            weights_R.unsqueeze(0), *metrics_MR.unsqueeze(1), by_chain=by_chain
        )

    def losses(
        self,
        rows_RH: Tensor,
        weights_R: Tensor,
        next_R: Tensor,
        soft_targets: SoftTargets | None,
        measure: bool,
    ) -> tuple[Tensor, Tensor]:
        """The weighted sum of the rows' losses, next_R being the sequences' own tokens, and the weighted metrics [M, R]."""

        def targets_of(rows: slice) -> tuple[Tensor, TargetDistributions | None]:
            return next_R[rows], None if soft_targets is None else soft_targets.at(
                rows, measure=measure
            )

        total, metrics_MKR = head_loss(
            rows_RH.unsqueeze(0),
            weights_R.unsqueeze(0),
            self.anatomy.head,
            targets_of,
            self.row_losses,
        )
        return total, metrics_MKR.squeeze(1) * weights_R

    def row_losses(self, logits_rV: Tensor, targets: Any, k: int) -> tuple[Tensor, Tensor]:
        """Nats [r], and the metrics of each row [M, r]; see `head_loss`. targets: the sequences' own tokens [r], and the distributions."""
        next_r, soft = targets
        if self.labels == "hard":
            losses_r = F.cross_entropy(logits_rV.float(), next_r, reduction="none")
        else:
            probs_rV = soft.probs_rW
            if self.temperature != 1.0:
                probs_rV = (
                    probs_rV.clamp_min(torch.finfo(torch.float32).tiny)
                    .log()
                    .div(self.temperature)
                    .softmax(-1)
                )
            losses_r = self.divergence(logits_rV / self.temperature, probs_rV)
        return self.with_metrics(losses_r, logits_rV, soft)


def repeated_names(module: nn.Module) -> list[str]:
    """Names in a module's state that stand for a tensor named before: a head that is the embedding."""
    first: dict[tuple[int, torch.Size], str] = {}
    return [
        name
        for name, tensor in module.state_dict().items()
        if first.setdefault((tensor.data_ptr(), tensor.shape), name) != name
    ]


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
            raise UserError(
                "on_policy.fraction", got=f"{self.fraction} with sharded weights", expected=expected
            )

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

    def _rows(
        self, prompts: list[list[int]], completions: list[list[int]], device: torch.device
    ) -> dict[str, Tensor]:
        """One document a row; only generated tokens have a loss."""
        rows = [
            torch.tensor(prompt + completion)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        ids_BT = pad_sequence(rows, batch_first=True).to(device)
        position_BT = torch.arange(ids_BT.shape[1], device=device).expand_as(ids_BT)
        is_token_BT = position_BT < torch.tensor(
            [len(row) for row in rows], device=device
        ).unsqueeze(1)
        columns = {
            "input_ids": ids_BT,
            "loss_mask": (is_token_BT & (position_BT >= self.prompt_tokens)).long(),
            "document_ids": is_token_BT.long() - 1,
            "position_ids": position_BT * is_token_BT,
        }
        return indexed(columns)
