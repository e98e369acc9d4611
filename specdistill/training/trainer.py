"""DraftTrainer: transformers' Trainer, plus the frozen target and the one place where losses are divided.

The loop, accumulation, mixed precision, data parallelism, checkpoints and resuming are the Trainer's. The loss is the objective's:
`TrainingTimeTest` for heads, `Distillation` for draft models.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import TrainingArguments

from specdistill.data.packing import collate
from specdistill.errors import UserError
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.objective import StepSums, step_metrics
from specdistill.training.resumable import ResumableTrainer

Batch = dict[str, Tensor]


class Objective(Protocol):
    """An nn.Module that holds the draft.

    Its `forward(**batch, **target_outputs, measure)` returns the loss, summed over the loss tokens, and StepSums.
    """

    def num_loss_tokens(self, batch: Batch) -> Tensor:
        """What the loss of a batch is divided by."""
        ...

    def read_target(self, target: FrozenTarget, inputs: Batch) -> dict[str, Any]:
        """What forward needs from the frozen target; called without gradients."""
        ...


class DraftTrainer(ResumableTrainer):
    """Trains a draft on rows of `specdistill.data` (input_ids, loss_mask, document_ids, position_ids).

    Args:
        objective: the draft with its loss.
        save: saves the draft to a folder in its public layout; checkpoints hold it beside the Trainer's own file.
        on_policy: (batch, its number in the run) -> that batch, or one that the draft generated in its place.
    """

    def __init__(
        self,
        objective: nn.Module,
        target: FrozenTarget,
        arguments: TrainingArguments,
        train_set: Dataset,
        eval_set: Dataset,
        *,
        save: Callable[[Path], None],
        optimizer: torch.optim.Optimizer | None = None,
        on_policy: Callable[[Batch, int], Batch] | None = None,
    ) -> None:
        try:
            super().__init__(
                model=objective,
                args=arguments,
                train_dataset=train_set,
                eval_dataset=eval_set,
                data_collator=collate,
                compute_metrics=step_metrics,
                optimizers=(optimizer, None),
            )
        except ValueError as error:
            raise UserError("train", got=error, expected="arguments that the Trainer accepts together") from error
        self.objective: Any = objective
        self.target = target
        self.save_draft = save
        self.on_policy = on_policy
        # compute_loss divides by the whole batch's count itself: the Trainer must not divide again.
        self.model_accepts_loss_kwargs = True

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Tensor]:
        """The micro-batches of one optimizer step, and their loss tokens over all processes."""
        batches = list(islice(epoch_iterator, num_batches))
        if self.on_policy is not None:
            first = (self.state.global_step * self.args.world_size + self.args.process_index) * num_batches
            batches = [self.on_policy(batch, first + index) for index, batch in enumerate(batches)]
        loss_tokens = sum((self.objective.num_loss_tokens(batch) for batch in batches), torch.tensor(0))
        count: Tensor = self.accelerator.reduce(loss_tokens.to(device), "sum")
        return batches, count.clamp_min(1)

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Tensor | int | None = None
    ) -> Any:
        """The one division: a sum over this micro-batch, over the count of the whole global batch.

        Data parallelism averages gradients over processes, so the sum is scaled by their number: the step's gradient is then the same
        however the batch was cut.
        """
        total, sums = self._loss_sum(model, inputs, measure=not model.training)
        assert num_items_in_batch is not None
        loss = total * self.accelerator.num_processes / num_items_in_batch
        return (loss, sums) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluation: the per-step sums [1, 6, K] take the place of logits, so that compute_metrics can add them up."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            total, sums = self._loss_sum(model, inputs, measure=True)
        table = sums.table().unsqueeze(0)
        return (total / sums.loss_tokens[0].clamp_min(1)).detach(), table, torch.zeros(1, device=table.device)

    def _loss_sum(self, model: nn.Module, inputs: Batch, measure: bool) -> tuple[Tensor, StepSums]:
        with torch.no_grad(), self.accelerator.autocast():
            target_outputs = self.objective.read_target(self.target, inputs)
        result: tuple[Tensor, StepSums] = model(**inputs, **target_outputs, measure=measure)
        return result

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Checkpoints hold the Trainer's own file, for resuming, and the draft in its public layout, for measuring."""
        state = self.objective.state_dict() if state_dict is None else state_dict
        repeated = set(getattr(self.objective, "_keys_to_ignore_on_save", ()))
        super()._save(output_dir, {name: tensor for name, tensor in state.items() if name not in repeated})
        if self.args.should_save:
            self.save_draft(Path(output_dir or str(self.args.output_dir)) / "draft")
