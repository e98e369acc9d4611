"""Train a draft with transformers' Trainer, next to a frozen target.

transformers' Trainer runs the loop, with accumulation, data parallelism, sharding and checkpoints.
The loss is that of the objective: `TrainingTimeTest` for heads, `Distillation` for draft models.
This module is the only place where the sum of losses is divided. Trained weights are float32, and
mixed precision is autocast over them, whatever the sharding.
"""

import copy
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import broadcast_object_list
from datasets import Dataset, concatenate_datasets
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import TrainingArguments

from specdistill.common.errors import UserError
from specdistill.common.processes import measure_peak_memory_bytes
from specdistill.data.rows.packing import PADDING_DOCUMENT, collate
from specdistill.data.rows.store import FeatureStore
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.arguments import find_autocast_dtype, make_trainer_error
from specdistill.training.checkpoints import STAGING_DIR, saving
from specdistill.training.history import select_finite
from specdistill.training.objective import ForwardInputs, StepSums, step_metrics
from specdistill.training.resumable import ResumableTrainer


class DistillationTrainer(ResumableTrainer):
    """A Trainer that trains a draft on packed rows.

    The rows have the columns input_ids, loss_mask, document_ids and position_ids
    (`specdistill.data.rows`).

    Args:
        objective: the draft with its loss.
        target: the frozen target.
        arguments: the Trainer's.
        train_set: training rows.
        eval_set: held-out rows.
        save: writes a draft into a folder, in its public layout. Checkpoints hold it next to the
            Trainer's own file.
        optimizer: None leaves the choice to the Trainer.
        decode: measures the acceptance length in decoding of the draft in a folder. Evaluations
            then log it, too; None to leave it out.
        store: the store that features are read from; None if the target computes them.
    """

    def __init__(
        self,
        objective: nn.Module,
        target: FrozenTarget,
        arguments: TrainingArguments,
        train_set: Dataset,
        eval_set: Dataset,
        *,
        save: Callable[[nn.Module, Path], None],
        optimizer: torch.optim.Optimizer | None = None,
        decode: Callable[[Path], float] | None = None,
        store: FeatureStore | None = None,
    ) -> None:
        """Initialize the Trainer with rows that are filled up to whole steps."""
        # Fill the rows up to whole steps, so that `epoch` in the log does not depend on how
        # processes and micro-batches share a step's rows.
        self.num_rows = len(train_set)
        step_rows = (
            arguments.train_batch_size
            * arguments.world_size
            * arguments.gradient_accumulation_steps
        )
        filled_train_set = fill_up(train_set, step_rows)
        self.num_empty = len(filled_train_set) - self.num_rows
        arguments.remove_unused_columns = False  # `prepare` reads columns that `forward` does not.

        # Initialize the Trainer. It may refuse combinations of arguments.
        try:
            super().__init__(
                model=objective,
                args=arguments,
                train_dataset=filled_train_set,
                eval_dataset=fill_up(eval_set, arguments.eval_batch_size * arguments.world_size),
                data_collator=collate if store is None else store.collate,
                compute_metrics=step_metrics,
                optimizers=(optimizer, None),
            )
        except ValueError as error:
            raise make_trainer_error(error, vars(arguments)) from error

        # Set what this class needs in addition.
        self.objective: Any = objective
        self.target = target
        self.save = save
        self.decode = decode
        self.num_tokens: Tensor
        self._count_tokens_from_now()

        # Say that the loss is already divided by the whole batch's count, so that the Trainer does
        # not divide it by the accumulation steps.
        self.model_accepts_loss_kwargs = True

        # Name the modules that FSDP shards one by one: the layers that transformers names for a
        # language model, or the layers in a head's list, if it has one.
        layers = {type(layer).__name__ for layer in getattr(self.objective.draft, "layers", ())}
        undivided_modules = getattr(self.objective.draft, "_no_split_modules", None)
        objective._no_split_modules = sorted(undivided_modules or layers)  # type: ignore[assignment]

        # Keep a copy of a sharded draft, into which its weights are gathered to be saved.
        self.is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        self.whole: Any = None
        if self.is_sharded and arguments.should_save:
            self.whole = copy.deepcopy(self.objective.draft).cpu()

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[int] | None:
        """Return a sampler of rows whose order does not depend on the number of processes."""
        # Only a random order could depend on the number of processes, so any other order is left to
        # the Trainer.
        if self.args.train_sampling_strategy != "random":
            return super()._get_train_sampler(train_dataset)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return RandomOrder(self.num_rows, self.num_empty, seed)

    def get_batch_samples(
        self, epoch_iterator: Iterator[ForwardInputs], num_batches: int, device: torch.device
    ) -> tuple[list[ForwardInputs], Tensor]:
        """Return this process's micro-batches of one optimizer step, and the count of loss tokens.

        The Trainer calls this, and passes the count on to `compute_loss`, which divides by it. It
        is the number of loss tokens in the micro-batches of all processes.
        """
        # Prepare the micro-batches. Each has a number in the whole run, which seeds what is random
        # in it. The processes take the numbers in turn.
        first = self.state.global_step * num_batches
        batches = []
        for index, batch in enumerate(islice(epoch_iterator, num_batches)):
            number = (first + index) * self.args.world_size + self.args.process_index
            batches.append(self.objective.prepare(batch, number))

        # Count tokens for the speed in the log, and loss tokens for the division of the loss.
        self.num_tokens = self.num_tokens + sum(
            (batch["document_ids"] != PADDING_DOCUMENT).sum() for batch in batches
        )
        loss_tokens = sum(
            (self.objective.count_loss_tokens(batch) for batch in batches), torch.tensor(0)
        )
        # At least 1, because the loss is divided by the count.
        return batches, self.accelerator.reduce(loss_tokens.to(device), "sum").clamp_min(1)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: ForwardInputs,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, StepSums]:
        """Return the loss of a micro-batch: its sum over the loss tokens, divided by their count.

        The count (`num_items_in_batch`) is over all micro-batches and processes of the step.
        Nothing else divides the loss. Data parallelism averages gradients over processes, so the
        sum is multiplied by the number of processes. The step's gradient is then the same however
        the step's rows were divided into micro-batches and processes.
        """
        total, sums = self._sum_losses(model, inputs, measure=not model.training)
        assert num_items_in_batch is not None
        # For some objectives, `total` has one sum for each drafted position.
        loss = (total * self.accelerator.num_processes / num_items_in_batch).sum()
        return (loss, sums) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: ForwardInputs,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, Tensor, Tensor]:
        """Compute the sums of losses and metrics of one batch in an evaluation.

        The sums are returned in place of logits and labels. The Trainer concatenates the sums of
        all batches along the first dimension, and gives them to `step_metrics`, which computes the
        means.

        Returns:
            None in place of a loss. In place of logits, the eight sums of `StepSums` for each of K
            drafted positions [1, 8, K]. In place of labels [1, 2, P]: P sums of the loss, and for
            each the number of loss tokens by which it is divided. P is K for an objective that
            sums the loss of each position by itself, and 1 for one that sums all positions.
        """
        # `number` is None, so that a batch is prepared the same way in every evaluation.
        inputs = self._prepare_inputs(self.objective.prepare(inputs, None))
        with torch.no_grad():
            total, sums = self._sum_losses(model, inputs, measure=True)
        # Each of K sums is divided by the count of its own position. A single sum is divided by the
        # count of the first position.
        total_P = total.reshape(-1)
        counts_P = sums.loss_tokens[: len(total_P)].to(total_P)
        return None, sums.table().unsqueeze(0), torch.stack((total_P, counts_P)).unsqueeze(0)

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Evaluate as the Trainer does, and by decoding if the constructor got `decode`.

        To decode, the draft is saved, and the first process decodes with it while the other
        processes wait.

        Returns:
            The metrics. With `decode` they include `eval_decoded_acceptance_length`.

        Raises:
            UserError: if the held-out rows do not measure `train.metric_for_best_model`.
        """
        # An evaluation before the first step (step 0) restores the state of the random numbers, so
        # that it does not change the training that follows.
        with torch.random.fork_rng(enabled=self.state.global_step == 0):
            metrics = select_finite(super().evaluate(eval_dataset, ignore_keys, metric_key_prefix))

        # Decode with the draft as it is saved for users, again without a change of the random
        # numbers. All processes get the first one's length; the 0.0 of the others is not used.
        if self.decode is not None:
            folder = Path(str(self.args.output_dir)) / STAGING_DIR / "measured"
            with saving(folder):
                self.save_model(str(folder), _internal_call=True)
            with torch.random.fork_rng():
                length = self.decode(folder / "draft") if self.is_world_process_zero() else 0.0
            measured = {"eval_decoded_acceptance_length": broadcast_object_list([length])[0]}
            if self.args.should_save:
                # The folder may be missing: with `train.save_on_each_node`, a machine without the
                # whole weights of a sharded draft has written none.
                shutil.rmtree(folder, ignore_errors=True)
            self.log(measured)
            metrics |= measured
        self._count_tokens_from_now()

        # The held-out rows must measure the metric by which the best draft is chosen.
        metric = self.args.metric_for_best_model
        if metric is not None and f"eval_{metric.removeprefix('eval_')}" not in metrics:
            raise UserError(
                "train.metric_for_best_model",
                got=f"{metric}, which the held-out rows do not measure",
                expected=(
                    "acceptance_length, or held-out rows with longer answers (at least k tokens"
                    " for a metric of drafted position k)"
                ),
            )
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as the Trainer does, and add speed and memory to the log of a training loss.

        Tokens per second are the sum over all processes, without the time of evaluations and saves.
        The peak memory is the largest of all processes.
        """
        # Logs without a loss come from evaluations, and from the end of training.
        if "loss" in logs:
            local_tokens = torch.as_tensor(self.num_tokens, device=self.args.device)
            tokens = int(self.accelerator.reduce(local_tokens, "sum"))
            logs["tokens_per_second"] = tokens / (time.monotonic() - self.counted_from)
            peak_bytes = torch.tensor(
                [measure_peak_memory_bytes(self.args.device)], device=self.args.device
            )
            logs["peak_memory_gib"] = int(self.accelerator.gather(peak_bytes).max()) / 2**30
            self._count_tokens_from_now()
        super().log(logs, start_time)

    def _count_tokens_from_now(self) -> None:
        """Restart the token count and the clock, from which `log` computes tokens per second."""
        self.num_tokens = torch.tensor(0)
        self.counted_from = time.monotonic()

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """Save a checkpoint, and leave the time of saving out of tokens per second."""
        super()._save_checkpoint(model, trial)
        self._count_tokens_from_now()

    def _sum_losses(
        self, model: nn.Module, inputs: ForwardInputs, measure: bool
    ) -> tuple[Tensor, StepSums]:
        """Run target and draft on a micro-batch, and sum its losses and its metrics.

        Args:
            model: the objective, as it is wrapped for data parallelism.
            inputs: the prepared micro-batch.
            measure: whether metrics are computed besides the loss.

        Returns:
            The sum of the losses, and the sums of the metrics.
        """
        dtype = find_autocast_dtype(self.args)
        with torch.autocast(self.args.device.type, dtype, enabled=dtype is not None):
            # Not inference_mode, because its tensors cannot be saved for the backward pass of the
            # draft without a copy.
            with torch.no_grad():
                target_outputs = self.objective.read_target(self.target, inputs)
            output: tuple[Tensor, StepSums] = model(**{**inputs, **target_outputs}, measure=measure)
            return output

    def save_draft(self, folder: Path) -> None:
        """Write the draft into a folder, in its public layout.

        Every process calls this, because each may hold a part of the draft. The first process
        writes. With `train.save_on_each_node` the first process of each machine writes, if it has
        the whole draft.
        """
        # Gather the weights of a sharded draft. Processes that do not write may get an empty
        # dictionary.
        state = self.accelerator.get_state_dict(self.model_wrapped) if self.is_sharded else None
        if self.args.should_save and (state or not self.is_sharded):
            self._write_draft(folder, state)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        """Save the Trainer's own file of weights and the draft; the Trainer calls this.

        The Trainer's file is needed to resume. The draft, in its public layout in the folder
        `draft`, can be measured.
        """
        # A process that is not to write, or did not get the gathered weights, saves nothing.
        if not self.args.should_save or (self.is_sharded and not state_dict):
            return

        # Save the Trainer's file. Tied weights are saved only once: their other names are listed in
        # `_keys_to_ignore_on_save`.
        state = self.objective.state_dict() if state_dict is None else state_dict
        repeated_names = set(getattr(self.objective, "_keys_to_ignore_on_save", ()))
        kept_state = {name: tensor for name, tensor in state.items() if name not in repeated_names}
        super()._save(output_dir, kept_state)
        self._write_draft(Path(output_dir or str(self.args.output_dir)) / "draft", state)

    def _write_draft(self, folder: Path, state: dict[str, Tensor] | None) -> None:
        """Write the draft in its public layout.

        Args:
            folder: the folder in which the draft is written.
            state: the gathered weights of the objective; only needed for a sharded draft.
        """
        # A draft that is not sharded is saved as it is. The weights of a sharded draft are loaded
        # into `whole`, a copy of the draft on the CPU with room for all of them.
        if self.whole is None:
            return self.save(self.objective.draft, folder)
        assert state is not None
        draft_state = {
            name.removeprefix("draft."): tensor
            for name, tensor in state.items()
            if name.startswith("draft.")
        }
        self.whole.load_state_dict(draft_state)
        return self.save(self.whole, folder)


