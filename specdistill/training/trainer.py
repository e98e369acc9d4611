"""DraftTrainer: transformers' Trainer, plus the frozen target and the one place where losses are divided.

The loop, accumulation, data parallelism, sharding, checkpoints and resuming are the Trainer's. The loss is the objective's:
`TrainingTimeTest` for heads, `Distillation` for draft models. Trained weights are float32; mixed precision is autocast over them, however
they are sharded.
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

from specdistill.errors import UserError
from specdistill.processes import peak_memory_bytes
from specdistill.rows.packing import PADDING_DOCUMENT, collate
from specdistill.rows.store import FeatureStore
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.arguments import autocast_dtype
from specdistill.training.checkpoints import ASIDE, saving
from specdistill.training.objective import StepSums, step_metrics
from specdistill.training.resumable import ResumableTrainer

TrainingBatch = dict[str, Tensor]


class DraftTrainer(ResumableTrainer):
    """Trains a draft on rows of `specdistill.rows` (input_ids, loss_mask, document_ids, position_ids).

    Args:
        objective: the draft with its loss.
        save: (draft, folder): write it in its public layout; checkpoints hold it next to the Trainer's own file.
        decode: (draft folder) -> its acceptance length in decoding, which evaluations then measure too.
        store: features that batches come with, so that the target makes none.
    """

    def __init__(
        self,
        objective: nn.Module,
        target: FrozenTarget,
        arguments: TrainingArguments,
        train_set: Dataset,
        eval_set: Dataset,
        *,
        save: Callable[[Any, Path], None],
        optimizer: torch.optim.Optimizer | None = None,
        decode: Callable[[Path], float] | None = None,
        store: FeatureStore | None = None,
    ) -> None:
        self.num_rows = len(train_set)
        filled = fill_up(train_set, arguments.train_batch_size * arguments.world_size)
        self.num_empty = len(filled) - self.num_rows
        arguments.remove_unused_columns = False  # `prepare` reads rows before `forward` does
        try:
            super().__init__(
                model=objective,
                args=arguments,
                train_dataset=filled,
                eval_dataset=fill_up(eval_set, arguments.eval_batch_size * arguments.world_size),
                data_collator=collate if store is None else store.collate,
                compute_metrics=step_metrics,
                optimizers=(optimizer, None),
            )
        except ValueError as error:
            raise UserError(
                "train", got=error, expected="arguments that the Trainer accepts together"
            ) from error
        self.objective: Any = objective
        self.target = target
        self.save = save
        self.decode = decode
        self.num_tokens: Tensor
        self._count_tokens_from_now()
        # compute_loss divides by the whole batch's count itself: the Trainer must not divide again.
        self.model_accepts_loss_kwargs = True
        # What FSDP shards one by one: layers of a language model as transformers knows them, of a head by its list, if it has one.
        layers = {type(layer).__name__ for layer in getattr(self.objective.draft, "layers", ())}
        known = getattr(self.objective.draft, "_no_split_modules", None)
        objective._no_split_modules = sorted(known or layers)  # type: ignore[assignment]
        # Sharded weights are gathered into this copy to be saved.
        self.is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        self.whole: Any = (
            copy.deepcopy(self.objective.draft).cpu()
            if self.is_sharded and arguments.should_save
            else None
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        if self.args.train_sampling_strategy != "random":
            return super()._get_train_sampler(train_dataset)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return RandomOrder(self.num_rows, self.num_empty, seed)

    def get_batch_samples(
        self, epoch_iterator: Iterator[TrainingBatch], num_batches: int, device: torch.device
    ) -> tuple[list[TrainingBatch], Tensor]:
        """The micro-batches of one optimizer step, and their loss tokens over all processes."""
        first = (
            self.state.global_step * num_batches
        )  # numbers follow the rows, which processes take in turn
        batches = [
            self.objective.prepare(
                batch, (first + index) * self.args.world_size + self.args.process_index
            )
            for index, batch in enumerate(islice(epoch_iterator, num_batches))
        ]
        self.num_tokens = self.num_tokens + sum(
            (batch["document_ids"] != PADDING_DOCUMENT).sum() for batch in batches
        )
        loss_tokens = sum(
            (self.objective.num_loss_tokens(batch) for batch in batches), torch.tensor(0)
        )
        count: Tensor = self.accelerator.reduce(loss_tokens.to(device), "sum")
        return batches, count.clamp_min(1)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: TrainingBatch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The one division: a sum over this micro-batch, over the count of the whole global batch.

        Data parallelism averages gradients over processes, so the sum is scaled by their number: the step's gradient is then the same
        however the batch was cut.
        """
        total, sums = self._loss_sum(model, inputs, measure=not model.training)
        assert num_items_in_batch is not None
        loss = (total * self.accelerator.num_processes / num_items_in_batch).sum()
        return (loss, sums) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: TrainingBatch,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, Tensor, Tensor]:
        """Evaluation: the per-step sums [1, 8, K] take the place of logits, the loss's sums and counts [1, 2, P] that of labels, so that
        compute_metrics can add them up.
        """
        inputs = self._prepare_inputs(self.objective.prepare(inputs, None))
        with torch.no_grad():
            total, sums = self._loss_sum(model, inputs, measure=True)
        total = total.reshape(-1)
        counts = sums.loss_tokens[: len(total)].to(total)
        return None, sums.table().unsqueeze(0), torch.stack((total, counts)).unsqueeze(0)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The Trainer's own; with `decode`, the draft is saved and the first process decodes with it while the others wait.

        An evaluation before the first step leaves the training that follows as it is.
        """
        with torch.random.fork_rng(enabled=self.state.global_step == 0):
            metrics = super().evaluate(*args, **kwargs)
        if self.decode is not None:
            folder = Path(str(self.args.output_dir)) / ASIDE / "measured"
            with saving(folder):
                self.save_model(str(folder), _internal_call=True)
            with torch.random.fork_rng():
                length = self.decode(folder / "draft") if self.is_world_process_zero() else 0.0
            measured = {"eval_decoded_acceptance_length": broadcast_object_list([length])[0]}
            if self.args.should_save:
                shutil.rmtree(
                    folder, ignore_errors=True
                )  # not there where another machine writes the draft
            self.log(measured)
            metrics |= measured
        self._count_tokens_from_now()
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The Trainer's own; with the loss of steps also their tokens per second, evaluations and saving left out, and the peak memory."""
        if "loss" in logs:
            tokens = int(
                self.accelerator.reduce(
                    torch.as_tensor(self.num_tokens, device=self.args.device), "sum"
                )
            )
            logs["tokens_per_second"] = tokens / (time.monotonic() - self.counted_from)
            logs["peak_memory_gib"] = peak_memory_bytes(self.args.device) / 2**30
            self._count_tokens_from_now()
        super().log(logs, start_time)

    def _count_tokens_from_now(self) -> None:
        self.num_tokens = torch.tensor(0)
        self.counted_from = time.monotonic()

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self._count_tokens_from_now()

    def _loss_sum(
        self, model: nn.Module, inputs: TrainingBatch, measure: bool
    ) -> tuple[Tensor, StepSums]:
        dtype = autocast_dtype(self.args)
        with torch.autocast(self.args.device.type, dtype, enabled=dtype is not None):
            with (
                torch.no_grad()
            ):  # under inference_mode nothing could be kept for backward without a copy
                target_outputs = self.objective.read_target(self.target, inputs)
            result: tuple[Tensor, StepSums] = model(**{**inputs, **target_outputs}, measure=measure)
        return result

    def save_draft(self, folder: Path) -> None:
        """Write the draft in its public layout. Every process calls this, since all may hold a part of it; the first one writes, and
        with `train.save_on_each_node` that of each machine, unless only the first has the whole.
        """
        state = self.accelerator.get_state_dict(self.model_wrapped) if self.is_sharded else None
        if self.args.should_save and (state or not self.is_sharded):
            self._write_draft(folder, state)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        """Checkpoints hold the Trainer's own file, for resuming, and the draft in its public layout, for measuring."""
        if not self.args.should_save or (self.is_sharded and not state_dict):
            return
        state = self.objective.state_dict() if state_dict is None else state_dict
        repeated = set(getattr(self.objective, "_keys_to_ignore_on_save", ()))
        super()._save(
            output_dir, {name: tensor for name, tensor in state.items() if name not in repeated}
        )
        self._write_draft(Path(output_dir or str(self.args.output_dir)) / "draft", state)

    def _write_draft(self, folder: Path, state: dict[str, Tensor] | None) -> None:
        if self.whole is None:
            return self.save(self.objective.draft, folder)
        assert state is not None
        own = {
            name.removeprefix("draft."): tensor
            for name, tensor in state.items()
            if name.startswith("draft.")
        }
        self.whole.load_state_dict(own)
        return self.save(self.whole, folder)


def fill_up(rows: Dataset, multiple: int) -> Dataset:
    """The rows, and after them as many empty ones as make their number a multiple: all padding, without loss.

    Where a set does not divide, accelerate would give rows twice, and an evaluation count them twice.
    """
    length, missing = len(rows[0]["input_ids"]), -len(rows) % multiple
    empty = {"input_ids": 0, "loss_mask": 0, "document_ids": PADDING_DOCUMENT, "position_ids": 0}
    table = {column: [[value] * length] * missing for column, value in empty.items()}
    return (
        concatenate_datasets([rows, Dataset.from_dict(table, features=rows.features)])
        if missing
        else rows
    )


class RandomOrder(Sampler[int]):
    """Indices of an epoch: of the rows, in an order that follows from seed and epoch alone, then of the empty rows.

    So the order is the same for any number of processes, although the number of empty rows is not.
    """

    def __init__(self, num_rows: int, num_empty: int, seed: int) -> None:
        self.rows = SeedableRandomSampler(range(num_rows), data_seed=seed)
        self.empty = range(num_rows, num_rows + num_empty)

    def set_epoch(self, epoch: int) -> None:
        self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        yield from self.rows
        yield from self.empty

    def __len__(self) -> int:
        return len(self.rows) + len(self.empty)
