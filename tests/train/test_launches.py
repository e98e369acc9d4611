"""Every launch configuration that ships, as a user runs it: each trains the draft that one process trains, and that draft decodes.

Two gloo processes train 20 steps of two micro-batches, one process 20 steps of four. Losses, gradient norms, evaluations and the final
weights then differ by rounding alone.
"""

import itertools
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils.other import get_free_port
from safetensors.torch import load_file

from specdistill.decoding.decoder import Decoder
from specdistill.methods.load import load_proposer
from specdistill.project import ROOT
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.history import read_history
from tests.launches import CONFIGS, TWO_PROCESSES, finish, start, tiny_files, wait_for
from tests.tiny import SMALL, input_keys, write_inputs

# Launches of several processes, seconds each.
pytestmark = [pytest.mark.long, pytest.mark.distributed, pytest.mark.launches]

# In the last one the target is bfloat16 and matrices are multiplied so; weights and optimizer are float32.
METHODS = {
    "eagle": ("train/eagle.py", ["draft.ttt_steps=3"]),
    "eagle3": ("train/eagle.py", ["draft.ttt_steps=3", "draft.vocab_size=60"]),
    "mtp": ("train/mtp.py", ["draft.ttt_steps=3", "draft.init=scratch"]),
    "draft_model": ("train/draft.py", ["draft.init=layers", "draft.num_layers=2"]),
    "dspark": (
        "train/eagle.py",
        ["draft.num_layers=2", "draft.block_size=4", "draft.markov_rank=8", "draft.vocab_size=60"],
    ),
    "early_exit": ("train/eagle.py", ["draft.intermediate_size=32"]),
    "eagle3 bfloat16": (
        "train/eagle.py",
        ["draft.ttt_steps=3", "train.bf16=true", "target.dtype=bfloat16"],
    ),
}
# What a process holds of the draft's weights and of the optimizer's state. Halves, and what is replicated because it is small.
WHOLE, HALF = (0.99, 1.01), (0.45, 0.6)
CONFIGURATIONS = {
    "cpu_processes": ("MULTI_CPU", WHOLE, WHOLE),
    "ddp": ("MULTI_CPU", WHOLE, WHOLE),
    "ddp_multinode": ("MULTI_CPU", WHOLE, WHOLE),
    "fsdp2": ("FSDP", HALF, HALF),
    "zero1": ("DEEPSPEED", WHOLE, HALF),
    "zero2": ("DEEPSPEED", WHOLE, HALF),
    "zero3": ("DEEPSPEED", HALF, HALF),
    "zero3_offload": ("DEEPSPEED", HALF, HALF),
    "zero3_multinode": ("DEEPSPEED", HALF, HALF),
}
# What make test-launches trains: two methods under each configuration, each method under two to four, early exits under one.
TRAINED = {
    "cpu_processes": ("eagle", "draft_model"),
    "ddp": ("early_exit", "eagle3 bfloat16"),
    "ddp_multinode": ("eagle3", "dspark"),
    "fsdp2": ("dspark", "eagle3 bfloat16"),
    "zero1": ("eagle", "mtp"),
    "zero2": ("draft_model", "eagle3 bfloat16"),
    "zero3": ("mtp", "dspark"),
    "zero3_offload": ("eagle3", "draft_model"),
    "zero3_multinode": ("eagle", "eagle3 bfloat16"),
}
NUMBERS = ("loss", "grad_norm", "eval_loss", "eval_acceptance_length")
TOLERANCE = 2e-5  # of losses, norms and weights, which are all near 1 or below
TOLERANCE_BFLOAT16 = 1e-2  # of a sharded draft after its first step: summed in another order, weights then rounded to bfloat16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, and texts that divide neither into batches nor among processes."""
    path = tmp_path_factory.mktemp("target")
    write_inputs(path, num_rows=103)
    return path


