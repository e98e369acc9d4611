"""`specdistill train` estimates time, memory and disk before it loads weights."""

import math
from pathlib import Path

import pytest

from specdistill.advice.plan import run_estimate
from specdistill.advice.plan.accounting import (
    MATRIX_SHARE,
    Machine,
)
from specdistill.advice.plan.run_estimate import RunEstimate, RunSize, estimate_run
from specdistill.cli.main import main
from specdistill.common.errors import ExitCode
from specdistill.methods.recipe import Recipe, check_trainable
from specdistill.methods.sizes import count_weights_read
from specdistill.recipe.load import load_recipe
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.arguments import build_training_arguments
from tests.tiny import tiny_target_model, write_target

FLOPS = 1e9
# One draft step keeps the count of operations fast.
EAGLE3 = ("method=eagle3", "draft.ttt_steps=1")
MACHINE = Machine(
    "a machine", FLOPS / MATRIX_SHARE, 1e10, row_costs={1: 1.0, 32: 16.0}, memory_gb=8.0
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def machine_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_estimate, "can_hold_target", lambda num_parameters: True)
    monkeypatch.setattr(run_estimate, "measure_machine", lambda *sizes: MACHINE)
    # Sampling takes 32 ms for 32 rows.
    monkeypatch.setattr(run_estimate, "time_fastest", lambda work: 32e-3)
    monkeypatch.setattr(
        run_estimate, "time_products", lambda dtype, width, inner, count, rows: {rows[0]: 1e-9}
    )


def estimate(
    target: Path, *keys: str, num_rows: int | None = 100, num_generated: int = 0
) -> RunEstimate:
    base = [
        f"target.model={target}",
        "data.max_length=32",
        "train.output_dir=run",
        "train.per_device_train_batch_size=4",
    ]
    recipe = check_trainable(load_recipe(Recipe, [*base, *keys]))
    cost = estimate_run(
        recipe, build_training_arguments(recipe.train), RunSize(num_rows, num_generated, 16)
    )
    assert cost is not None
    return cost


def test_a_draft_model_takes_three_passes_of_its_own_and_one_of_the_target(target: Path) -> None:
    """A pass takes 2 operations for each parameter and token, and its backward pass takes 4."""
    keys = (
        "method=draft_model",
        "draft.init=layers",
        "draft.num_layers=1",
        "train.gradient_accumulation_steps=3",
    )
    cost = estimate(target, *keys, "train.max_steps=5")
    draft = tiny_target_model(num_layers=1)
    tokens = 3 * 4 * 32
    flops = tokens * (2 * count_weights_read(tiny_target_model()) + 6 * count_weights_read(draft))
    assert cost.step_seconds == pytest.approx(flops / FLOPS)
    # Weights, gradients and two moments are float32.
    assert cost.memory["draft"] == 16 * draft.num_parameters()
    assert cost.memory["target"] == 4 * tiny_target_model().num_parameters()


@pytest.mark.parametrize(
    ("keys", "num_rows", "num_steps"),
    [
        (["train.max_steps=7"], None, 7),
        (["train.num_train_epochs=2"], 100, math.ceil(2 * 100 / 4)),
        (["train.num_train_epochs=2"], None, None),
    ],
)
def test_steps_follow_from_rows_where_the_recipe_does_not_name_them(
    target: Path, keys: list[str], num_rows: int | None, num_steps: int | None
) -> None:
    assert estimate(target, *EAGLE3, *keys, num_rows=num_rows).num_steps == num_steps


def test_checkpoints_and_stored_features_are_on_the_disk(target: Path) -> None:
    keys = (
        *EAGLE3,
        "train.max_steps=10",
        "train.save_strategy=steps",
        "train.save_steps=2",
    )
    all_kept, one_kept = (
        estimate(target, *keys),
        estimate(target, *keys, "train.save_total_limit=1"),
    )
    draft_bytes = 12 / 16 * one_kept.memory["draft"]
    assert all_kept.disk_bytes - one_kept.disk_bytes == pytest.approx(4 * draft_bytes)
    stored = estimate(target, *keys, "hidden_states.mode=hybrid", "hidden_states.path=store")
    hidden_size = tiny_target_model().config.hidden_size
    # The store has three layers and the last hidden state in bfloat16.
    assert stored.disk_bytes - all_kept.disk_bytes == 4 * hidden_size * 2 * 100 * 32


@pytest.mark.parametrize(("save_steps", "num_saves"), [("0.25", 4), ("0.3", 4), ("3", 4)])
def test_checkpoints_are_counted_as_the_trainer_saves_them(
    target: Path, save_steps: str, num_saves: int
) -> None:
    """A run of ten steps saves after steps 3, 6, 9 and 10 in every case."""
    keys = (*EAGLE3, "train.max_steps=10", "train.save_strategy=steps")
    saved = estimate(target, *keys, f"train.save_steps={save_steps}")
    draft_bytes = 12 / 16 * saved.memory["draft"]
    assert saved.disk_bytes - saved.data_bytes == pytest.approx(num_saves * draft_bytes)


def test_generation_time_is_that_of_passes_sampling_and_prompts(target: Path) -> None:
    """16 rows are generated at a time, with a nanosecond for each parameter and pass.

    Sampling a row takes a millisecond, and half of the rows are sampled.
    """
    keys = (
        *EAGLE3,
        "data.max_length=64",
        "data.regenerate.num_tokens=20000",
        "data.regenerate.prompt_tokens=32",
    )
    cost = estimate(target, *keys, "data.regenerate.temperatures=[0,0.8]", num_generated=20_000)
    model = tiny_target_model()
    head, embedding = model.lm_head.weight.numel(), model.model.embed_tokens.weight.numel()
    parameters = model.num_parameters() - embedding
    passes = (
        20_000
        / 16
        * (1e-9 * parameters + run_estimate.LAYER_SECONDS * model.config.num_hidden_layers)
    )
    prompts = 20_000 * 2 * (parameters - head) / FLOPS  # as many tokens as are generated
    assert cost.generation_seconds == pytest.approx(passes + 20_000 * 0.5 * 1e-3 + prompts)
    assert estimate(target, *EAGLE3).generation_seconds == 0


@pytest.mark.parametrize(
    ("server", "seconds"),
    [([], "0:"), (["data.regenerate.server=[http://127.0.0.1:1]"], "follows after 64 answers")],
)
def test_train_prints_its_estimate_before_weights_are_loaded(
    server: list[str],
    seconds: str,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FrozenTarget, "load", load)
    (tmp_path / "text.jsonl").write_text('{"text": "a few words"}\n' * 30, encoding="utf-8")
    keys = [
        *EAGLE3,
        f"target={target}",
        f"data.source={tmp_path / 'text.jsonl'}",
        "data.regenerate.num_tokens=20000",
        *server,
    ]
    keys += [
        "data.max_length=64",
        "train.max_steps=8",
        f"output_dir={tmp_path / 'run'}",
        f"data.cache_dir={tmp_path / 'cache'}",
    ]
    assert main(["train", *keys]) == ExitCode.INTERRUPTED
    printed = capsys.readouterr().err
    for part in (
        "time to generate its data",
        f"time to generate its data │ {seconds}",
        "disk for its data",
        "Training on about",
        "time of 8 steps",
        "memory of each process",
        "disk",
        "a machine",
    ):
        assert part in printed
