from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from specdistill.common.errors import UserError
from specdistill.training import arguments
from specdistill.training.arguments import build_training_arguments
from tests.launches import TWO_PROCESSES, finish, start
from tests.refusals import refused


def build_arguments(tmp_path: Path, **fields: Any) -> TrainingArguments:
    return build_training_arguments({"output_dir": str(tmp_path), **fields})


def test_fields_pass_through_and_win_over_defaults(tmp_path: Path):
    built = build_training_arguments(
        {"output_dir": str(tmp_path), "learning_rate": 1e-4, "seed": 7},
        seed=3,
        per_device_train_batch_size=5,
    )
    assert (built.learning_rate, built.seed, built.per_device_train_batch_size) == (1e-4, 7, 5)


def test_an_int_is_accepted_for_a_float(tmp_path: Path):
    assert build_arguments(tmp_path, learning_rate=1).learning_rate == 1


@pytest.mark.parametrize(
    ("metric", "is_score"),
    [("loss", False), ("loss_1", False), ("acceptance_1", True), (None, None)],
)
def test_the_best_has_the_least_loss_or_the_greatest_score(
    tmp_path: Path, metric: str | None, is_score: bool | None
):
    assert build_arguments(tmp_path, metric_for_best_model=metric).greater_is_better is is_score


def test_an_unquoted_no_is_read_as_a_name(tmp_path: Path):
    assert build_arguments(tmp_path, eval_strategy=False).eval_strategy == "no"


@pytest.mark.parametrize("given", ["none", ["tensorboard"], "tensorboard"])
def test_trackers_are_chosen_by_name(tmp_path: Path, given: str | list[str]):
    built = build_arguments(tmp_path, report_to=given)
    assert built.report_to == ([] if given == "none" else ["tensorboard"])


def test_several_trackers_are_kept_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for tracker in ("wandb", "trackio"):
        monkeypatch.setitem(arguments.INTEGRATION_TO_CALLBACK, tracker, lambda: None)
    assert build_arguments(tmp_path, report_to="wandb,trackio").report_to == ["wandb", "trackio"]
    with refused("train.report_to", "none"):
        build_arguments(tmp_path, report_to="wandb,none")


@pytest.mark.parametrize(
    ("name", "value", "got"),
    [
        ("learning_rte", 1e-4, "an unknown key"),
        ("max_steps", "3", "'3' (str)"),
        ("max_steps", 3.0, "3.0 (float)"),
        ("max_steps", True, "True (bool)"),
        ("max_steps", None, "null"),
        ("max_steps", 0, "0"),
        ("bf16", 1, "1 (int)"),
        ("learning_rate", "1e-4", "'1e-4' (str)"),
        ("learning_rate", float("nan"), "nan"),
        ("run_name", 5, "5 (int)"),
        ("eval_strategy", "step", "step"),
        ("lr_scheduler_type", "cosin", "cosin"),
        ("report_to", "tensorbord", "'tensorbord'"),
        ("report_to", "none,tensorbord", "'tensorbord'"),
        ("report_to", None, "null"),
        ("output_dir", None, "nothing"),
        ("per_device_eval_batch_size", 0, "0"),
        ("gradient_accumulation_steps", 0, "0"),
        ("weight_decay", -0.1, "-0.1"),
        ("warmup_steps", float("inf"), "inf"),
        ("save_steps", 0, "0"),
        ("ddp_timeout", 29, "29"),
        ("dataloader_num_workers", 1025, "1025"),
        ("dataloader_persistent_workers", True, "true"),  # without workers
        ("activation_checkpointing_kwargs", {"use_reentrant": True}, "{"),
        ("parallelism_config", "x", "'x' (str)"),
        ("accelerator_config", 0, "0 (int)"),  # a file descriptor
        ("lr_scheduler_kwargs", "x", "'x' (str)"),
        ("log_level", "warn", "'warn'"),
        ("debug", 1, "1"),
        ("torch_empty_cache_steps", 0, "0"),
        ("logging_steps", 1.5, "1.5"),
        ("torch_compile_mode", "x", "'x'"),
        ("torch_compile_backend", "inductr", "'inductr'"),
        ("adam_beta2", 1, "1"),
    ],
)
def test_wrong_values_name_the_field(tmp_path: Path, name: str, value: Any, got: str):
    with refused(f"train.{name}", got):
        build_arguments(tmp_path, **{name: value})


