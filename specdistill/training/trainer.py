"""DraftTrainer: transformers' Trainer, plus the frozen target, the features it yields, and the one place where losses are divided.

The loop, accumulation, mixed precision, data parallelism, checkpoints, resuming and progress are the Trainer's.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainingArguments

from specdistill.data import collate
from specdistill.drafts.checkpoint import save_eagle3
from specdistill.drafts.eagle3 import Eagle3Draft
from specdistill.losses.divergence import DIVERGENCES
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.unroll import StepSums, TrainingTimeTest, predicts, teach


class DraftTrainer(Trainer):
    """Trains an EAGLE-3 head on rows of `specdistill.data` (input_ids, supervise, document_ids, position_ids)."""

    def __init__(
        self,
        draft: Eagle3Draft,
        target: FrozenTarget,
        arguments: TrainingArguments,
        train_set: Dataset,
        eval_set: Dataset,
        *,
        ttt_steps: int,
        divergence: str = "forward_kl",
        step_decay: float = 0.8,
        temperature: float = 1.0,
        optimizer: torch.optim.Optimizer | None = None,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        super().__init__(
            model=TrainingTimeTest(draft, DIVERGENCES[divergence], ttt_steps, step_decay, temperature),
            args=arguments,
            train_dataset=train_set,
            eval_dataset=eval_set,
            data_collator=collate,
            compute_metrics=step_metrics,
            optimizers=(optimizer, None),
            callbacks=callbacks,
        )
        self.draft = draft
        self.target = target
        self.temperature = temperature
        # compute_loss divides by the whole batch's count itself: the Trainer must not divide again.
        self.model_accepts_loss_kwargs = True

    def best_draft(self) -> Eagle3Draft:
        """The head with the longest simulated acceptance length (the Trainer has loaded it back), or the last one."""
        return self.draft

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Tensor]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Tensor]], Tensor]:
        """The micro-batches of one optimizer step, and the rows kept at unroll step 0 over all of them on all processes."""
        batches = list(islice(epoch_iterator, num_batches))
        kept = sum((predicts(batch["document_ids"], batch["supervise"], 0).sum() for batch in batches), torch.tensor(0))
        count: Tensor = self.accelerator.reduce(kept.to(device), "sum")
        return batches, count.clamp_min(1)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The one division: a sum over this micro-batch, over the count of the whole global batch.

        Data parallelism averages gradients over processes, so the sum is scaled by their number: the step's gradient is then the same
        however the batch was cut.
        """
        total, sums = self._unroll(model, inputs, measure=not model.training)
        assert num_items_in_batch is not None
        loss = total * self.accelerator.num_processes / num_items_in_batch
        return (loss, sums) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluation: the per-step sums [1, 6, K] take the place of logits, so that compute_metrics can add them up."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            total, sums = self._unroll(model, inputs, measure=True)
        table = sums.table().unsqueeze(0)
        kept = sums.kept[0].clamp_min(1)
        return (total / kept).detach(), table, torch.zeros(1, device=table.device)

    def _unroll(self, model: nn.Module, inputs: dict[str, Tensor], measure: bool) -> tuple[Tensor, StepSums]:
        config = self.draft.config
        with torch.no_grad(), self.accelerator.autocast():
            features = self.target.features(inputs["input_ids"], config.aux_layers, position_ids_BT=inputs["position_ids"])
            teacher = teach(
                self.target.lm_head,
                features.last_hidden,
                inputs["supervise"],
                inputs["document_ids"],
                self.draft.target_ids_W,
                self.temperature,
            )
        result: tuple[Tensor, StepSums] = model(**inputs, aux=features.aux, teacher=teacher, measure=measure)
        return result

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Checkpoints hold the Trainer's own file, for resuming, and the head in its public layout, for measuring."""
        super()._save(output_dir, state_dict)
        save_eagle3(self.draft, Path(output_dir or str(self.args.output_dir)) / "draft")


def step_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """loss_k, accuracy_k, acceptance_k for every unroll step, and the simulated acceptance length.

    acceptance_length = 1 + sum_k P(the first k + 1 guesses are all right): counted chain by chain, not a product of marginals, and the
    bonus token counts, so that it compares with what decoding measures greedily.
    """
    table = torch.as_tensor(prediction.predictions).double().sum(0)
    loss, kept, correct, accepted, chain_correct, chains = table
    metrics = {}
    for k in range(table.shape[1]):
        metrics[f"loss_{k}"] = float(loss[k] / kept[k])
        metrics[f"accuracy_{k}"] = float(correct[k] / kept[k])
        metrics[f"acceptance_{k}"] = float(accepted[k] / kept[k])
    metrics["acceptance_length"] = 1.0 + float((chain_correct / chains).sum())
    return metrics
