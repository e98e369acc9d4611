"""A run's trajectory, from the Trainer's log: lines while it trains, a drawing, `training_curve.png`, after each evaluation, and when it
ends `run/history.json` to read back.
"""

import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib
from pydantic import Field, TypeAdapter
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import (
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from specdistill.errors import logger, refusing
from specdistill.files.documents import read_json
from specdistill.progress import SECONDS, clock
from specdistill.training.checkpoints import checkpoint, saving

Count = Annotated[int, Field(ge=0, lt=2**53)]
HISTORY, CURVE = Path("run") / "history.json", "training_curve.png"  # in a run's folder
CUMULATIVE = "eval_cumulative_acceptance_"  # and a position in the draft, from 1
DECODED = "eval_decoded_acceptance_length"
SHOWN = {
    "loss": "loss {:.3f}",
    "tokens_per_second": "{:,.0f} tok/s",
    "learning_rate": "lr {:.1e}",
    "grad_norm": "grad {:.1f}",
    "peak_memory_gib": "{:.1f} GiB",
}


@dataclass(frozen=True)
class History:
    """A finished training.

    seconds: its wall time, without steps that were lost and repeated, None where that is unknown. log: the Trainer's `log_history`.
    best_step: of the draft that was saved, None for that of the last step.
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

    @property
    def saved_step(self) -> int:
        """After which the draft was as it was saved."""
        return self.steps if self.best_step is None else self.best_step

    def before_and_after(self) -> dict[str, Any] | None:
        """For a report: acceptance length before the first step and of the draft that was saved, of a training that was evaluated at both.

        `simulated` on held-out rows; `decoded` where each evaluation decoded.
        """
        step, found = self.saved_step, dict[str, Any]()
        for name, key in (("simulated", "eval_acceptance_length"), ("decoded", DECODED)):
            measured = {
                at: value
                for at, value in zip(*_series(self.log, key), strict=True)
                if math.isfinite(value)
            }
            if 0 in measured and step in measured:
                found[name] = {"before": measured[0], "after": measured[step]}
        return {"steps": step, **found} if found else None

    def acceptance_curve(self) -> list[dict[str, Any]]:
        """For a report: the simulated cumulative acceptance by position in the draft, at each evaluation on held-out rows."""
        found = [(entry["step"], cumulative(entry)) for entry in self.log]
        return [
            {"step": step, "rates": rates}
            for step, rates in found
            if rates and all(map(math.isfinite, rates))
        ]


validated = TypeAdapter(History).validate_python  # of what else the file holds, nothing is read


def read_history(draft_folder: Path, *, key: str) -> History | None:
    """The history of the run that trained `<run>/draft`; None for a draft elsewhere, or of a run without one.

    Raises UserError, naming `key`, for a history that cannot be read.
    """
    folder = draft_folder.resolve()
    path = folder.parent / HISTORY
    if folder.name != "draft" or not path.is_file():
        return None
    with refusing(
        (OSError, ValueError), key, path, "seconds, steps and log, as training saves them"
    ):
        return validated(read_json(path, allow_nan=True))


def save_history(
    state: TrainerState, folder: Path, seconds: float, *, has_best: bool = False
) -> None:
    """Of a training that has ended: the drawing in the run's folder, and the history next to the run's record.

    seconds: of all its steps; NaN: unknown. has_best: the draft is that of the best evaluation, not of the last step.
    """
    draw(state.log_history, folder / CURVE)
    best_step = state.best_global_step if has_best else None
    history = History(
        None if math.isnan(seconds) else seconds, state.global_step, state.log_history, best_step
    )
    (folder / HISTORY).parent.mkdir(parents=True, exist_ok=True)
    (folder / HISTORY).write_text(json.dumps(asdict(history), indent=2) + "\n", encoding="utf-8")


class Bar(ProgressCallback):
    """The Trainer's own, which prints no log as a dictionary."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        pass


class ProgressLines(TrainerCallback):
    """Prints to stderr how training goes: every `SECONDS`, at the end, and after each evaluation, with what that found and a drawing."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.begin = self.last = time.monotonic()
        self.first_step = state.global_step
        self.figures, self.shown = dict[str, float](), -1
        if state.is_world_process_zero and self.first_step:
            found = checkpoint(Path(str(args.output_dir)), self.first_step)
            logger.info(f"Resuming after step {self.first_step} of {state.max_steps}, from {found}")

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.figures |= kwargs["logs"]

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and time.monotonic() - self.last >= SECONDS:
            self._print(state)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        self._print(state)
        if rates := cumulative(self.figures):
            parts = [
                f"simulated at K = {len(rates)}: {'/'.join(f'{100 * rate:.0f}' for rate in rates)}% accepted"
            ]
            parts += (
                [f"decoded acceptance length {self.figures[DECODED]:.2f}"]
                if DECODED in self.figures
                else []
            )
            self._write(state, parts)
            path = Path(str(args.output_dir)) / CURVE
            with saving(path):
                draw(state.log_history, path)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and self.shown < state.global_step:
            self._print(state)

    def _print(self, state: TrainerState) -> None:
        self.last, self.shown = time.monotonic(), state.global_step
        parts = [
            form.format(self.figures[name]) for name, form in SHOWN.items() if name in self.figures
        ]
        if done := state.global_step - self.first_step:
            parts.append(
                f"{clock((self.last - self.begin) * (state.max_steps - state.global_step) / done)} left"
            )
        self._write(state, parts)

    def _write(self, state: TrainerState, parts: list[str]) -> None:
        tqdm.write(
            f"Step {state.global_step}/{state.max_steps}: {', '.join(parts)}", file=sys.stderr
        )


def cumulative(entry: dict[str, float]) -> list[float]:
    """Of an evaluation in the log, by position in the draft: the share of simulated drafts that are accepted up to there."""
    return [entry[key] for k in range(1, len(entry)) if (key := f"{CUMULATIVE}{k}") in entry]


def draw(log: list[dict[str, float]], path: Path) -> None:
    """Three panels from a Trainer's log history: loss, simulated acceptance by position at each evaluation, and its sum over training."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8))
    figure.subplots_adjust(
        left=0.05, right=0.99, bottom=0.13, top=0.92, wspace=0.22
    )  # a layout that is computed draws twice
    left.plot(*_series(log, "loss"), label="training", color="tab:gray", linewidth=1)
    left.plot(
        *_series(log, "eval_loss"), label="held out", color="tab:blue", marker="o", markersize=3
    )
    left.set(title="Loss", ylabel="nats per token")
    left.legend(frameon=False)
    evaluations = [(entry["step"], rates) for entry in log if (rates := cumulative(entry))]
    for index, (step, rates) in enumerate(evaluations, start=1):
        shade, is_last = (
            plt.get_cmap("viridis_r")(index / len(evaluations)),
            index in (1, len(evaluations)),
        )
        middle.plot(
            range(1, len(rates) + 1),
            rates,
            color=shade,
            marker="o",
            markersize=3,
            label=f"step {step}" if is_last else None,
        )
    middle.set(
        title="Simulated acceptance",
        ylabel="share of drafts accepted up to a position",
        ylim=(0, 1),
    )
    if evaluations:
        middle.legend(frameon=False, fontsize="small")
    right.plot(*_series(log, "eval_acceptance_length"), color="tab:green", marker="o", markersize=3)
    right.set(title="Simulated acceptance length", ylabel="tokens per target pass")
    for axis, along in (
        (left, "optimizer step"),
        (middle, "position in the draft"),
        (right, "optimizer step"),
    ):
        axis.set_xlabel(along)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _series(log: list[dict[str, float]], key: str) -> tuple[list[float], list[float]]:
    points = [(entry["step"], entry[key]) for entry in log if key in entry]
    return [step for step, _ in points], [value for _, value in points]
