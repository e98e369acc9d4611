from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from specdistill.common.documents import parse_json
from specdistill.training.history import History, ProgressLines, draw, read_history, save_history
from tests.refusals import refused


def test_the_curve_is_drawn_from_the_trainers_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr("matplotlib.pyplot.close", figures.append)
    log = [{"step": 10, "loss": 2.0}, {"step": 20, "loss": 1.0}]
    log += [
        {
            "step": 20,
            "eval_loss": 1.5,
            "eval_cumulative_acceptance_1": 0.5,
            "eval_cumulative_acceptance_2": 0.3,
            "eval_acceptance_length": 1.8,
        }
    ]
    for entries in (log, log[:1]):  # the second never evaluated
        draw(entries, tmp_path / "curve.png")
    drawn, short = (
        [[tuple(map(list, line.get_data())) for line in axis.lines] for axis in figure.axes]  # type: ignore[arg-type]
        for figure in figures
    )
    losses = [([10, 20], [2.0, 1.0]), ([20], [1.5])]
    assert drawn == [losses, [([1, 2], [0.5, 0.3])], [([20], [1.8])]]
    assert short == [[([10], [2.0]), ([], [])], [], [([], [])]]
    height, width, _ = matplotlib.image.imread(tmp_path / "curve.png").shape
    assert width > 2 * height


def test_a_run_leaves_its_history(tmp_path: Path) -> None:
    log: list[dict[str, float]] = [
        {"step": 2, "eval_acceptance_length": 1.5},
        {"step": 4, "eval_acceptance_length": float("nan")},
    ]
    save_history(TrainerState(global_step=4, log_history=log), tmp_path, 7.0)
    history = read_history(tmp_path / "draft", key="drafts")
    assert history is not None and history.best_step is None
    assert history.summary() == {"seconds": 7.0, "steps": 4, "curve": [[2, 1.5]]}
    assert (tmp_path / "training_curve.png").exists()
    saved = parse_json((tmp_path / "run" / "history.json").read_text())  # parse_json refuses NaN
    assert saved["log"] == [{"step": 2, "eval_acceptance_length": 1.5}, {"step": 4}]


def test_the_history_of_a_draft_is_that_of_its_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run" / "draft"
    folder.mkdir(parents=True)
    assert read_history(folder, key="drafts") is None
    (tmp_path / "run" / "run").mkdir()
    path = tmp_path / "run" / "run" / "history.json"
    path.write_text('{"seconds": 1.5, "steps": 3, "log": []}')
    expected = History(1.5, 3, [])
    assert read_history(folder, key="drafts") == expected
    assert read_history(tmp_path / "run" / "checkpoint-2", key="drafts") is None
    (tmp_path / "link").symlink_to(folder)
    assert read_history(tmp_path / "link", key="drafts") == expected
    monkeypatch.chdir(folder)
    assert read_history(Path(), key="drafts") == expected
    for broken in ("{", "[]", '{"seconds": 1}'):
        path.write_text(broken)
        with refused("drafts", path):
            read_history(folder, key="drafts")


def test_progress_is_printed_as_a_line_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr("specdistill.training.history.time.monotonic", lambda: clock[0])
    arguments, control = TrainingArguments(str(tmp_path), use_cpu=True), TrainerControl()
    state = TrainerState(max_steps=100, is_world_process_zero=True)
    lines = ProgressLines()
    lines.on_train_begin(arguments, state, control)
    for step in range(1, 101):
        clock[0], state.global_step = 2.0 * step, step
        lines.on_log(
            arguments,
            state,
            control,
            logs={"loss": 1 / step, "grad_norm": 1.0, "learning_rate": 5e-3},
        )
        lines.on_step_end(arguments, state, control)
        if step == 97:
            rates = {f"eval_cumulative_acceptance_{k}": 0.9 / k for k in (1, 2, 3, 4)}
            rates["eval_decoded_acceptance_length"] = 2.345
            lines.on_log(
                arguments,
                state,
                control,
                logs=rates | {"tokens_per_second": 12345.6, "peak_memory_gib": 1.25},
            )
            lines.on_evaluate(arguments, state, control)
    lines.on_train_end(arguments, state, control)
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == "Step 15/100: loss 0.067, lr 5.0e-03, grad 1.0, 0:02:50 left"
    figures = "loss 0.010, 12,346 tok/s, lr 5.0e-03, grad 1.0, 1.2 GiB"
    assert printed[-3] == f"Step 97/100: {figures}, 0:00:06 left"
    assert (
        printed[-2]
        == "Step 97/100: simulated at positions 1 to 4: 90/45/30/22% accepted, decoded acceptance"
        " length 2.35"
    )
    assert len(printed) == 9 and printed[-1] == f"Step 100/100: {figures}, 0:00:00 left"
    assert max(map(len, printed)) <= 100 and (tmp_path / "training_curve.png").exists()


def test_the_gain_of_a_training_is_that_of_the_saved_draft() -> None:
    lengths = {0: 1.2, 2: 1.9, 4: 1.7}
    log: list[dict[str, Any]] = [
        {"step": step, "eval_acceptance_length": length} for step, length in lengths.items()
    ]
    # Before the first step, nothing was decoded with this draft.
    decoded = [{"step": 2, "eval_decoded_acceptance_length": 1.6}]
    assert History(None, 4, log + decoded).compare_before_and_after() == {
        "steps": 4,
        "simulated": {"before": 1.2, "after": 1.7},
    }
    best = History(
        None, 4, [*log, *decoded, {"step": 0, "eval_decoded_acceptance_length": 1.1}], best_step=2
    )
    both = {"simulated": {"before": 1.2, "after": 1.9}, "decoded": {"before": 1.1, "after": 1.6}}
    assert best.compare_before_and_after() == {"steps": 2, **both}


def test_the_acceptance_curve_leaves_out_evaluations_that_are_no_numbers() -> None:
    log: list[dict[str, Any]] = [{"step": 0, "loss": 2.0}]
    log += [
        {"step": step, "eval_cumulative_acceptance_1": rate}
        for step, rate in ((0, 0.5), (2, float("nan")), (4, 0.75))
    ]
    log[1]["eval_cumulative_acceptance_2"] = 0.25
    curve = [{"step": 0, "rates": [0.5, 0.25]}, {"step": 4, "rates": [0.75]}]
    assert History(None, 4, log).list_acceptance_curve() == curve


@pytest.mark.parametrize(
    "log",
    [
        [],
        [{"step": 2, "eval_acceptance_length": 1.9}],
        [{"step": 0, "eval_acceptance_length": 1.2}],
    ],
)
def test_no_gain_is_reported_without_evaluations_before_and_after(
    log: list[dict[str, Any]],
) -> None:
    assert History(1.0, 2, log).compare_before_and_after() is None
