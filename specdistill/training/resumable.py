"""`ResumableTrainer`, transformers' Trainer whose runs can be stopped and resumed.

A run that was killed at any moment, or asked to stop, is resumed to the same weights.

A training ends before its last step in two cases. If a signal asks it to, it saves and ends. If a
loss is not finite, it ends without saving. A signal reaches one process or all, at different
moments, and a loss may be finite in all processes but one. So at the end of each step the findings
of all processes are added up, and all processes end after the same step. The sums are copied to the
CPU while the device continues. They are read one step later, or at once where the step is saved.
"""

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from specdistill.common.errors import ResourceError, logger
from specdistill.common.processes import all_gather_object
from specdistill.training.checkpoints import (
    STAGING_DIR,
    STATE,
    describe_launch,
    find_checkpoint,
    prune,
    publish_checkpoint,
    saving,
)
from specdistill.training.history import select_finite

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Seconds within which a second signal is taken for the same one: a terminal's Ctrl-C reaches a
# process twice at once, from the terminal and from its launcher.
REPEATED_SIGNAL_S = 1.0
# Environment variables that a launcher sets in its processes.
LAUNCHERS = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")
NOT_FINITE_FILE = Path("run") / "loss_not_finite.json"


class ResumableTrainer(Trainer):
    """A Trainer that writes whole checkpoints only, and stops between two steps (see `Stopping`).

    Checkpoints are written aside and renamed.

    Attributes:
        micro_batch_losses: of the step under way.
        begun: when an uninterrupted run would have begun, by `time.monotonic`.
        stopping: the callback that ends the run.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._run_dir: str | None = None
        self.micro_batch_losses: list[Tensor] = []
        self.begun = time.monotonic()
        super().__init__(*args, **kwargs)
        self.stopping = Stopping(self)
        self.add_callback(self.stopping)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self.micro_batch_losses.append(loss)
        return loss

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run an epoch as the Trainer does, with the order of this epoch's rows.

        If only the end of the run was lost, this runs not one step more.
        """
        if self.state.global_step == self.state.max_steps:
            return
        sampler = kwargs["train_dataloader"].batch_sampler
        # If a part of an epoch is left, accelerate wraps the sampler, and does not set the epoch of
        # the innermost one.
        while hasattr(sampler, "batch_sampler"):
            sampler = sampler.batch_sampler
        if hasattr(getattr(sampler, "sampler", None), "set_epoch"):
            sampler.sampler.set_epoch(kwargs["epoch"])
        super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _finalize_training(self, *args: object, **kwargs: object) -> object:
        """Finish as the Trainer does, with `train_loss` averaged over all processes.

        The Trainer averages the losses of the steps when it logs them, and takes the last ones,
        which it did not log, from this process alone.
        """
        self._tr_loss = self.accelerator.reduce(self._tr_loss, "mean")
        return super()._finalize_training(*args, **kwargs)  # type: ignore[no-untyped-call]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as the Trainer does, but no figure that is not finite: JSON has no such numbers."""
        super().log(select_finite(logs), start_time)

    def _determine_best_metric(self, metrics: dict[str, float], trial: object) -> bool:
        """Determine the best metric as the Trainer does, and save the draft that has it.

        A best draft that is to be loaded at the end is saved, also between two steps of
        `train.save_steps`.
        """
        is_best = super()._determine_best_metric(metrics, trial)
        if is_best and self.args.load_best_model_at_end:
            self.control.should_save = True
        return is_best

    def _get_output_dir(self, trial: object) -> str:
        return self._run_dir or str(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """Save a checkpoint as the Trainer does, but into a folder aside.

        When every process is done, it is moved to its place. Then older checkpoints are removed.
        """
        run = Path(str(self.args.output_dir))
        step = self.state.global_step
        self._run_dir = str(run / STAGING_DIR)
        aside = find_checkpoint(run / STAGING_DIR, step)
        with saving(find_checkpoint(run, step)):
            super()._save_checkpoint(model, trial)
        self._run_dir = None
        if self.state.best_global_step == step:
            self.state.best_model_checkpoint = str(find_checkpoint(run, step))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            with saving(find_checkpoint(run, step)):
                # The state is written again: it now names the best checkpoint by its final place.
                self.state.save_to_json(str(aside / STATE))
                publish_checkpoint(
                    aside, run, describe_launch(self.args), time.monotonic() - self.begun
                )
            best = self.state.best_model_checkpoint
            prune(
                run,
                self.args.save_total_limit,
                {find_checkpoint(run, step), *([Path(best)] if best else [])},
            )
        self.accelerator.wait_for_everyone()


@dataclass(frozen=True)
class EndedStep:
    """A step that has ended, with what the processes found in it.

    Attributes:
        number: of the step, from 1.
        losses: of this process's micro-batches.
        found_2: [2], the numbers of processes that were asked to stop, and of those whose loss is
            not finite. It is on the CPU, and filled once `copied` is reached.
        copied: the event after which a device has copied `found_2`; None without a device.
    """

    number: int
    losses: list[Tensor]
    found_2: Tensor
    copied: torch.cuda.Event | None


class Stopping(TrainerCallback):
    """Ends a ResumableTrainer's run when a signal asks for it, or when a loss is not finite.

    A second signal ends the process.

    Attributes:
        received: the first signal that asked this process to stop.
        received_at: when it came, by `time.monotonic`.
        stops: whether some process was asked to stop.
        unread: steps whose findings have not been read yet.
        launcher: the id of the launcher's process; None without a launcher.
    """

    def __init__(self, trainer: ResumableTrainer) -> None:
        self.trainer = trainer
        self.stops = False
        self.unread: list[EndedStep] = []
        self.received: int | None = None
        self.received_at = 0.0
        self.launcher = os.getppid() if any(name in os.environ for name in LAUNCHERS) else None

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle signals while the block runs."""
        handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        """Record a first signal, and end the process at a second one."""
        if self.received is None:
            self.received = number
            self.received_at = time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                # This does not print, because the signal may have interrupted a print.
                os.write(
                    2,
                    f"{signal.Signals(number).name}: saving after this step; a second one ends"
                    " without saving\n".encode(),
                )
        elif time.monotonic() - self.received_at > REPEATED_SIGNAL_S:
            os._exit(128 + number)

    @property
    def asked(self) -> bool:
        """Whether this process was asked to stop.

        A launcher that is gone asks as well, because some launchers pass no signal on.
        """
        return self.received is not None or self.launcher not in (None, os.getppid())

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Add up the findings of all processes, and read those that are due."""
        # Count the processes that were asked to stop, and those whose loss is not finite.
        losses = self.trainer.micro_batch_losses
        self.trainer.micro_batch_losses = []
        finite = torch.stack(losses).isfinite().all()
        found_2 = self.trainer.accelerator.reduce(
            torch.stack([torch.full_like(finite, self.asked), ~finite]).long(), "sum"
        )
        on_cpu_2 = found_2.to("cpu", non_blocking=True)  # This copies into pinned memory.
        copied = torch.cuda.current_stream().record_event() if found_2.is_cuda else None
        self.unread.append(EndedStep(state.global_step, losses, on_cpu_2, copied))
        self._read(args, control)

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Read the findings at the end of an epoch, too.

        Only here the Trainer asks for what `train.save_strategy=epoch` saves and
        `train.eval_strategy=epoch` evaluates.
        """
        self._read(args, control)

    def _read(self, args: TrainingArguments, control: TrainerControl) -> None:
        """Read what the steps before the last one found.

        The last step is read, too, where its weights are about to be used.
        """
        ends = control.should_save or control.should_evaluate or control.should_training_stop
        while self.unread and (ends or self.stops or len(self.unread) > 1):
            step = self.unread.pop(0)
            if step.copied:
                step.copied.synchronize()
            num_asked, num_not_finite = step.found_2.tolist()
            if num_not_finite:
                self._stop_if_not_finite(step, args)
            self.stops = self.stops or num_asked > 0
        control.should_save = control.should_save or self.stops

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """End the run after the save that a signal asked for."""
        if not self.stops:
            return
        if state.is_world_process_zero:
            logger.info(
                f"Stopped after step {state.global_step}, saved in"
                f" {find_checkpoint(Path(str(args.output_dir)), state.global_step)}. The same"
                " command resumes."
            )
        raise SystemExit(128 + (self.received or signal.SIGTERM))

    def _stop_if_not_finite(self, step: EndedStep, args: TrainingArguments) -> None:
        """Save the rows of training data whose loss was not finite, and end on every process.

        Args:
            step: in which the loss was not finite.
            args: the Trainer's arguments.

        Raises:
            ResourceError: always.
        """
        local_rows = [
            rows
            for rows, loss in zip(self._list_step_rows(step, args), step.losses, strict=True)
            if not loss.isfinite()
        ]
        rows = []
        for batches in all_gather_object(local_rows):
            for batch in batches:
                rows.extend(batch)
        path = Path(str(args.output_dir)) / NOT_FINITE_FILE
        if args.should_save:
            with saving(path):
                path.write_text(
                    json.dumps({"step": step.number, "rows": rows}) + "\n", encoding="utf-8"
                )
        shown = ", ".join(map(str, rows[:8])) + ", …" * (len(rows) > 8)
        raise ResourceError(
            f"the loss of step {step.number} is not finite, in a batch of rows {shown} of the"
            f" training data ({path})",
            next_step="look at these rows, or lower train.learning_rate or train.max_grad_norm",
        )

    def _list_step_rows(self, step: EndedStep, args: TrainingArguments) -> list[list[int]]:
        """Return the rows of each micro-batch of this process in a step.

        They are read from the sampler, because the order of rows is a function of the epoch.
        """
        # The sampler of a new loader gives the same order, once it has the step's epoch.
        loader: Any = self.trainer.get_train_dataloader()
        num_batches = len(loader) if has_length(loader) else 0
        per_step = args.gradient_accumulation_steps
        if not num_batches:
            # The rows are a stream, as in the training of pico itself, and have no numbers.
            return [[] for _ in step.losses]
        epoch, index = divmod(step.number - 1, math.ceil(num_batches / per_step))
        loader.set_epoch(epoch)
        return list(islice(loader.batch_sampler, index * per_step, (index + 1) * per_step))
