"""The training curve: loss and acceptance against steps, drawn from the Trainer's own log when training ends."""

from pathlib import Path
from typing import Any

import matplotlib
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

matplotlib.use("Agg")
import matplotlib.pyplot as plt


class TrainingCurve(TrainerCallback):
    """Writes `training_curve.png` into the run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            draw(state.log_history, self.path)


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
    middle.set(title="Held-out accuracy", ylabel="share of guesses that are right", ylim=(0, 1))
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
