"""A run's trajectory, from the Trainer's log when training ends: a drawing, `training_curve.png`, and `run/history.json` to read back."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from specdistill.errors import UserError

HISTORY = Path("run") / "history.json"  # in a run's folder


@dataclass(frozen=True)
class History:
    """A finished training. seconds: its wall time, None (unknown) when it was resumed; log: the Trainer's `log_history`."""

    seconds: float | None
    steps: int
    log: list[dict[str, Any]]

    def summary(self) -> dict[str, Any]:
        """For a comparison: seconds, steps, and the curve of (step, simulated acceptance length)."""
        points = zip(*_series(self.log, "eval_acceptance_length"), strict=True)
        curve = [[step, length] for step, length in points if math.isfinite(length)]
        return {"seconds": self.seconds, "steps": self.steps, "curve": curve}


def read_history(draft_folder: Path, *, key: str) -> History | None:
    """The history of the run that trained `<run>/draft`; None for a draft elsewhere, or of a run without one.

    Raises UserError, naming `key`, for a history that cannot be read.
    """
    folder = draft_folder.resolve()
    path = folder.parent / HISTORY
    if folder.name != "draft" or not path.is_file():
        return None
    try:
        return History(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(key, got=f"{path} ({error})", expected="seconds, steps and log, as training saves them") from error


class TrainingCurve(TrainerCallback):
    """When training ends, saves the drawing at `path`, in the run's folder, and the history beside the run's record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.resumed = False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.resumed = state.global_step > 0

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            draw(state.log_history, self.path)
            seconds = None if self.resumed else state.log_history[-1]["train_runtime"]
            path = self.path.parent / HISTORY
            path.parent.mkdir(parents=True, exist_ok=True)
            history = asdict(History(seconds, state.global_step, state.log_history))
            path.write_text(json.dumps(history, indent=2) + "\n", encoding="utf-8")


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
