"""Print, draw, save and read the history of a training run.

The history comes from the Trainer's log. While a run trains, progress lines are printed. After each
evaluation the curves are drawn as `training_curve.png`. At the end the history is saved as
`run/history.json`, which reports read.
"""

import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import (
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from specdistill.common.documents import read_json
from specdistill.common.errors import convert_errors, logger
from specdistill.common.progress import MIN_PARTS, SECONDS, format_clock, format_speed
from specdistill.training.checkpoints import find_checkpoint, saving

# A number of steps. Larger integers are not exact in every reader of JSON.
Count = Annotated[int, Field(ge=0, lt=2**53)]
# The files of the history and of the curves in a run's folder.
HISTORY = Path("run") / "history.json"
CURVE = "training_curve.png"
# Names of metrics in the Trainer's log. The first is followed by a position in the draft, from 1.
CUMULATIVE = "eval_cumulative_acceptance_"
DECODED_METRIC = "eval_decoded_acceptance_length"
# The figures of a log that progress lines show, and their formats.
PROGRESS_FIGURES = {
    "loss": "loss {:.3f}",
    "tokens_per_second": "{} tok/s",
    "learning_rate": "lr {:.1e}",
    "grad_norm": "grad {:.1f}",
    "peak_memory_gib": "{:.1f} GiB",
}


@dataclass(frozen=True)
class History:
    """The history of a finished training.

    Attributes:
        seconds: its wall time, without steps that were lost and repeated; None if unknown.
        steps: optimizer steps.
        log: the Trainer's `log_history`.
        best_step: the step of the draft that was saved; None if that is the last step.
    """

    seconds: float | None
    steps: int
    log: list[dict[str, Count | float]]
    best_step: int | None = None

    def summary(self) -> dict[str, Any]:
        """Summarize the training for a comparison with other trainings.

        Returns:
            `seconds` of wall time, `steps`, and `curve`: a list of [step, simulated acceptance
            length], one for each evaluation.
        """
        # Evaluations of a diverged draft have no finite acceptance length, and are left out.
        points = zip(*_read_series(self.log, "eval_acceptance_length"), strict=True)
        curve = [[step, length] for step, length in points if math.isfinite(length)]
        return {"seconds": self.seconds, "steps": self.steps, "curve": curve}

    @property
    def saved_step(self) -> int:
        """The step after which the saved draft was trained."""
        return self.steps if self.best_step is None else self.best_step

    def compare_before_and_after(self) -> dict[str, object] | None:
        """Return the acceptance length before and after training, for a report.

        "Before" is the draft before its first step, and "after" is the draft that was saved.

        Returns:
            The step of the saved draft, and `before` and `after` for each way of measuring:
            `simulated` on held-out rows, and `decoded` if each evaluation decoded. None for a
            training that was not evaluated at both steps.
        """
        # Step 0 is the evaluation before the first step. A diverged draft has no finite length.
        step = self.saved_step
        lengths = dict[str, object]()
        for name, key in (("simulated", "eval_acceptance_length"), ("decoded", DECODED_METRIC)):
            points = zip(*_read_series(self.log, key), strict=True)
            length_by_step = {
                point_step: length for point_step, length in points if math.isfinite(length)
            }
            if 0 in length_by_step and step in length_by_step:
                lengths[name] = {"before": length_by_step[0], "after": length_by_step[step]}
        return {"steps": step, **lengths} if lengths else None

    def list_acceptance_curve(self) -> list[dict[str, object]]:
        """Return the simulated cumulative acceptance at each evaluation, for a report.

        The cumulative acceptance at a position is the share of simulated drafts that are accepted
        up to that position. The drafts are simulated on held-out rows.

        Returns:
            For each evaluation, its `step` and its `rates`, one for each position in the draft.
        """
        # Evaluations of a diverged draft have rates that are not numbers, and are left out.
        points = [(entry["step"], read_cumulative(entry)) for entry in self.log]
        return [
            {"step": step, "rates": rates}
            for step, rates in points
            if rates and all(map(math.isfinite, rates))
        ]


# Checks the types of a history that was read from a file. Unknown keys are ignored.
validated = TypeAdapter(History).validate_python


def read_history(draft_folder: Path, *, key: str) -> History | None:
    """Read the history of the run that trained a draft.

    Args:
        draft_folder: `<run>/draft`.
        key: the recipe key to name in errors.

    Returns:
        The history; None for a draft that is not in a run's folder, or a run without a history.

    Raises:
        UserError: naming `key`, for a history that cannot be read.
    """
    folder = draft_folder.resolve()
    path = folder.parent / HISTORY
    if folder.name != "draft" or not path.is_file():
        return None
    with convert_errors(
        (OSError, ValueError), key, path, "seconds, steps and log, as training saves them"
    ):
        # Histories that earlier versions wrote may hold NaN.
        return validated(read_json(path, allow_nan=True))


def save_history(
    state: TrainerState, folder: Path, seconds: float, *, has_best: bool = False
) -> None:
    """Draw the curves of a training that has ended, and save its history.

    The image is `training_curve.png` in the run's folder, and the history is `run/history.json`.

    Args:
        state: the Trainer's state, which has the log and the number of steps.
        folder: the run's folder.
        seconds: the wall time of all steps; NaN if unknown.
        has_best: whether the saved draft is from the best evaluation, not from the last step.
    """
    draw(state.log_history, folder / CURVE)
    history = History(
        seconds=None if math.isnan(seconds) else seconds,
        steps=state.global_step,
        log=[select_finite(entry) for entry in state.log_history],
        best_step=state.best_global_step if has_best else None,
    )
    (folder / HISTORY).parent.mkdir(parents=True, exist_ok=True)
    (folder / HISTORY).write_text(
        json.dumps(asdict(history), indent=2, allow_nan=False) + "\n", encoding="utf-8"
    )


def select_finite(logs: dict[str, float]) -> dict[str, float]:
    """Return the figures of a log without those that are infinite or not a number.

    JSON has no such numbers. Readers of a log treat a missing figure as one that was not measured.
    """
    return {
        name: value
        for name, value in logs.items()
        if not isinstance(value, float) or math.isfinite(value)
    }


class Bar(ProgressCallback):
    """The Trainer's progress bar, which prints no log: `ProgressLines` does that."""

    def on_log(
        self, args: object, state: object, control: object, logs: object = None, **kwargs: object
    ) -> None:
        """Print nothing; the base class would print the log as a dictionary."""


class ProgressLines(TrainerCallback):
    """A callback that prints the progress of training to stderr.

    It prints a line every `SECONDS`, at the end, and after each evaluation. After an evaluation it
    also prints the result, and draws the curves.
    """

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Start the clock, and say from which checkpoint a run resumes."""
        # The times at which training began and at which the last line was printed.
        self.begin = self.last = time.monotonic()
        self.first_step = state.global_step
        self.figures = dict[str, float]()
        self.shown = -1  # the step for which the last line was printed; -1 if none was
        if state.is_world_process_zero and self.first_step:
            logger.info(
                f"Resuming after step {self.first_step} of {state.max_steps}, from"
                f" {find_checkpoint(Path(str(args.output_dir)), self.first_step)}"
            )

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep the latest value of each figure in the log."""
        self.figures |= kwargs["logs"]

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Print a progress line if the last one was printed at least `SECONDS` seconds ago."""
        if state.is_world_process_zero and time.monotonic() - self.last >= SECONDS:
            self._print(state)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Print a progress line and the result of the evaluation, and draw the curves."""
        if not state.is_world_process_zero:
            return
        self._print(state)

        # Print the acceptance that was measured, and draw the curves so far. `rates` is empty
        # if no held-out row has a loss token to measure.
        rates = read_cumulative(self.figures)
        if rates:
            shown = "/".join(f"{100 * rate:.0f}" for rate in rates)
            texts = [f"simulated at positions 1 to {len(rates)}: {shown}% accepted"]
            if DECODED_METRIC in self.figures:
                texts.append(f"decoded acceptance length {self.figures[DECODED_METRIC]:.2f}")
            self._write(state, texts)
            path = Path(str(args.output_dir)) / CURVE
            with saving(path):
                draw(state.log_history, path)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Print a progress line for the last step, if none was printed for it yet."""
        if state.is_world_process_zero and self.shown < state.global_step:
            self._print(state)

    def _print(self, state: TrainerState) -> None:
        """Print a progress line: the latest figures, and the time left if it can be estimated."""
        self.last = time.monotonic()
        self.shown = state.global_step
        figures: dict[str, float | str] = dict(self.figures)
        if "tokens_per_second" in figures:
            figures["tokens_per_second"] = format_speed(self.figures["tokens_per_second"])

        # Format the figures.
        texts = [
            template.format(figures[name])
            for name, template in PROGRESS_FIGURES.items()
            if name in figures
        ]

        # Estimate the time left from the speed since training began or resumed. The first step may
        # also compile and fill caches, so the speed of fewer than MIN_PARTS steps says little.
        # After the last step the time left is 0 at any speed, so one step is enough then.
        steps_done = state.global_step - self.first_step
        steps_left = state.max_steps - state.global_step
        if steps_done >= MIN_PARTS or (steps_done and steps_left == 0):
            seconds_left = (self.last - self.begin) * steps_left / steps_done
            texts.append(f"{format_clock(seconds_left)} left")
        self._write(state, texts)

    def _write(self, state: TrainerState, texts: list[str]) -> None:
        """Print one line about the current step, without breaking the progress bar."""
        figures = f": {', '.join(texts)}" if texts else ""
        tqdm.write(f"Step {state.global_step}/{state.max_steps}{figures}", file=sys.stderr)


def read_cumulative(entry: dict[str, float]) -> list[float]:
    """Return the cumulative acceptance at each position in the draft, from one entry of the log.

    The cumulative acceptance is the share of simulated drafts that are accepted up to the position.
    The list is empty for an entry that is no evaluation.
    """
    # There is one key for each position, from 1. The number of positions is not known, but it is
    # less than the number of keys, because an entry has other keys, too, such as `step`.
    names = [f"{CUMULATIVE}{k}" for k in range(1, len(entry))]
    return [entry[name] for name in names if name in entry]


def draw(log: list[dict[str, float]], path: Path) -> None:
    """Draw a Trainer's log history as an image of three panels.

    The panels show the loss, the simulated acceptance by position at each evaluation, and the
    simulated acceptance length over training.

    Args:
        log: the Trainer's `log_history`.
        path: the file of the image.
    """
    import matplotlib  # It is imported here, and not above, because it is slow to import.

    matplotlib.use("Agg")  # This backend draws into a file, and needs no display.
    import matplotlib.pyplot as plt

    figure, (left_panel, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8))
    # Margins are fixed, because a layout that matplotlib computes draws everything twice.
    figure.subplots_adjust(left=0.05, right=0.99, bottom=0.13, top=0.92, wspace=0.22)

    # The loss of training, and of the held-out rows.
    left_panel.plot(*_read_series(log, "loss"), label="training", color="tab:gray", linewidth=1)
    left_panel.plot(
        *_read_series(log, "eval_loss"),
        label="held out",
        color="tab:blue",
        marker="o",
        markersize=3,
    )
    left_panel.set(title="Loss", ylabel="nats per token")
    left_panel.legend(frameon=False)

    # One line for each evaluation, darker with each step. Only the first and the last are labelled.
    points = [(entry["step"], read_cumulative(entry)) for entry in log]
    evaluations = [(step, rates) for step, rates in points if rates]
    for index, (step, rates) in enumerate(evaluations, start=1):
        shade = plt.get_cmap("viridis_r")(index / len(evaluations))
        is_labelled = index in (1, len(evaluations))
        middle.plot(
            range(1, len(rates) + 1),
            rates,
            color=shade,
            marker="o",
            markersize=3,
            label=f"step {step}" if is_labelled else None,
        )
    middle.set(
        title="Simulated acceptance",
        ylabel="share of drafts accepted up to a position",
        ylim=(0, 1),
    )
    if evaluations:
        middle.legend(frameon=False, fontsize="small")

    # The simulated acceptance length over training.
    right.plot(
        *_read_series(log, "eval_acceptance_length"), color="tab:green", marker="o", markersize=3
    )
    right.set(title="Simulated acceptance length", ylabel="tokens per target pass")

    # What the panels have in common.
    for axis, x_label in (
        (left_panel, "optimizer step"),
        (middle, "position in the draft"),
        (right, "optimizer step"),
    ):
        axis.set_xlabel(x_label)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _read_series(log: list[dict[str, float]], key: str) -> tuple[list[float], list[float]]:
    """Return one figure of a log over time: the steps at which it was logged, and its values."""
    points = [(entry["step"], entry[key]) for entry in log if key in entry]
    return [step for step, _ in points], [value for _, value in points]
