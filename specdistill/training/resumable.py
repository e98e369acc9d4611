"""Extend transformers' Trainer so that a run can be stopped at any moment and resumed.

The resumed run reaches the same weights as an uninterrupted one.

A training ends before its last step in two cases. If a signal asks it to, it saves and ends. If a
loss is not finite, it ends without saving. All processes must end after the same step, but a signal
reaches them at different moments or reaches only one, and a loss may be finite in all processes but
one. So at the end of each step the findings of all processes are added up. The sums are copied to
the CPU while the device continues with the next step. They are read one step later, or at once if
the step is saved.
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
# Environment variables that launchers (accelerate, torchrun) set in the processes that they start.
LAUNCHERS = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")
# The file in a run's folder that names the training rows of a loss that is not finite.
NOT_FINITE_FILE = Path("run") / "loss_not_finite.json"


class ResumableTrainer(Trainer):
    """A Trainer that writes only complete checkpoints, and stops between two steps.

    Checkpoints are written into a staging folder and moved to their place. `Stopping` ends the run.

    Attributes:
        micro_batch_losses: the losses of the current step's micro-batches so far.
        begun: the start of the run by `time.monotonic`, as if it had never been interrupted. The
            wall time so far is the current time minus this.
        stopping: the callback that ends the run.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Initialize the Trainer, and add the callback `stopping`."""
        self._run_dir: str | None = None
        self.micro_batch_losses: list[Tensor] = []
        self.begun = time.monotonic()
        super().__init__(*args, **kwargs)
        self.stopping = Stopping(self)
        self.add_callback(self.stopping)

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Initialize the state as the Trainer does, with intervals in steps.

        `eval_steps`, `save_steps` and `logging_steps` below 1 are shares of the run. When a run is
        resumed, the Trainer would compare these shares with the steps in the checkpoint, and warn
        that they differ. And when a finished run is trained further, the Trainer would keep the
        intervals that were computed for the shorter run.
        """
        for name in ("eval_steps", "save_steps", "logging_steps"):
            interval = getattr(self.args, name)
            if interval is not None and interval < 1:
                setattr(self.args, name, math.ceil(max_steps * interval))
        progress: tuple[int, int] = super()._init_training_state(max_steps, *args, **kwargs)
        self.state.compute_steps(self.args, max_steps)
        return progress

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Train on a micro-batch as the Trainer does, and keep its loss.

        After the step, `Stopping` checks whether the losses of all micro-batches are finite.
        """
        loss: Tensor = super().training_step(*args, **kwargs)
        self.micro_batch_losses.append(loss)
        return loss

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run an epoch as the Trainer does, after telling the sampler which epoch it is.

        The order of the rows depends on the epoch. A run that was interrupted after its last step
        has no step left, so no epoch is run.
        """
        if self.state.global_step == self.state.max_steps:
            return
        sampler = kwargs["train_dataloader"].batch_sampler

        # A run that resumes within an epoch skips batches with a wrapper around the sampler, and
        # accelerate does not set the epoch of the sampler inside the wrapper. So it is set here. A
        # sampler whose order is the same in every epoch has no `set_epoch`.
        while hasattr(sampler, "batch_sampler"):
            sampler = sampler.batch_sampler
        if hasattr(getattr(sampler, "sampler", None), "set_epoch"):
            sampler.sampler.set_epoch(kwargs["epoch"])
        super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _finalize_training(self, *args: object, **kwargs: object) -> object:
        """Finish as the Trainer does, but average `train_loss` over all processes.

        The Trainer averages losses over processes only when it logs them. Without this method, each
        process would use only its own losses for the steps after the last log.
        """
        self._tr_loss = self.accelerator.reduce(self._tr_loss, "mean")
        return super()._finalize_training(*args, **kwargs)  # type: ignore[no-untyped-call]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as the Trainer does, but leave out infinite figures and NaN, which JSON lacks."""
        super().log(select_finite(logs), start_time)

    def _determine_best_metric(self, metrics: dict[str, float], trial: object) -> bool:
        """Return whether an evaluation is the best so far, as the Trainer does.

        With `train.load_best_model_at_end`, the best draft is loaded from its checkpoint at the end
        of training. So this method asks for a checkpoint after the best evaluation so far, even if
        `train.save_steps` asks for none at this step.
        """
        is_best = super()._determine_best_metric(metrics, trial)
        if is_best and self.args.load_best_model_at_end:
            self.control.should_save = True
        return is_best

    def _get_output_dir(self, trial: object) -> str:
        """Return the folder that the Trainer saves in: during a save the staging folder."""
        return self._run_dir or str(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """Save a checkpoint that is either complete or does not exist, even if the run is killed.

        The checkpoint is written into the staging folder. When every process is done, the
        checkpoint is moved to its place. Then older checkpoints are removed.
        """
        # Every process writes its files into the staging folder. The Trainer asks `_get_output_dir`
        # where to save, which returns `_run_dir` if it is set.
        run = Path(str(self.args.output_dir))
        step = self.state.global_step
        self._run_dir = str(run / STAGING_DIR)
        staging_folder = find_checkpoint(run / STAGING_DIR, step)
        with saving(find_checkpoint(run, step)):
            super()._save_checkpoint(model, trial)
        self._run_dir = None

        # Move the checkpoint once all processes are done. If it is the best, the state must name
        # its final place.
        if self.state.best_global_step == step:
            self.state.best_model_checkpoint = str(find_checkpoint(run, step))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            with saving(find_checkpoint(run, step)):
                # The state is written again: it now names the best checkpoint by its final place.
                self.state.save_to_json(str(staging_folder / STATE))
                seconds = time.monotonic() - self.begun
                publish_checkpoint(staging_folder, run, describe_launch(self.args), seconds)

            # Remove old checkpoints, but neither this one nor the best.
            kept_folders = {find_checkpoint(run, step)}
            if self.state.best_model_checkpoint:
                kept_folders.add(Path(self.state.best_model_checkpoint))
            prune(run, self.args.save_total_limit, kept_folders)
        self.accelerator.wait_for_everyone()


@dataclass(frozen=True)
class EndedStep:
    """A step that has ended, with the findings of all processes about it.

    Attributes:
        number: the step's number, from 1.
        losses: the losses of this process's micro-batches.
        findings_2: [2], the number of processes that were asked to stop, and the number of
            processes whose loss is not finite. It is on the CPU, and filled once `copied` is
            reached.
        copied: the event after which a device has copied `findings_2`; None without a device.
    """

    number: int
    losses: list[Tensor]
    findings_2: Tensor
    copied: torch.cuda.Event | None


class Stopping(TrainerCallback):
    """A callback that ends a run when a signal asks for it, or when a loss is not finite.

    The first signal saves and ends. A second signal ends the process at once.

    Attributes:
        received: the first signal that asked this process to stop.
        received_at: when that signal came, by `time.monotonic`.
        stops: whether some process was asked to stop, as far as the findings have been read.
        unread: steps whose findings have not been read yet.
        launcher: the id of the launcher's process; None without a launcher.
    """

    def __init__(self, trainer: ResumableTrainer) -> None:
        """Prepare to stop a trainer, and remember the process that launched this one."""
        self.trainer = trainer
        self.stops = False
        self.unread: list[EndedStep] = []
        self.received: int | None = None
        self.received_at = 0.0
        self.launcher = os.getppid() if any(name in os.environ for name in LAUNCHERS) else None

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT while the block runs, and restore their handlers afterwards."""
        handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal: record the first one, and end the process at once at a second one.

        A recorded signal takes effect at the end of the step, in `on_step_end`.
        """
        if self.received is None:
            self.received = number
            self.received_at = time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                # The first process prints for all. It uses os.write instead of print, because the
                # signal may have interrupted a print, which cannot be entered twice.
                os.write(
                    2,  # stderr
                    f"{signal.Signals(number).name}: saving after this step; a second signal ends"
                    " without saving\n".encode(),
                )
        # A signal that follows at once is ignored: it is the first one, passed on by the launcher.
        elif time.monotonic() - self.received_at > REPEATED_SIGNAL_S:
            os._exit(128 + number)  # shells use this exit code for a signal

    @property
    def asked(self) -> bool:
        """Whether this process was asked to stop, by a signal or by the end of its launcher.

        Some launchers do not pass a signal on to the processes that they started. When such a
        launcher ends, this process gets another parent process.
        """
        # `launcher` is the parent process at the start; None for a process without a launcher.
        return self.received is not None or self.launcher not in (None, os.getppid())

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Add up the findings of all processes about this step, and read those of the step before.

        A process finds out two things: whether it was asked to stop, and whether a loss of this
        step is not finite. All processes must know the sums, because all end after the same step.
        The sums of this step are usually read one step later, so that the CPU does not wait for the
        device. `_read` says when they are read at once.
        """
        # Count the processes that were asked to stop, and those whose loss is not finite. Each
        # process contributes two numbers [2], 0 or 1.
        losses = self.trainer.micro_batch_losses
        self.trainer.micro_batch_losses = []
        is_finite = torch.stack(losses).isfinite().all()
        is_asked = torch.full_like(is_finite, self.asked)
        local_findings_2 = torch.stack([is_asked, ~is_finite]).long()
        findings_2 = self.trainer.accelerator.reduce(local_findings_2, "sum")

        # Copy the counts to the CPU without waiting for the device. The event `copied` will tell
        # when the copy is done.
        cpu_findings_2 = findings_2.to("cpu", non_blocking=True)  # This copies into pinned memory.
        copied = torch.cuda.current_stream().record_event() if findings_2.is_cuda else None
        self.unread.append(EndedStep(state.global_step, losses, cpu_findings_2, copied))
        self._read(args, control)

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Read the findings of the epoch's last step before the Trainer saves or evaluates.

        The findings say whether a process was asked to stop, and whether a loss is not finite. When
        a step ends, they usually stay unread until the next step has ended. But with
        `train.save_strategy=epoch` or `train.eval_strategy=epoch`, the Trainer now decides to save
        or to evaluate. So they are read here: if a loss is not finite, the run ends before its
        weights are used.
        """
        self._read(args, control)

    def _read(self, args: TrainingArguments, control: TrainerControl) -> None:
        """Read the findings of the steps so far, and let the run save and stop if they ask for it.

        The findings of a step are two counts of processes: those that were asked to stop, and those
        whose loss is not finite.

        The findings of the newest step usually stay unread until the next step has ended, so that
        the CPU does not wait for the device. They are read at once if the weights are about to be
        saved or evaluated, and if the run stops, because then it saves the weights.
        """
        uses_weights = (
            control.should_save or control.should_evaluate or control.should_training_stop
        )
        while self.unread and (uses_weights or self.stops or len(self.unread) > 1):
            # Wait until the counts are on the CPU, and read them.
            step = self.unread.pop(0)
            if step.copied:
                step.copied.synchronize()
            num_asked, num_not_finite = step.findings_2.tolist()
            if num_not_finite:
                self._raise_not_finite(step, args)
            self.stops = self.stops or num_asked > 0
        # A run that stops saves first. `on_save` then ends it.
        control.should_save = control.should_save or self.stops

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """End the run once the checkpoint is saved, if a signal asked this run to stop."""
        if not self.stops:
            return
        if state.is_world_process_zero:
            logger.info(
                f"Stopped after step {state.global_step}, saved in"
                f" {find_checkpoint(Path(str(args.output_dir)), state.global_step)}. The same"
                " command resumes."
            )
        # Shells use this exit code for a signal. SIGTERM stands for a signal that only another
        # process received.
        raise SystemExit(128 + (self.received or signal.SIGTERM))

    def _raise_not_finite(self, step: EndedStep, args: TrainingArguments) -> None:
        """Write a file with the rows whose loss was not finite, and end the run by an error.

        Every process calls this after the same step, because the rows are gathered from all.

        Args:
            step: the step in which the loss was not finite.
            args: the Trainer's arguments.

        Raises:
            ResourceError: always.
        """
        # Collect the rows of the micro-batches whose loss is not finite, from all processes.
        batch_rows = self._list_step_rows(step, args)
        local_rows = [
            rows for rows, loss in zip(batch_rows, step.losses, strict=True) if not loss.isfinite()
        ]
        rows = []
        for batches in all_gather_object(local_rows):
            for batch in batches:
                rows.extend(batch)

        # Write them into a file, and name the first ones in the error.
        path = Path(str(args.output_dir)) / NOT_FINITE_FILE
        if args.should_save:
            with saving(path):
                path.write_text(
                    json.dumps({"step": step.number, "rows": rows}) + "\n", encoding="utf-8"
                )
        shown = ", ".join(map(str, rows[:8])) + (", …" if len(rows) > 8 else "")
        raise ResourceError(
            f"the loss of step {step.number} is not finite. Its batch has rows {shown} of the"
            f" training data (all rows of the batch: {path})",
            next_step="check these rows, or lower train.learning_rate or train.max_grad_norm",
        )

    def _list_step_rows(self, step: EndedStep, args: TrainingArguments) -> list[list[int]]:
        """Return the row numbers of each micro-batch of this process in a step.

        Batches do not carry row numbers, so the sampler computes the numbers again: the order of
        rows is a function of the epoch.
        """
        # The sampler of a new loader gives the same order once the step's epoch is set.
        loader: Any = self.trainer.get_train_dataloader()
        num_batches = len(loader) if has_length(loader) else 0
        step_batches = args.gradient_accumulation_steps
        if not num_batches:
            # The rows are a stream without numbers, as when the small target `pico` is trained.
            return [[] for _ in step.losses]

        # Find the step's epoch, and its place in the epoch; steps are counted from 1. An epoch's
        # last step may have fewer batches, so the number of steps in an epoch is rounded up.
        epoch, index = divmod(step.number - 1, math.ceil(num_batches / step_batches))
        loader.set_epoch(epoch)
        first = index * step_batches
        return list(islice(loader.batch_sampler, first, first + step_batches))
