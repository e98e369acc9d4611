"""The printed length of a training: tokens × epochs = steps, as the Trainer counts them."""

from pathlib import Path
from typing import Any

import pytest

from specdistill.common.project import RECIPES
from specdistill.data.produce.job import RunSize
from specdistill.recipe.load import merge_values
from specdistill.training.length import count_steps, print_length
from tests.training.small_runs import build_trainer, make_rows

# Recipes whose number of rows is fixed, and whose measured results belong to a number of steps.
IN_STEPS = ("pico", "smollm2")


@pytest.mark.parametrize(
    "train",
    [
        {"num_train_epochs": 2, "per_device_train_batch_size": 3},
        {
            "num_train_epochs": 1.5,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 3,
        },
        {},
        {"max_steps": 7, "per_device_train_batch_size": 2},
        {"max_steps": -1, "num_train_epochs": 4},
    ],
)
def test_counted_steps_equal_those_of_the_trainer(train: dict[str, Any], tmp_path: Path) -> None:
    fit = build_trainer(tmp_path, make_rows(11, 24), **train)
    *_, max_steps = fit.set_initial_training_values(fit.args, fit.get_train_dataloader())
    assert count_steps(train, 11, num_processes=1) == max_steps


def test_tokens_epochs_and_steps_are_printed_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    size = RunSize(1_650, num_tokens=412_000, is_made=True)
    print_length({"num_train_epochs": 2}, 256, size, num_processes=1)
    print_length({"max_steps": 110}, 256, size._replace(is_made=False), num_processes=2)
    assert capsys.readouterr().err.splitlines() == [
        "Training on 412,000 tokens (1,650 rows of 256) × 2 epochs = 414 steps of 8 rows in one"
        " process.",
        "Training on about 412,000 tokens (1,650 rows of 256) × 1.06 epochs = 110 steps of 16 rows"
        " in 2 processes.",
    ]


@pytest.mark.parametrize(("num_epochs", "is_warned"), [(5, False), (5.5, True)])
def test_many_epochs_are_warned_of(
    num_epochs: float, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    size = RunSize(800, num_tokens=100_000, is_made=True)
    print_length({"num_train_epochs": num_epochs}, 256, size, num_processes=1)
    assert ("reads its data" in caplog.text) == is_warned
    if is_warned:
        assert "5.5 times" in caplog.text and "train.num_train_epochs=2" in caplog.text


def test_uncounted_rows_print_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_length({"max_steps": 7}, 256, RunSize(None), num_processes=1)
    assert capsys.readouterr().err == ""


def test_shipped_recipes_count_in_epochs_and_in_shares_of_them() -> None:
    names = [
        path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml")
    ]
    for name in names:
        if name.partition("/")[0] in IN_STEPS:
            continue
        train: Any = merge_values([f"recipe={name}"])["train"]
        assert "max_steps" not in train and train["num_train_epochs"] <= 2, name
        for key in ("warmup_steps", "eval_steps", "save_steps"):
            assert 0 < train[key] < 1, (name, key)
