"""Measure the parts of `make gpu`.

Each part yields its results piece by piece, so that a part that is ended keeps what it had.
bench/gpu.py runs each part in a process of its own:

    python -m bench.gpu_parts part=train results=lines.jsonl  # appends a JSON line for each piece
    # tiny shapes on a CPU: the numbers mean nothing
    python -m bench.gpu_parts part=train results=lines.jsonl small=true
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.counting import ignore_stop_tokens
from bench.drafts import run_specdistill
from bench.llama_8b import CONFIG, NUM_STEPS, TARGET
from bench.run import draw_rows, measure_median_seconds
from specdistill.advice.plan.accounting import count_training_step
from specdistill.cli.command import run
from specdistill.common.project import ROOT
from specdistill.data.rows.packing import collate
from specdistill.decoding.decoder import Decoder, read_clock
from specdistill.decoding.tree import build_tree_shape
from specdistill.evaluation.measurement.hardware import describe_hardware, list_software
from specdistill.methods.chains.objective import TrainingTimeTest
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.eagle3.advice import Eagle3Advice
from specdistill.methods.eagle3.checkpoint import save_eagle3
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.recipe.fields import Section, option
from specdistill.recipe.sections import TreeConfig
from specdistill.targets.batch_generate import generate_batch, prepare_generation
from specdistill.targets.frozen import FrozenTarget, compile_layers
from specdistill.training.arguments import build_training_arguments
from specdistill.training.losses.divergence import forward_kl
from specdistill.training.objective import ForwardInputs
from specdistill.training.optimizer import MuonAdamW
from specdistill.training.trainer import DistillationTrainer

# The tree that decoding is timed with: up to 60 nodes, 6 levels, 10 candidates per node. K is the
# length of the chain.
TREE = {"budget": 60, "depth": 6, "top_k": 10}
K = 4
NEW_TOKENS = 48  # tokens that each timed decoding generates
# These tests cover losslessness in float32, batches, trees, sampling, a training step, and
# attention over packed rows. Compiled passes are timed in a part of their own.
SHORT_TESTS = (
    "tests/decoding/test_cuda.py",
    "tests/targets/test_packed_rows.py",
    "tests/methods/chains/test_attention.py",
    "-k",
    "not compiled",
)


# A piece of a part's result: numbers, text and lists by name, which are written as JSON.
Piece = Mapping[str, object]


@dataclass(frozen=True)
class Shape:
    """The sizes of a training step and of decoding. Each training row is one document.

    Attributes:
        small: whether the parts run on a CPU, with a tiny target.
        rows: rows of a training step.
        length: tokens of each row.
        draft_vocab_size: tokens of the draft vocabulary.
        steps: training steps.
        prompts: the lengths of the prompts for decoding, in tokens.
        batch: sequences that are decoded at a time.
        matrix: rows and columns of the matrix whose product is timed.
        num_kernels: how many of the most expensive kernels are listed.
        tests: arguments of pytest.
        keys: further keys of the recipe's section `train`.
    """

    small: bool = False
    rows: int = 4
    length: int = 2048
    draft_vocab_size: int = 32_000
    steps: int = 12
    prompts: tuple[int, ...] = (256, 2048, 8192)
    batch: int = 16
    matrix: int = 8192
    num_kernels: int = 40
    tests: tuple[str, ...] = ("tests",)
    keys: dict[str, object] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device that is measured."""
        return torch.device("cpu" if self.small else "cuda")

    @property
    def target(self) -> FrozenTarget:
        """The target with random weights."""
        return build_random_target(self.small)


# The target of `small=true`: the same layers as Llama, in a size that a CPU runs at once.
TINY = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=512,
    max_position_embeddings=1024, tie_word_embeddings=False,
)  # fmt: skip
SMALL_SHAPE = Shape(
    small=True, rows=2, length=64, draft_vocab_size=128, steps=2, prompts=(16,), batch=2, matrix=64
)


class Options(Section):
    """The options of this script."""

    part: str = option(..., "name of the part to measure, e.g. train")
    results: str = option(..., "file to which the results are appended as JSON lines")
    short: bool = option(False, "use the smaller sizes of the short form of `make gpu`")
    small: bool = option(
        False,
        "use tiny models and sizes, to try the parts on a machine without a GPU; the numbers mean"
        " nothing",
    )


