"""Every launch configuration of the package trains the draft that one process trains.

That draft decodes without loss.

Two gloo processes train 20 steps of two micro-batches, one process 20 steps of four. Losses,
gradient norms, evaluations and the final weights then differ by rounding alone.

Most of the time of a launch goes into imports, so each configuration is launched once and trains
all that its tests look at, one training after the other.
"""

import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from accelerate.utils.other import get_free_port
from filelock import FileLock
from safetensors.torch import load_file

from specdistill.common.project import ROOT
from specdistill.decoding.decoder import Decoder
from specdistill.methods.load import load_proposer
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.history import read_history
from tests.launches import CONFIGS, TWO_PROCESSES, finish, start, tiny_files, wait_for
from tests.tiny import SMALL, input_keys, write_inputs

# Launches of several processes, seconds each.
pytestmark = [pytest.mark.long, pytest.mark.distributed, pytest.mark.launches]

# In the last case the target and all matrix products are bfloat16; weights and optimizer are
# float32.
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
# The share of the draft's weights and of the optimizer's state that a process holds. A half is more
# than 0.5, because small tensors are replicated.
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
# The methods that `make test-launches` trains: two under each configuration. Each method is trained
# under two to four configurations, early exits under one.
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
SHARDED = [name for name, (kind, *_) in CONFIGURATIONS.items() if kind != "MULTI_CPU"]
KILLED = ("fsdp2", "zero3")
NUMBERS = ("loss", "grad_norm", "eval_loss", "eval_acceptance_length", "train_loss", "epoch")
TOLERANCE = 2e-5  # for losses, norms and weights, which are all about 1 or smaller
# The tolerance of a sharded draft after its first step. Its gradients are summed in another order,
# and its weights are then rounded to bfloat16.
TOLERANCE_BFLOAT16 = 1e-2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, and texts that divide neither into batches nor among processes."""
    path = tmp_path_factory.mktemp("target")
    write_inputs(path, num_rows=103)
    return path


@dataclass(frozen=True)
class Training:
    """One training of a launch: a method, and keys of the recipe in addition to its own."""

    method: str
    keys: tuple[str, ...] = ()


# A killed run must end like this one, including noise, evaluations and the best checkpoint.
WITH_NOISE = Training("eagle", ("loss.noise=0.1",))
COMPILED = Training("eagle3", ("train.torch_compile=true", "train.torch_compile_backend=aot_eager"))


def launch(
    folder: Path,
    name: str,
    trainings: Mapping[str, Training],
    output: Path,
    accumulation: int,
    options: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Start the processes of one machine, which train one after the other.

    A machine has its own working folder, data cache and runs.

    Args:
        folder: The target and the training data.
        name: The name of the configuration.
        trainings: The trainings by the name of their folder in `output`.
        output: The working folder.
        accumulation: The micro-batches of a step.
        options: Further options of accelerate.
    """
    output.mkdir(exist_ok=True, parents=True)
    commands = {}
    for place, training in trainings.items():
        script, keys = METHODS[training.method]
        (output / place).mkdir(exist_ok=True)
        commands[place] = [
            str(ROOT / script),
            f"method={training.method.split()[0]}",
            *input_keys(folder),
            f"data.cache_dir={output / place / 'cache'}",
            *keys,
            "optimizer=adamw",
            f"train.output_dir={output / place / 'run'}",
            *SMALL,
            "train.max_steps=20",
            "train.per_device_train_batch_size=2",
            f"train.gradient_accumulation_steps={accumulation}",
            "train.logging_steps=1",
            "train.eval_steps=10",
            "train.save_steps=10",
            f"train.save_on_each_node={name.endswith('multinode')}",
            *training.keys,
        ]
    (output / "commands.json").write_text(json.dumps(commands), encoding="utf-8")
    return start(
        Path(__file__).with_name("observed.py"),
        str(output),
        config=name,
        options=options,
        folder=output,
    )


