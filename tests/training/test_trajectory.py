from pathlib import Path

import matplotlib.image

from specdistill.training.trajectory import draw


def test_the_curve_is_drawn_from_the_trainers_log(tmp_path: Path) -> None:
    log = [{"step": 10, "loss": 2.0}, {"step": 20, "loss": 1.0}]
    log += [{"step": 20, "eval_loss": 1.5, "eval_accuracy_0": 0.5, "eval_accuracy_1": 0.3, "eval_acceptance_length": 1.8}]
    draw(log, tmp_path / "curve.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "curve.png").shape
    assert width > 2 * height


def test_a_run_that_never_evaluated_still_has_a_curve(tmp_path: Path) -> None:
    draw([{"step": 1, "loss": 2.0}], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000
