"""Progress of a training whose output is no terminal: plain lines, where transformers' bar would overwrite itself."""

import sys
import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from specdistill.progress import SECONDS

SHOWN = {"loss": "loss", "eval_loss": "held-out loss", "eval_acceptance_length": "acceptance length"}


class ProgressLines(TrainerCallback):
    """Prints to stderr the step, the last loss, the last evaluation and the time left: every `SECONDS`, and at the end."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.begin = self.last = time.monotonic()
        self.first_step = state.global_step
        self.figures: dict[str, float] = {}

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.figures |= {SHOWN[key]: value for key, value in kwargs["logs"].items() if key in SHOWN}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero and time.monotonic() - self.last >= SECONDS:
            self._print(state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._print(state)

    def _print(self, state: TrainerState) -> None:
        self.last = time.monotonic()
        seconds_per_step = (self.last - self.begin) / max(1, state.global_step - self.first_step)
        minutes = seconds_per_step * (state.max_steps - state.global_step) / 60
        figures = "".join(f", {name} {value:.3f}" for name, value in self.figures.items())
        print(
            f"Training: step {state.global_step}/{state.max_steps}{figures}, {minutes:.1f} min left",
            file=sys.stderr,
            flush=True,
        )