def launch_machines(
    folder: Path, name: str, trainings: Mapping[str, Training], output: Path
) -> list[subprocess.Popen[str]]:
    """Launch two processes, or one on each of two machines; return the launchers."""
    if not name.endswith("multinode"):
        return [launch(folder, name, trainings, output / "node-0", 2, TWO_PROCESSES)]
    address = ["--main_process_ip=127.0.0.1", f"--main_process_port={get_free_port()}"]
    nodes = ["--num_machines=2", "--num_processes=2", *address]
    return [
        launch(
            folder, name, trainings, output / f"node-{rank}", 2, [*nodes, f"--machine_rank={rank}"]
        )
        for rank in (0, 1)
    ]


def finish_all(started: list[subprocess.Popen[str]]) -> None:
    outputs = [finish(process) for process in started]
    assert not any(process.returncode for process in started), "\n".join(outputs)


def list_trained_methods(session: pytest.Session, *names: str) -> list[str]:
    """Return the methods that the tests of this session train under these configurations."""
    chosen = set()
    for item in session.items:
        callspec = getattr(item, "callspec", None)
        if callspec and "method" in callspec.params and callspec.params["name"] in names:
            chosen.add(callspec.params["method"])
    return [method for method in METHODS if method in chosen]


@pytest.fixture(scope="module")
def trained_folder(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A function from a configuration to the folder of its trainings.

    They run when a test first asks for them: each method, and the runs that tests compare with.
    """
    outputs: dict[str, Path] = {}

    def train(name: str) -> Path:
        if name not in outputs:
            trainings = {
                method: Training(method) for method in list_trained_methods(request.session, name)
            }
            if name in SHARDED:
                trainings["whole"] = WITH_NOISE
            if name == "ddp":
                trainings["compiled"] = COMPILED
            output = tmp_path_factory.mktemp(name)
            finish_all(launch_machines(folder, name, trainings, output))
            outputs[name] = output
        return outputs[name]

    return train


@pytest.fixture(scope="module")
def single_process_folder(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A function from a method to the folder of its training in one process.

    The worker that first asks for a method trains all methods in one launch.
    """
    shared = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        shared = shared.parent
    output = shared / "alone"

    def train(method: str) -> Path:
        with FileLock(f"{output}.lock"):
            if not output.exists():
                # The compiled layers are compared with eagle3.
                methods = {*list_trained_methods(request.session, *CONFIGURATIONS), "eagle3"}
                trainings = {each: Training(each) for each in METHODS if each in methods}
                finish_all([launch(folder, "cpu", trainings, output, 4)])
        return output / method

    return train


@pytest.mark.parametrize(
    ("method", "name"),
    [
        pytest.param(
            method,
            name,
            marks=[
                pytest.mark.xdist_group(name),
                *([] if method in TRAINED[name] else [pytest.mark.extended]),
            ],
        )
        for name in CONFIGURATIONS
        for method in METHODS
    ],
)
def test_two_processes_train_the_draft_that_one_does(
    folder: Path,
    trained_folder: Callable[[str], Path],
    single_process_folder: Callable[[str], Path],
    method: str,
    name: str,
) -> None:
    places = sorted(trained_folder(name).glob(f"node-*/{method}"))
    whole = json.loads((single_process_folder(method) / "process-0.json").read_text())
    reference = single_process_folder(method) / "run"
    distributed_type, parameters, optimizer = CONFIGURATIONS[name]
    tolerance = (
        TOLERANCE_BFLOAT16
        if "bfloat16" in method and distributed_type != "MULTI_CPU"
        else TOLERANCE
    )

    # The two processes are one group, and each holds its part.
    observations = [path for place in places for path in place.glob("process-*.json")]
    for index, place in enumerate(sorted(observations, key=lambda path: path.name)):
        seen = json.loads(place.read_text())
        assert (index, seen["num_processes"], seen["distributed_type"]) == (
            index,
            2,
            distributed_type,
        )
        assert parameters[0] <= seen["parameters"] / whole["parameters"] <= parameters[1]
        assert optimizer[0] <= seen["optimizer"] / whole["optimizer"] <= optimizer[1]
    assert len(observations) == 2

    # Numbers are the same at each step, and so is the draft of each machine that keeps one.
    run, *others = [place / "run" for place in places if (place / "run" / "draft").exists()]
    # Only the first machine has the whole of a sharded draft.
    assert len(others) == (name == "ddp_multinode")
    assert read_log(run)[0] == pytest.approx(read_log(reference)[0], abs=TOLERANCE)
    for entry, expected in zip(read_log(run), read_log(reference), strict=True):
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

    # The draft decodes without loss.
    target = FrozenTarget.load(str(folder / "model"))
    decoder = Decoder(target, load_proposer(method.split()[0], run / "draft", target))
    prompt, count = [60, 61, 62, 63], 16
    plain = target.model.generate(
        target.model.dummy_inputs["input_ids"].new_tensor([prompt]), max_new_tokens=count
    )
    drafted = decoder.generate(prompt, max_new_tokens=count, num_speculative_tokens=3)
    assert list(drafted.token_ids) == plain[0, len(prompt) :].tolist()


@pytest.mark.xdist_group("ddp")
def test_compiled_layers_learn_the_same_in_two_processes(
    trained_folder: Callable[[str], Path], single_process_folder: Callable[[str], Path]
) -> None:
    compiled = read_log(trained_folder("ddp") / "node-0" / "compiled" / "run")
    for entry, expected in zip(
        compiled, read_log(single_process_folder("eagle3") / "run"), strict=True
    ):
        assert entry == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in SHARDED]
)
def test_a_sharded_run_that_was_killed_resumes_to_the_same_draft(
    folder: Path, tmp_path: Path, trained_folder: Callable[[str], Path], name: str
) -> None:
    """Launchers and workers are killed when the first checkpoint stands, under one configuration
    of each library. Under the others a whole run loses what came after that checkpoint, which
    spares a launch: how a library divides a draft does not change when its processes are killed.
    """
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    shutil.copytree(trained_folder(name), whole)
    if name in KILLED:
        first = launch_machines(folder, name, {"whole": WITH_NOISE}, resumed)
        for process, node in zip(first, sorted(resumed.glob("node-*")), strict=True):
            wait_for(node / "whole" / "run" / "checkpoint-10", process)
        for process in first:
            os.killpg(process.pid, signal.SIGKILL)
            finish(process)
    else:
        # A run is resumed where it was, since its recipe names the folder.
        resumed = trained_folder(name)
        for later in ("draft", "checkpoint-20"):
            for path in resumed.glob(f"node-*/whole/run/{later}"):
                shutil.rmtree(path)
    run = resumed / "node-0" / "whole" / "run"
    assert (run / "checkpoint-10").exists()
    assert not (run / "checkpoint-20").exists() and not (run / "draft").exists()
    finish_all(launch_machines(folder, name, {"whole": WITH_NOISE}, resumed))
    one, other = (path / "node-0" / "whole" / "run" for path in (resumed, whole))
    assert (one / "draft" / "model.safetensors").read_bytes() == (
        other / "draft" / "model.safetensors"
    ).read_bytes()
    resumed_log = read_log(one)
    whole_log = read_log(other)
    # transformers averages train_loss over the steps since the resume.
    resumed_loss = resumed_log[-1].pop("train_loss")
    assert 0 < resumed_loss != whole_log[-1].pop("train_loss") > 0
    assert resumed_log == whole_log


def test_zero_3_saves_a_whole_draft_whatever_its_configuration_is(tmp_path: Path) -> None:
    config = (
        (CONFIGS / "zero3.yaml")
        .read_text(encoding="utf-8")
        .replace("zero3_save_16bit_model: true", "")
    )
    (tmp_path / "own.yaml").write_text(config, encoding="utf-8")
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


def read_log(run: Path) -> list[dict[str, float]]:
    history = read_history(run / "draft", key="drafts")
    assert history is not None
    return [{name: entry[name] for name in NUMBERS if name in entry} for entry in history.log]