def launch(
    folder: Path,
    name: str,
    method: str,
    output: Path,
    accumulation: int,
    more: Sequence[str] = (),
    options: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """A node has its own working folder, data cache and run. more: keys of the recipe. options: of accelerate."""
    script, keys = METHODS[method]
    output.mkdir(exist_ok=True, parents=True)
    arguments = [
        str(output),
        str(ROOT / script),
        f"method={method.split()[0]}",
        *input_keys(folder),
        f"data.cache_dir={output / 'cache'}",
        *keys,
        "optimizer=adamw",
        f"train.output_dir={output / 'run'}",
        *SMALL,
        "train.max_steps=20",
        "train.per_device_train_batch_size=2",
        f"train.gradient_accumulation_steps={accumulation}",
        "train.logging_steps=1",
        "train.eval_steps=10",
        "train.save_steps=10",
        f"train.save_on_each_node={name.endswith('multinode')}",
        *more,
    ]
    return start(
        Path(__file__).with_name("observed.py"),
        *arguments,
        config=name,
        options=options,
        folder=output,
    )


def launches(
    folder: Path, name: str, method: str, output: Path, *keys: str
) -> list[subprocess.Popen[str]]:
    """One launch of two processes, or one on each of two machines."""
    if not name.endswith("multinode"):
        return [launch(folder, name, method, output / "node-0", 2, keys, TWO_PROCESSES)]
    address = ["--main_process_ip=127.0.0.1", f"--main_process_port={get_free_port()}"]
    nodes = ["--num_machines=2", "--num_processes=2", *address]
    return [
        launch(
            folder,
            name,
            method,
            output / f"node-{rank}",
            2,
            keys,
            [*nodes, f"--machine_rank={rank}"],
        )
        for rank in (0, 1)
    ]


def finish_all(started: list[subprocess.Popen[str]]) -> None:
    outputs = [finish(process) for process in started]
    assert not any(process.returncode for process in started), "\n".join(outputs)


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """method -> what one process observed, and the folder of its run."""
    runs: dict[str, tuple[dict[str, Any], Path]] = {}

    def run(method: str) -> tuple[dict[str, Any], Path]:
        if method not in runs:
            output = tmp_path_factory.mktemp(method) / "node-0"
            finish_all([launch(folder, "cpu", method, output, 4)])
            runs[method] = json.loads((output / "process-0.json").read_text()), output / "run"
        return runs[method]

    return run


@pytest.mark.parametrize(
    ("method", "name"),
    [
        pytest.param(method, name, marks=() if method in TRAINED[name] else pytest.mark.every_pair)
        for method in METHODS
        for name in CONFIGURATIONS
    ],
)
def test_two_processes_train_the_draft_that_one_does(
    folder: Path, tmp_path: Path, alone: Any, method: str, name: str
) -> None:
    finish_all(launches(folder, name, method, tmp_path))
    whole, reference = alone(method)
    distributed_type, parameters, optimizer = CONFIGURATIONS[name]
    tolerance = (
        TOLERANCE_BFLOAT16
        if "bfloat16" in method and distributed_type != "MULTI_CPU"
        else TOLERANCE
    )

    # Two processes of one group, each with its part
    for index, place in enumerate(
        sorted(tmp_path.glob("node-*/process-*.json"), key=lambda path: path.name)
    ):
        seen = json.loads(place.read_text())
        assert (index, seen["num_processes"], seen["distributed_type"]) == (
            index,
            2,
            distributed_type,
        )
        assert parameters[0] <= seen["parameters"] / whole["parameters"] <= parameters[1]
        assert optimizer[0] <= seen["optimizer"] / whole["optimizer"] <= optimizer[1]
    assert len(list(tmp_path.glob("node-*/process-*.json"))) == 2

    # The same numbers, step by step, and the same draft, on each machine that keeps its own
    run, *others = sorted(path.parent for path in tmp_path.glob("node-*/run/draft"))
    assert len(others) == (
        name == "ddp_multinode"
    )  # of a sharded draft only the first machine has the whole
    assert log(run)[0] == pytest.approx(log(reference)[0], abs=TOLERANCE)
    for entry, expected in zip(log(run), log(reference), strict=True):
        assert entry == pytest.approx(expected, abs=tolerance)
    for one, place in itertools.product((run, *others), ("draft", "checkpoint-10/draft")):
        weights, wanted = (
            load_file(which / place / "model.safetensors") for which in (one, reference)
        )
        assert weights.keys() == wanted.keys()
        for tensor in wanted:
            assert weights[tensor].dtype == wanted[tensor].dtype
            assert (
                float((weights[tensor].double() - wanted[tensor].double()).abs().max()) <= tolerance
            ), tensor

    # That draft decodes, without loss
    target = FrozenTarget.load(str(folder / "model"))
    decoder = Decoder(target, load_proposer(method.split()[0], run / "draft", target))
    prompt, count = [60, 61, 62, 63], 16
    plain = target.model.generate(
        target.model.dummy_inputs["input_ids"].new_tensor([prompt]), max_new_tokens=count
    )
    drafted = decoder.generate(prompt, max_new_tokens=count, num_speculative_tokens=3)
    assert list(drafted.token_ids) == plain[0, len(prompt) :].tolist()


def test_compiled_layers_learn_the_same_in_two_processes(
    folder: Path, tmp_path: Path, alone: Any
) -> None:
    finish_all(
        launches(
            folder,
            "ddp",
            "eagle3",
            tmp_path,
            "train.torch_compile=true",
            "train.torch_compile_backend=aot_eager",
        )
    )
    _, reference = alone("eagle3")
    for entry, expected in zip(log(tmp_path / "node-0" / "run"), log(reference), strict=True):
        assert entry == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(
    "name", [name for name, (kind, *_) in CONFIGURATIONS.items() if kind != "MULTI_CPU"]
)
def test_a_sharded_run_that_was_killed_resumes_to_the_same_draft(
    folder: Path, tmp_path: Path, name: str
) -> None:
    """Launchers and workers are killed when the first checkpoint stands. Noise, evaluations and the best checkpoint are part of the run."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    first = launches(folder, name, "eagle", killed, "loss.noise=0.1")
    for process, node in zip(first, sorted(killed.glob("node-*")), strict=True):
        wait_for(node / "run" / "checkpoint-10", process)
    for process in first:
        os.killpg(process.pid, signal.SIGKILL)
        finish(process)
    assert not (killed / "node-0" / "run" / "draft").exists()
    for path in (killed, whole):
        finish_all(launches(folder, name, "eagle", path, "loss.noise=0.1"))
    one, other = (path / "node-0" / "run" for path in (killed, whole))
    assert (one / "draft" / "model.safetensors").read_bytes() == (
        other / "draft" / "model.safetensors"
    ).read_bytes()
    assert log(one) == log(other)


def test_zero_3_saves_a_whole_draft_whatever_its_configuration_says(tmp_path: Path) -> None:
    own = (
        (CONFIGS / "zero3.yaml")
        .read_text(encoding="utf-8")
        .replace("zero3_save_16bit_model: true", "")
    )
    (tmp_path / "own.yaml").write_text(own, encoding="utf-8")
    keys = [
        *tiny_files(tmp_path),
        "optimizer=adamw",
        "train.max_steps=2",
        f"train.output_dir={tmp_path / 'run'}",
    ]
    finish_all([start(ROOT / "train" / "eagle.py", *keys, config=str(tmp_path / "own"))])
    target = FrozenTarget.load(str(tmp_path / "model"))
    for draft in ("draft", "checkpoint-2/draft"):
        load_proposer("eagle", tmp_path / "run" / draft, target)


def log(run: Path) -> list[dict[str, float]]:
    history = read_history(run / "draft", key="drafts")
    assert history is not None
    return [{name: entry[name] for name in NUMBERS if name in entry} for entry in history.log]
