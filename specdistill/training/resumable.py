"""ResumableTrainer: transformers' Trainer whose runs can be killed at any moment, or asked to stop, and resumed to the same weights.

A training ends before its last step when a signal asks it to, which saves, or when a loss is not finite, which does not. A signal reaches
one process or all, at different moments, and a loss may be finite in all but one. So at the end of each step every process adds its
findings to the others', and all end after the same step. The sums are copied to the CPU while the device goes on and read one step later,
or at once where the step is saved.
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

from specdistill.errors import ResourceError, logger
from specdistill.processes import of_all
from specdistill.training.checkpoints import (
    ASIDE,
    STATE,
    checkpoint,
    launch,
    prune,
    publish,
    saving,
)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
AGAIN = 1.0  # seconds; a terminal's Ctrl-C reaches a process twice at once, from the terminal and from its launcher
LAUNCHERS = (
    "ACCELERATE_MIXED_PRECISION",
    "TORCHELASTIC_RUN_ID",
)  # environment of a process that has a launcher
NOT_FINITE = Path("run") / "loss_not_finite.json"


class ResumableTrainer(Trainer):
    """Writes checkpoints aside and renames them, and stops between two steps (see `Stopping`).

    micro_batch_losses: of the step under way. begun: when an uninterrupted run would have, by `time.monotonic`.
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
        """The Trainer's own, with the order of this epoch's rows, and not one step more where only the end of the run was lost."""
        if self.state.global_step == self.state.max_steps:
            return
        sampler = kwargs["train_dataloader"].batch_sampler
        # Of the part of an epoch that is left, accelerate does not reach the innermost.
        while hasattr(sampler, "batch_sampler"):
            sampler = sampler.batch_sampler
        if hasattr(getattr(sampler, "sampler", None), "set_epoch"):
            sampler.sampler.set_epoch(kwargs["epoch"])
        super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """The best that is to be loaded at the end is saved, also between two steps of `train.save_steps`."""
        is_best = super()._determine_best_metric(metrics, trial)
        if is_best and self.args.load_best_model_at_end:
            self.control.should_save = True
        return is_best

    def _get_output_dir(self, trial: Any) -> str:
        return self._run_dir or str(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The Trainer's own, into a folder aside; its place when every process is done; then older ones go."""
        run, step = Path(str(self.args.output_dir)), self.state.global_step
        self._run_dir = str(run / ASIDE)
        aside = checkpoint(run / ASIDE, step)
        with saving(checkpoint(run, step)):
            super()._save_checkpoint(model, trial)
        self._run_dir = None
        if self.state.best_global_step == step:
            self.state.best_model_checkpoint = str(checkpoint(run, step))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            with saving(checkpoint(run, step)):
                self.state.save_to_json(str(aside / STATE))  # which names the best by its place
                publish(aside, run, launch(self.args), time.monotonic() - self.begun)
            best = self.state.best_model_checkpoint
            prune(
                run,
                self.args.save_total_limit,
                {checkpoint(run, step), *([Path(best)] if best else [])},
            )
        self.accelerator.wait_for_everyone()


@dataclass(frozen=True)
class EndedStep:
    """losses: of this process's micro-batches. found_2: over all processes, those asked to stop and those whose loss is not finite; on the
    CPU, where a device has copied them once `copied` is reached.
    """

    number: int
    losses: list[Tensor]
    found_2: Tensor
    copied: torch.cuda.Event | None


class Stopping(TrainerCallback):
    """Ends a ResumableTrainer's run. received: the first signal that asked this process to stop. A second one ends it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.stops = False
        self.unread: list[EndedStep] = []
        self.received: int | None = None
        self.received_at = 0.0
        self.launcher = os.getppid() if any(name in os.environ for name in LAUNCHERS) else None

    @contextmanager
    def caught(self) -> Iterator[None]:
        handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self.received_at = number, time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                message = f"{signal.Signals(number).name}: saving after this step; a second one ends without saving\n"
                os.write(2, message.encode())  # not print, which the signal may have interrupted
        elif time.monotonic() - self.received_at > AGAIN:
            os._exit(128 + number)

    @property
    def asked(self) -> bool:
        """A launcher that is gone asks as well: some pass no signal on."""
        return self.received is not None or self.launcher not in (None, os.getppid())

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        losses, self.trainer.micro_batch_losses = self.trainer.micro_batch_losses, []
        finite = torch.stack(losses).isfinite().all()
        asked = torch.full_like(finite, self.asked)
        found_2 = self.trainer.accelerator.reduce(torch.stack([asked, ~finite]).long(), "sum")
        on_cpu_2 = found_2.to("cpu", non_blocking=True)  # into pinned memory
        copied = torch.cuda.current_stream().record_event() if found_2.is_cuda else None
        self.unread.append(EndedStep(state.global_step, losses, on_cpu_2, copied))
        self._read(args, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Only here the Trainer asks for what `train.save_strategy=epoch` saves and `train.eval_strategy=epoch` evaluates."""
        self._read(args, control)

    def _read(self, args: TrainingArguments, control: TrainerControl) -> None:
        """What the steps before the last one found; of the last one too, where its weights are about to be used."""
        ends = control.should_save or control.should_evaluate or control.should_training_stop
        while self.unread and (ends or self.stops or len(self.unread) > 1):
            step = self.unread.pop(0)
            if step.copied:
                step.copied.synchronize()
            num_asked, num_not_finite = step.found_2.tolist()
            if num_not_finite:
                self._not_finite(step, args)
            self.stops = self.stops or num_asked > 0
        control.should_save = control.should_save or self.stops

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self.stops:
            return
        if state.is_world_process_zero:
            folder = checkpoint(Path(str(args.output_dir)), state.global_step)
            logger.info(
                f"Stopped after step {state.global_step}, saved in {folder}. The same command resumes."
            )
        raise SystemExit(128 + (self.received or signal.SIGTERM))

    def _not_finite(self, step: EndedStep, args: TrainingArguments) -> None:
        """Save which rows of the training data the loss was of, and end, on every process."""
        own = [
            rows
            for rows, loss in zip(self._rows(step, args), step.losses, strict=True)
            if not loss.isfinite()
        ]
        rows = [row for found in of_all(own) for batch in found for row in batch]
        path = Path(str(args.output_dir)) / NOT_FINITE
        if args.should_save:
            with saving(path):
                path.write_text(
                    json.dumps({"step": step.number, "rows": rows}) + "\n", encoding="utf-8"
                )
        shown = ", ".join(map(str, rows[:8])) + ", …" * (len(rows) > 8)
        what = f"the loss of step {step.number} is not finite, in a batch of rows {shown} of the training data ({path})"
        raise ResourceError(
            what, next_step="look at them, or lower train.learning_rate or train.max_grad_norm"
        )

    def _rows(self, step: EndedStep, args: TrainingArguments) -> list[list[int]]:
        """The rows of each micro-batch of this process in a step, read off the sampler: the order of rows is a function of the epoch."""
        loader: Any = self.trainer.get_train_dataloader()
        num_batches, per_step = (
            len(loader) if has_length(loader) else 0,
            args.gradient_accumulation_steps,
        )
        if not num_batches:
            return [[] for _ in step.losses]  # a stream, as pico's own training reads
        epoch, index = divmod(step.number - 1, math.ceil(num_batches / per_step))
        loader.set_epoch(epoch)
        return list(islice(loader.batch_sampler, index * per_step, (index + 1) * per_step))
