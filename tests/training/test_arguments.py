import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from specdistill.errors import UserError
from specdistill.project import ROOT
from specdistill.training.arguments import training_arguments


def build(tmp_path: Path, **fields: Any) -> TrainingArguments:
    return training_arguments({"output_dir": str(tmp_path), **fields})


def test_fields_pass_through_and_win_over_defaults(tmp_path: Path):
    arguments = training_arguments(
        {"output_dir": str(tmp_path), "learning_rate": 1e-4, "seed": 7}, seed=3, per_device_train_batch_size=5
    )
    assert (arguments.learning_rate, arguments.seed, arguments.per_device_train_batch_size) == (1e-4, 7, 5)


def test_an_int_is_good_for_a_float(tmp_path: Path):
    assert build(tmp_path, learning_rate=1).learning_rate == 1


def test_unquoted_no_is_a_name(tmp_path: Path):
    assert build(tmp_path, eval_strategy=False).eval_strategy == "no"


@pytest.mark.parametrize("given", ["none", ["tensorboard"], "tensorboard"])
def test_trackers_by_name(tmp_path: Path, given: str | list[str]):
    arguments = build(tmp_path, report_to=given)
    assert arguments.report_to == ([] if given == "none" else ["tensorboard"])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"learning_rte": 1e-4}, "train.learning_rte: got an unknown key, .*; did you mean train.learning_rate?"),
        ({"max_steps": "3"}, "train.max_steps: got '3' (str), expected int"),
        ({"max_steps": 3.0}, "train.max_steps: got 3.0 (float), expected int"),
        ({"max_steps": True}, "train.max_steps: got True (bool), expected int"),
        ({"max_steps": None}, "train.max_steps: got None (NoneType), expected int"),
        ({"bf16": 1}, "train.bf16: got 1 (int), expected bool"),
        ({"learning_rate": "1e-4"}, "train.learning_rate: got '1e-4' (str), expected float"),
        ({"run_name": 5}, "train.run_name: got 5 (int), expected null or str"),
        ({"eval_strategy": "step"}, "train.eval_strategy: got 'step', expected one of no, steps, epoch; did you mean steps?"),
        ({"lr_scheduler_type": "cosin"}, "train.lr_scheduler_type: got 'cosin', expected one of .*; did you mean cosine?"),
        ({"report_to": "tensorbord"}, "train.report_to: got 'tensorbord', expected one of .*; did you mean tensorboard?"),
        ({"report_to": None}, "train.report_to: got None, expected one of "),
        ({"load_best_model_at_end": True}, "train: got --load_best_model_at_end requires .*, expected fields that "),
        ({"output_dir": None}, "train.output_dir: got nothing, expected a folder"),
        ({"per_device_eval_batch_size": 0}, "train.per_device_eval_batch_size: got 0, expected at least 1"),
        ({"gradient_accumulation_steps": 0}, "train.gradient_accumulation_steps: got 0, expected at least 1"),
        ({"weight_decay": -0.1}, "train.weight_decay: got -0.1, expected at least 0"),
        ({"learning_rate": float("nan")}, "train.learning_rate: got nan, expected at least 0"),
        ({"warmup_steps": float("inf")}, "train.warmup_steps: got inf, expected a finite number"),
        ({"save_steps": 0}, "train.save_steps: got 0, expected above 0"),
        ({"ddp_timeout": 4}, "train.ddp_timeout: got 4, expected 30 or more"),
        ({"dataloader_num_workers": 10**9}, "train.dataloader_num_workers: got 1000000000, expected 0 to 1024"),
        (
            {"dataloader_persistent_workers": True},
            "train.dataloader_persistent_workers: got True, expected no such key without",
        ),
        (
            {"activation_checkpointing_kwargs": {"use_reentrant": True}},
            "train.activation_checkpointing_kwargs: got {.*}, expected no",
        ),
        ({"parallelism_config": "x"}, "train.parallelism_config: got 'x' (str), expected ParallelismConfig or null"),
        ({"accelerator_config": 0}, "train.accelerator_config: got 0 (int), expected mapping or null"),  # a file descriptor
        ({"lr_scheduler_kwargs": "x"}, "train.lr_scheduler_kwargs: got 'x' (str), expected mapping or null"),
        ({"log_level": "warn"}, "train.log_level: got 'warn', expected one of .*; did you mean warning?"),
        ({"debug": 1}, "train.debug: got 1, expected one of underflow_overflow, "),
        ({"torch_compile_mode": "x"}, "train.torch_compile_mode: got 'x', expected one of default, "),
        ({"torch_compile_backend": "inductr"}, "train.torch_compile_backend: got 'inductr', .*; did you mean inductor?"),
        ({"adam_beta2": 1}, "train.adam_beta2: got 1, expected at least 0 and below 1"),
        ({"max_steps": 0}, "train.max_steps: got 0, expected at least 1, or -1 for train.num_train_epochs"),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"powr": 2}},
            "train.lr_scheduler_type: got polynomial with train.lr_scheduler_kwargs={'powr': 2} (.*), expected a schedule with",
        ),
    ],
)
def test_mistakes_name_the_field(tmp_path: Path, fields: dict[str, Any], said: str):
    with pytest.raises(UserError) as caught:
        build(tmp_path, **fields)
    assert re.match(re.escape(said).replace(r"\.\*", ".*"), str(caught.value))