def test_values_at_a_limit_are_accepted(tmp_path: Path):
    limits = {
        "max_steps": -1,
        "weight_decay": 0.0,
        "ddp_timeout": 30,
        "dataloader_num_workers": 1024,
        "adam_beta2": 0.999,
    }
    built = build_arguments(tmp_path, **limits)
    assert {name: getattr(built, name) for name in limits} == limits


def test_fields_that_do_not_go_together_are_named(tmp_path: Path):
    with refused("train.lr_scheduler_kwargs", "{powr: 2} with train.lr_scheduler_type=polynomial"):
        build_arguments(tmp_path, lr_scheduler_type="polynomial", lr_scheduler_kwargs={"powr": 2})


@pytest.mark.parametrize(
    ("name", "value", "nearest"),
    [("learning_rte", 1.0, "train.learning_rate"), ("log_level", "warn", "warning")],
)
def test_the_error_of_a_wrong_name_suggests_the_nearest_one(
    tmp_path: Path, name: str, value: Any, nearest: str
):
    with pytest.raises(UserError, match=f"{nearest}.$"):
        build_arguments(tmp_path, **{name: value})


def run_launch(*arguments: str) -> tuple[int, str]:
    options = (*TWO_PROCESSES, "--mixed_precision=no")
    process = start(Path(__file__).with_name("open_collectives.py"), *arguments, options=options)
    output = finish(process)
    return process.returncode, output


@pytest.mark.long  # a launch
@pytest.mark.distributed
def test_processes_end_although_collectives_are_open(tmp_path: Path):
    """Left to the interpreter's end, gloo's threads abort five such launches of six."""
    code, output = run_launch(str(tmp_path))
    assert code == 0, output


def test_more_processes_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with refused("accelerate launch", "8 processes on a machine with 2 GPUs"):
        build_training_arguments({"output_dir": str(tmp_path)})


def test_several_gpus_in_one_process_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torch would copy the draft to each GPU for every step."""
    monkeypatch.setattr(TrainingArguments, "n_gpu", 8)
    with refused("accelerate launch", "one process on a machine of 8 GPUs"):
        build_arguments(tmp_path)


@pytest.mark.parametrize(
    ("launched", "given", "taken"),
    [
        ("fp16", {}, {"fp16": True}),
        ("bf16", {}, {"bf16": True}),
        ("bf16", {"fp16": True}, {"fp16": True}),
        ("bf16", {"bf16": False}, {"bf16": False}),
        ("no", {}, {}),
    ],
)
def test_the_recipe_sets_the_precision_or_else_the_launch_does(
    monkeypatch: pytest.MonkeyPatch, launched: str, given: dict[str, Any], taken: dict[str, Any]
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    fields = dict(given)
    precision = arguments._take_precision(fields)
    assert fields == taken and precision == next((name for name in taken if taken[name]), "no")


@pytest.mark.parametrize("sharding", ["DEEPSPEED", "FSDP"])
def test_half_precision_gradients_of_a_sharded_draft_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharding: str
):
    monkeypatch.setenv(f"ACCELERATE_USE_{sharding}", "true")
    with refused("train.fp16", "true under DeepSpeed or FSDP"):
        build_arguments(tmp_path, fp16=True)


def test_an_fsdp_configuration_that_cannot_assemble_a_draft_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with refused(
        "accelerate launch",
        "a configuration with FSDP 1 and fsdp_state_dict_type SHARDED_STATE_DICT",
    ):
        build_arguments(tmp_path)
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT")
    with refused("train.save_on_each_node", "true"):
        build_arguments(tmp_path, save_on_each_node=True)


@pytest.mark.long  # a launch
@pytest.mark.distributed
def test_processes_that_would_train_alone_are_refused(tmp_path: Path):
    """Without a GPU, and told not to use the CPU, accelerate starts processes that never meet."""
    code, output = run_launch(str(tmp_path), "cpu=false")
    assert code != 0
    assert "accelerate launch: got 2 processes that would each train alone" in output
    assert not (tmp_path / "accepted").exists()
