"""A run's trajectory, from the Trainer's log: plain lines while it trains where there is no terminal, whose bar would overwrite itself;
when it ends a drawing, `training_curve.png`, and `run/history.json` to read back.
"""

import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib
from pydantic import Field, TypeAdapter, ValidationError
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from specdistill.errors import UserError
from specdistill.files.documents import read_json
from specdistill.progress import SECONDS

Count = Annotated[int, Field(ge=0, lt=2**53)]
HISTORY = Path("run") / "history.json"  # in a run's folder
SHOWN = {
    "loss": "loss",
    "eval_loss": "held-out loss",
    "eval_acceptance_length": "acceptance length",
    "eval_decoded_acceptance_length": "decoded",
}


@dataclass(frozen=True)
class History:
    """A finished training. seconds: its wall time, None (unknown) when it was resumed; log: the Trainer's `log_history`; best_step: of
    the draft that was saved, None for that of the last step.
    """

    seconds: float | None
    steps: int
    log: list[dict[str, Count | float]]
    best_step: int | None = None

    def summary(self) -> dict[str, Any]:
        """For a comparison: seconds, steps, and the curve of (step, simulated acceptance length)."""
        points = zip(*_series(self.log, "eval_acceptance_length"), strict=True)
        curve = [[step, length] for step, length in points if math.isfinite(length)]
        return {"seconds": self.seconds, "steps": self.steps, "curve": curve}

    def before_and_after(self) -> dict[str, Any] | None:
        """For a report: acceptance length before the first step and of the draft that was saved, of a training that was evaluated at both.

        `simulated` on held-out rows; `decoded` where each evaluation decoded.
        """
        step = self.steps if self.best_step is None else self.best_step
        found: dict[str, Any] = {}
        for name, key in (("simulated", "eval_acceptance_length"), ("decoded", "eval_decoded_acceptance_length")):
            measured = {at: value for at, value in zip(*_series(self.log, key), strict=True) if math.isfinite(value)}
            if 0 in measured and step in measured:
                found[name] = {"before": measured[0], "after": measured[step]}
        return {"steps": step, **found} if found else None


validated = TypeAdapter(History).validate_python  # of what else the file holds, as those of 0.1 do, nothing is read


def read_history(draft_folder: Path, *, key: str) -> History | None:
    """The history of the run that trained `<run>/draft`; None for a draft elsewhere, or of a run without one.

    Raises UserError, naming `key`, for a history that cannot be read.
    """
    folder = draft_folder.resolve()
    path = folder.parent / HISTORY
    if folder.name != "draft" or not path.is_file():
        return None
    try:
        return validated(read_json(path, allow_nan=True))
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (OSError, ValueError) as error:
        why = str(error)
    raise UserError(key, got=f"{path} ({why})", expected="seconds, steps and log, as training saves them")


def save_history(state: TrainerState, folder: Path, *, resumed: bool, has_best: bool = False) -> None:
    """Of a training that has ended: the drawing in the run's folder, and the history next to the run's record.

    has_best: the draft is that of the best evaluation, not of the last step.
    """
    draw(state.log_history, folder / "training_curve.png")
    seconds = None if resumed else state.log_history[-1]["train_runtime"]
    best_step = state.best_global_step if has_best else None
    history = History(seconds, state.global_step, state.log_history, best_step)
    (folder / HISTORY).parent.mkdir(parents=True, exist_ok=True)
    (folder / HISTORY).write_text(json.dumps(asdict(history), indent=2) + "\n", encoding="utf-8")


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


def draw(log: list[dict[str, float]], path: Path) -> None:
    """Three panels from a Trainer's log history: loss, accuracy of each unroll step, simulated acceptance length."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    left.plot(*_series(log, "loss"), label="training", color="tab:gray", linewidth=1)
    left.plot(*_series(log, "eval_loss"), label="held out", color="tab:blue", marker="o", markersize=3)
    left.set(title="Loss", ylabel="nats per token")
    left.legend(frameon=False)
    steps = sorted({int(key.rsplit("_", 1)[1]) for entry in log for key in entry if key.startswith("eval_accuracy_")})
    for step in steps:
        shade = plt.get_cmap("viridis")(step / max(1, len(steps)))
        middle.plot(*_series(log, f"eval_accuracy_{step}"), color=shade, label=f"position {step + 1}")
    middle.set(title="Held-out accuracy", ylabel="share of draft tokens that are correct", ylim=(0, 1))
    if steps:
        middle.legend(frameon=False, fontsize="small")
    right.plot(*_series(log, "eval_acceptance_length"), color="tab:green", marker="o", markersize=3)
    right.set(title="Simulated acceptance length", ylabel="tokens per target pass")
    for axis in (left, middle, right):
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _series(log: list[dict[str, float]], key: str) -> tuple[list[float], list[float]]:
    points = [(entry["step"], entry[key]) for entry in log if key in entry]
    return [step for step, _ in points], [value for _, value in points]