def launch(name: str, *script_arguments: str, script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accelerate.commands.launch", f"--config_file=accelerate_configs/{name}.yaml"]
    options = ["--mixed_precision=no", "--main_process_port=0", str(Path(__file__).with_name(script))]
    # The environment's own tools first: DeepSpeed looks ninja up by name.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    line = [*command, *options, *script_arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)


@pytest.mark.long
@pytest.mark.distributed
def test_processes_end_although_collectives_are_open(tmp_path: Path):
    """Left to the interpreter's end, gloo's threads abort five such launches of six."""
    result = launch("ddp", str(tmp_path), script="open_collectives.py")
    assert result.returncode == 0, result.stderr


def test_more_processes_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(
        UserError, match=r"^accelerate launch: got 8 processes on a machine with 2 GPUs, expected at most 2 on each"
    ):
        training_arguments({"output_dir": str(tmp_path)})


def test_several_gpus_in_one_process_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torch would copy the draft to each of them for every step."""
    monkeypatch.setattr(TrainingArguments, "n_gpu", 8)
    with pytest.raises(
        UserError, match="accelerate launch: got one process on a machine of 8 GPUs, expected a process for each"
    ):
        build(tmp_path)


@pytest.mark.parametrize("sharding", ["DEEPSPEED", "FSDP"])
def test_half_precision_gradients_of_a_sharded_draft_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharding: str
):
    monkeypatch.setenv(f"ACCELERATE_USE_{sharding}", "true")
    with pytest.raises(UserError, match=r"train\.fp16: got true under DeepSpeed or FSDP, expected train\.bf16=true"):
        build(tmp_path, fp16=True)


def test_an_fsdp_that_could_not_put_a_draft_together_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match=r"accelerate launch: got a configuration with FSDP 1 and .* SHARDED_STATE_DICT"):
        build(tmp_path)
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT")
    with pytest.raises(UserError, match=r"train\.save_on_each_node: got true under FSDP"):
        build(tmp_path, save_on_each_node=True)


@pytest.mark.long
@pytest.mark.distributed
def test_processes_that_would_train_alone_are_refused(tmp_path: Path):
    """Without a GPU, and told not to use the CPU, accelerate starts processes that never meet."""
    result = launch("ddp", str(tmp_path), script="without_cpu.py")
    assert result.returncode != 0
    assert "accelerate launch: got 2 processes that would each train alone, expected processes of one group" in result.stderr
    assert not (tmp_path / "accepted").exists()