def main(options: Options) -> None:
    """Run the part that the options name, and append its results to a file as JSON lines."""
    # Print and write each piece at once, so that a killed part keeps the earlier pieces.
    path = Path(options.results)
    for numbers in PARTS[options.part](build_shape(options)):
        line = json.dumps(numbers)
        print(f"{options.part}: {line}", flush=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def build_shape(options: Options) -> Shape:
    """Return the sizes to measure with, as the options `small` and `short` ask for."""
    shape = SMALL_SHAPE if options.small else Shape()
    if options.short:
        shape = replace(shape, num_kernels=10, tests=SHORT_TESTS, prompts=shape.prompts[:2])
    return shape


@cache
def build_random_target(small: bool) -> FrozenTarget:
    """Return a target with random weights that ignores stop tokens.

    Later calls return the same target, because building 16 GB of weights takes long.

    Args:
        small: build a tiny model on the CPU instead of one in the shape of Llama-3.1-8B on the GPU.
    """
    with torch.device("cpu" if small else "cuda"):
        model = AutoModelForCausalLM.from_config(TINY if small else CONFIG, dtype=torch.bfloat16)
    target = FrozenTarget(model, None, name="random weights")
    ignore_stop_tokens(target)
    return target


# Machine


def measure_ceilings(shape: Shape) -> Iterator[Piece]:
    """Measure the highest speeds of arithmetic and of memory that the device reaches.

    Yields:
        The machine and the versions of its software; the TFLOP/s of a product of two bfloat16
        matrices; the GB/s of a copy.
    """
    device = shape.device
    yield {
        "hardware": describe_hardware(device),
        "software": {**list_software(), "cuda": torch.version.cuda},
    }

    # A product of two matrices of n rows and columns takes 2 n^3 operations.
    size = shape.matrix
    left = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    right = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    product_s = measure_seconds(device, lambda: left @ right)
    yield {"tflops": round(2 * size**3 / product_s / 1e12, 1)}

    # A copy reads and writes every byte.
    large = torch.empty(size, size, 4, dtype=torch.float32, device=device)
    copy_s = measure_seconds(device, lambda: large.clone())
    yield {"copy_gb_per_second": round(2 * large.nbytes / copy_s / 1e9)}


def measure_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return the median seconds that a function takes on a device."""
    # `measure_median_seconds` expects a target, but only uses the device of it.
    return measure_median_seconds(SimpleNamespace(device=device), work)  # type: ignore[arg-type]


def run_tests(shape: Shape) -> Iterator[Piece]:
    """Run the tests that need a GPU, and yield pytest's summary and the failed tests.

    pytest prints each test when it ends. So if a test hangs, the output ends with the test before
    it. Warnings do not fail a test here, because the machine may have other versions of libraries.

    Raises:
        CalledProcessError: if a test fails.
    """
    # Run pytest on the tests marked `gpu`, and pass its output on line by line.
    options = ["-v", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *shape.tests]
    summary = ""
    failures = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)

            # Remember the latest line that is not empty: at the end it is the summary of pytest.
            summary = line.strip() or summary
            if line.startswith(("FAILED", "ERROR")):
                failures.append(line.strip()[:200])

    # Yield the summary before raising an error, so that the JSON has both.
    yield {"summary": summary, "failures": failures[:20]}
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


# Training


def measure_training(shape: Shape) -> Iterator[Piece]:
    """Measure training steps of an EAGLE-3 head for an 8B target.

    Yields:
        Speed and memory of the steps; the milliseconds of each part of a step; where the host waits
        for the GPU; the kernels that take longest; the numbers that `specdistill plan` computes for
        the same step.
    """
    with build_trainer(shape) as trainer:
        # Train first, so that everything is compiled and allocated before the next measurements.
        yield measure_steps(trainer)
        yield {"parts_ms": time_parts_of_a_step(trainer, shape)}

        # Run the same training step on one micro-batch twice more: to count waits, then under the
        # profiler. A step may change its inputs, so each step gets a copy of the dictionary.
        micro_batches, *_ = trainer.get_batch_samples(
            iter(trainer.get_train_dataloader()), 1, trainer.args.device
        )
        inputs = micro_batches[0]
        trainer.num_tokens = torch.tensor(0)  # `training_step` adds to this counter
        num_loss_tokens = torch.tensor(shape.rows * shape.length, device=trainer.args.device)
        step = partial(trainer.training_step, trainer.model)
        yield {"waits": count_waits(lambda: step(dict(inputs), num_loss_tokens))}
        yield {
            "kernels": list_kernels(lambda: step(dict(inputs), num_loss_tokens), shape.num_kernels)
        }
    yield {"computed": compute_step(shape)}


@contextmanager
def build_trainer(
    shape: Shape, build_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
) -> Iterator[DistillationTrainer]:
    """Build the trainer of an EAGLE-3 head as a recipe would, and yield it.

    The head is new and the rows are random tokens. The statistics of the GPU's peak memory are
    reset, so that they describe this trainer.

    Args:
        shape: the sizes.
        build_optimizer: builds the optimizer of the head; None for the Trainer's AdamW.
    """
    device = shape.device
    target = shape.target

    # Build the head. It has a draft vocabulary of its own if that is smaller than the target's.
    draft_vocabulary = None
    if shape.draft_vocab_size < target.vocab_size:
        draft_vocabulary = torch.arange(shape.draft_vocab_size, device=device)
    head = build_eagle3(target, draft_vocabulary=draft_vocabulary)
    data = draw_rows(target, shape.rows, shape.length)

    # The settings of the Trainer: three log entries, no checkpoints.
    keys = {
        "learning_rate": 1e-4,
        "bf16": True,
        "max_steps": shape.steps,
        "logging_steps": max(1, shape.steps // 3),
        "per_device_train_batch_size": shape.rows,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    objective = TrainingTimeTest(head, forward_kl, NUM_STEPS)

    # Count the peak of memory from here.
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        arguments = build_training_arguments({**keys, **shape.keys, "output_dir": folder})
        compile_layers(shape.keys, target, objective)

        optimizer = build_optimizer(head) if build_optimizer else None
        try:
            yield DistillationTrainer(
                objective, target, arguments, data, data, save=save_eagle3, optimizer=optimizer
            )
        finally:
            # A compiled layer would stay compiled for the next training.
            for layer in target.layers:
                vars(layer).pop("forward", None)


def measure_steps(trainer: DistillationTrainer) -> dict[str, float]:
    """Train, and return the speed, peak memory and loss of the last third of the steps.

    Compiling and the first allocations of memory are over by then.
    """
    trainer.train()

    # The log has an entry with a speed for each third of the steps; take the last one. Entries
    # without a speed, such as the summary at the end of training, are left out.
    last = [entry for entry in trainer.state.log_history if "tokens_per_second" in entry][-1]
    return {name: round(last[name], 4) for name in ("tokens_per_second", "peak_memory_gib", "loss")}


def compute_step(shape: Shape) -> dict[str, float]:
    """Compute the memory, arithmetic and traffic of the step as `specdistill plan` does.

    The target's layers are left out. A comparison with the measured numbers shows how precise the
    computation is.

    Returns:
        The GiB of peak memory, the TFLOP and the GB of traffic; empty with `small=true`.
    """
    # The numbers are computed for the 8B target. With `small=true` another target was measured, so
    # there is nothing to compare them with.
    if shape.small:
        return {}

    # Run the step's code over tensors without content.
    draft = Eagle3Advice().plan_draft(TARGET, None, {"vocab_size": shape.draft_vocab_size})
    ledger = count_training_step(
        "eagle3",
        draft.build,
        {"ttt_steps": NUM_STEPS},
        TARGET,
        rows=shape.rows,
        length=shape.length,
    )
    return {
        "peak_gib": round(ledger.peak / 2**30, 2),
        "tflop": round(ledger.flops / 1e12, 1),
        "traffic_gb": round(ledger.traffic / 1e9, 1),
    }


def time_parts_of_a_step(trainer: DistillationTrainer, shape: Shape) -> dict[str, float]:
    """Return the milliseconds of each part of a training step: the median of five steps."""
    target = trainer.target
    objective = trainer.objective
    device = trainer.args.device

    # Move the whole training set to the device as one batch.
    batch = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in collate_all_rows(trainer).items()
    }

    # Read the clock before the step and after each of its four parts. `read_clock` waits until the
    # GPU has finished its work.
    names = ("target", "unroll and loss", "backward", "optimizer")
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(5):
        marks = [read_clock(device)]
        with torch.autocast(device.type, torch.bfloat16):
            with torch.no_grad():
                outputs = objective.read_target(target, batch)
            marks.append(read_clock(device))
            loss, _ = objective(**batch, **outputs)
        marks.append(read_clock(device))
        (loss / (shape.rows * shape.length)).backward()
        marks.append(read_clock(device))
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        marks.append(read_clock(device))

        # The time of a part is the distance between two marks.
        for name, start, end in zip(names, marks, marks[1:], strict=False):
            times[name].append(end - start)
    return {name: round(1000 * statistics.median(values), 1) for name, values in times.items()}


def collate_all_rows(trainer: DistillationTrainer) -> ForwardInputs:
    """Return all rows of the training data as one batch."""
    return collate([dict(row) for row in trainer.train_dataset])


def count_waits(step: Callable[[], object]) -> dict[str, int]:
    """Count how often the host waits for the GPU while a function runs.

    A fast training step avoids such waits. torch warns of each of them.

    Returns:
        The number of waits by the line of code that causes them, such as `trainer.py:120`; empty
        without a GPU.
    """
    if not torch.cuda.is_available():
        return {}

    # Let torch warn of every wait in one step.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    # Count the warnings by the line that caused them.
    places = [
        f"{Path(entry.filename).name}:{entry.lineno}"
        for entry in caught
        if "synchroniz" in str(entry.message)
    ]
    return {place: places.count(place) for place in dict.fromkeys(places)}


def list_kernels(step: Callable[[], object], num_kernels: int) -> list[Piece]:
    """Return the kernels that take longest while a function runs.

    On a machine without a GPU these are operations of the CPU.

    Returns:
        For each kernel its name, milliseconds and number of calls, the slowest first.
    """
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU]
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiled:
        step()

    # Sort by the time of each kernel without the kernels that it calls. The profiler gives
    # microseconds.
    get_time = attrgetter("self_device_time_total" if on_gpu else "self_cpu_time_total")
    events = sorted(profiled.key_averages(), key=get_time, reverse=True)
    return [
        {"name": event.key[:100], "ms": round(get_time(event) / 1000, 2), "calls": event.count}
        for event in events[:num_kernels]
    ]


def measure_shapes(shape: Shape) -> Iterator[Piece]:
    """Yield the speed and memory of a training step with other sizes or settings.

    There are three such steps: with one long row; with the target's whole vocabulary in the draft;
    with activations that are recomputed in the backward pass, for less memory and more time.
    """
    vocab_size = shape.target.vocab_size
    changed_shapes = {
        "one row": replace(shape, rows=1, length=shape.rows * shape.length),
        "whole vocabulary": replace(shape, draft_vocab_size=vocab_size),
        "recomputed": replace(shape, keys={"activation_checkpointing": True}),
    }
    for name, changed_shape in changed_shapes.items():
        yield {name: build_and_measure_steps(changed_shape)}


def build_and_measure_steps(
    shape: Shape, build_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
) -> dict[str, float]:
    """Build a trainer of these sizes, train, and return the speed and memory of its last steps."""
    with build_trainer(shape, build_optimizer) as trainer:
        return measure_steps(trainer)


def measure_variants(shape: Shape) -> Iterator[Piece]:
    """Yield the speed of the same training step with AdamW, with Muon, and compiled."""
    yield {"plain": build_and_measure_steps(shape)}
    yield {"Muon": build_and_measure_steps(shape, lambda head: MuonAdamW(head, 1e-4))}
    # On a CPU the step only has to run. The backend `aot_eager` needs no C++ compiler.
    backend = {"torch_compile_backend": "aot_eager"} if shape.small else {}
    compiled = replace(shape, keys={"torch_compile": True, **backend})
    yield {"compiled": build_and_measure_steps(compiled)}


# Decoding


def measure_decoding(shape: Shape) -> Iterator[Piece]:
    """Measure decoding with an untrained EAGLE-3 head.

    Yields:
        For each prompt length, the times of a round without a draft, with a chain and with a tree;
        then the tokens per second of a batch, without a draft and with a chain.
    """
    target = shape.target

    # An untrained head is enough: the time of a round does not depend on how much is accepted.
    head = HeadProposer(build_eagle3(target).to(torch.bfloat16))
    tree = build_tree_shape(TreeConfig(**TREE))
    for length in shape.prompts:
        prompt = draw_prompt(target, length)
        numbers = {
            "plain": time_rounds(Decoder(target), prompt, NEW_TOKENS),
            "chain": time_rounds(
                Decoder(target, head), prompt, NEW_TOKENS, num_speculative_tokens=K
            ),
            "tree": time_rounds(Decoder(target, head), prompt, NEW_TOKENS, tree=tree),
        }
        yield {f"{length} tokens": numbers}

    # Decode a batch of equal prompts twice. The first run loads kernels and allocates memory, so
    # only the second run counts.
    prompts = [draw_prompt(target, shape.prompts[0])] * shape.batch
    for name, proposer, k in (("plain", None, 0), ("chain", head, K)):
        decoder = Decoder(target, proposer)
        for _ in range(2):
            generations = decoder.generate_all(
                prompts, max_new_tokens=NEW_TOKENS, num_speculative_tokens=k
            )
        # `generate_all` divides the time of the batch among its generations, so the sum over them
        # is the time of the batch. The prefill is left out.
        seconds = sum(generation.seconds - generation.prefill_seconds for generation in generations)
        speed = {"tokens_per_second": round(NEW_TOKENS * shape.batch / seconds, 1)}
        yield {f"batch of {shape.batch}, {name}": speed}


def measure_compiled_decoding(shape: Shape) -> Iterator[Piece]:
    """Yield the times of a decoding round of a compiled target, without a draft and with a chain.

    To save time, the first prompt, which is the shortest, is left out, unless it is the only one.
    """
    target = shape.target
    head = HeadProposer(build_eagle3(target).to(torch.bfloat16))
    head.compiled = True

    # `time_rounds` generates twice, and times only the second generation. So compiling, which
    # happens in the first one, does not count.
    new_tokens = 8 if shape.small else NEW_TOKENS
    for length in shape.prompts[1:] or shape.prompts:
        prompt = draw_prompt(target, length)
        plain = time_rounds(Decoder(target, compiled=True), prompt, new_tokens)
        yield {f"{length} tokens, plain": plain}
        chain = time_rounds(
            Decoder(target, head, compiled=True), prompt, new_tokens, num_speculative_tokens=K
        )
        yield {f"{length} tokens, chain": chain}


def draw_prompt(target: FrozenTarget, length: int) -> list[int]:
    """Return the ids of random tokens, the same ones in each call."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(target.vocab_size, (length,), generator=generator).tolist()


def time_rounds(
    decoder: Decoder, prompt_ids: list[int], new_tokens: int, **options: Any
) -> dict[str, float]:
    """Decode a prompt twice, and return the median times of a round in the second generation.

    Returns:
        Milliseconds of drafting (`draft_ms`) and of verifying (`verify_ms`).
    """
    # The first generation warms up.
    for _ in range(2):
        rounds = decoder.generate(prompt_ids, max_new_tokens=new_tokens, **options).rounds
    draft_s = statistics.median(entry.draft_seconds for entry in rounds)
    verify_s = statistics.median(entry.verify_seconds for entry in rounds)
    return {"draft_ms": round(1000 * draft_s, 3), "verify_ms": round(1000 * verify_s, 3)}


def measure_generation(shape: Shape) -> Iterator[Piece]:
    """Yield the tokens per second at which the target generates answers, for two batch sizes."""
    target = shape.target
    with prepare_generation(target.model, torch.bfloat16) as model:
        for batch in (shape.batch, 8 * shape.batch):
            # Generate 64 tokens after prompts of 32 tokens, at temperature 0.8. No token ends an
            # answer early (`end_ids`). The values of the prompt's tokens do not change the time.
            prompts = [list(range(10, 42))] * batch
            options = {"max_new_tokens": 64, "end_ids": (), "seed": 0}
            run_generation = partial(generate_batch, model, prompts, [0.8] * batch, **options)
            seconds = measure_median_seconds(target, run_generation, repeats=1)
            yield {f"{batch} rows": {"tokens_per_second": round(64 * batch / seconds, 1)}}


# From recipe to gate


def train_pico(shape: Shape) -> Iterator[Piece]:
    """Train a head for the small model pico, measure it in float32, and judge it by its gate.

    Yields:
        The seconds of training and of measuring; the verdict of the gate, the acceptance length and
        the speedup.
    """
    # Tiny sizes for a CPU, on which the numbers mean nothing.
    small_keys = [
        "train.max_steps=4",
        "data.regenerate.num_tokens=600",
        "eval.num_prompts=3",
        "eval.max_new_tokens=8",
        "eval.repeats=1",
    ]
    keys = small_keys if shape.small else []

    # Train, then measure. The gate may fail: its verdict is a result like any other.
    with tempfile.TemporaryDirectory() as folder:
        output_key = f"train.output_dir={folder}/run"
        yield {"train_seconds": run_command("train", "recipe=pico/eagle3", output_key, *keys)}
        recipe_key = f"recipe={folder}/run/run/recipe.yaml"
        eval_seconds = run_command("eval", recipe_key, *keys, accepts_failed_gate=True)
        yield {"eval_seconds": eval_seconds}
        report = json.loads((Path(folder) / "run/report/report.json").read_text(encoding="utf-8"))

    # Yield the verdict, and the metrics that the report has.
    first = report["results"][0]
    numbers = {
        name: round(first[name], 3)
        for name in ("mean_acceptance_length", "speedup")
        if first.get(name)
    }
    yield {"verdict": report["gate"]["verdict"], **numbers}


def run_command(verb: str, *arguments: str, accepts_failed_gate: bool = False) -> float:
    """Run a `specdistill` command in a child process, and return the seconds that it took.

    If the command fails, this process ends with the same exit code.

    Args:
        verb: the command, such as `train`.
        *arguments: its arguments.
        accepts_failed_gate: whether to return if the command's gate fails or is inconclusive,
            instead of ending this process.
    """
    start = time.monotonic()
    run_specdistill(verb, *arguments, accepts_failed_gate=accepts_failed_gate)
    return round(time.monotonic() - start, 1)


def measure_store(shape: Shape) -> Iterator[Piece]:
    """Yield the speed and memory of training a head for pico on stored hidden states.

    The hidden states are written to disk once, and each training step reads them from there.
    """
    with tempfile.TemporaryDirectory() as folder:
        # In hybrid mode, the hidden states are written before the first step.
        keys = [
            f"train.output_dir={folder}/run",
            f"hidden_states.path={folder}/features",
            "hidden_states.mode=hybrid",
        ]
        if shape.small:
            keys += ["data.regenerate.num_tokens=600", "train.max_steps=4"]
        else:
            keys += ["train.max_steps=60"]
        run_command("train", "recipe=pico/eagle3", *keys)
        history = (Path(folder) / "run/run/history.json").read_text(encoding="utf-8")

    # Take the last log entry that has a speed.
    log = json.loads(history)["log"]
    last = [entry for entry in log if "tokens_per_second" in entry][-1]
    yield {name: round(last[name], 2) for name in ("tokens_per_second", "peak_memory_gib")}


PARTS: dict[str, Callable[[Shape], Iterator[Piece]]] = {
    "ceilings": measure_ceilings,
    "tests": run_tests,
    "train": measure_training,
    "shapes": measure_shapes,
    "variants": measure_variants,
    "decoding": measure_decoding,
    "compiled": measure_compiled_decoding,
    "pico": train_pico,
    "store": measure_store,
    "generation": measure_generation,
}


if __name__ == "__main__":
    sys.exit(run(main, Options))