def fill_up(rows: Dataset, multiple: int) -> Dataset:
    """Append empty rows until the number of rows is a multiple of `multiple`.

    An empty row is padding without loss. Without empty rows, accelerate would repeat rows so that
    every process gets the same number, and an evaluation would count some rows twice.
    """
    # All rows have the same number of tokens.
    length = len(rows[0]["input_ids"])
    num_missing = -len(rows) % multiple
    if num_missing == 0:
        return rows
    padding = {"input_ids": 0, "loss_mask": 0, "document_ids": PADDING_DOCUMENT, "position_ids": 0}

    # Each column of an empty row repeats one value.
    table = {column: [[value] * length] * num_missing for column, value in padding.items()}
    return concatenate_datasets([rows, Dataset.from_dict(table, features=rows.features)])


class RandomOrder(Sampler[int]):
    """A sampler that yields the rows of an epoch in random order, then the empty rows.

    The order depends only on the seed and the epoch. So it is the same for any number of processes,
    although the number of empty rows is not.
    """

    def __init__(self, num_rows: int, num_empty: int, seed: int) -> None:
        """Prepare the order of `num_rows` rows, which are followed by `num_empty` empty rows."""
        self.rows = SeedableRandomSampler(range(num_rows), data_seed=seed)
        self.empty = range(num_rows, num_rows + num_empty)

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of the rows anew for an epoch."""
        self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        yield from self.rows
        yield from self.empty

    def __len__(self) -> int:
        return len(self.rows) + len(self.empty)
