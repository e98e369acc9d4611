"""What a GPU does with all of this, in half an hour: ceilings, tests, training and decoding at the shapes of an 8B target, a gated draft.

    make gpu                                     # all parts, on one GPU or several; no network is needed
    make gpu ARGS="parts=[train,decoding]"       # some of them
    python -m bench.gpu small=true               # tiny shapes, on a CPU: does it run?

Each part is appended to bench/results/gpu/<device>.json as it finishes; one that fails is named there, the next ones run, and the exit code
is 1. The tables of docs/performance.md are written from these files.

To a machine without a network bring this repository and, by `pip download --no-deps`, what its Python lacks of pyproject.toml: some twenty
wheels, 25 MiB, where torch, accelerate and peft are there. Where a command may take ten minutes, three calls keep their results:

    parts=[ceilings,tests,train,shapes]    parts=[variants,decoding]    parts=[pico,store,generation,smollm2,launches]
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.counting import ignore_stop_tokens
from bench.memory import CONFIG, NUM_STEPS, TARGET
from bench.pages import write_between
from bench.run import median_seconds
from specdistill.command import run
from specdistill.decoding.decoder import Decoder, now
from specdistill.decoding.tree import tree_shape
from specdistill.errors import ExitCode, one_line
from specdistill.losses import chunked
from specdistill.losses.divergence import forward_kl
from specdistill.measurement.hardware import hardware, software
from specdistill.methods.chains.proposer import HeadProposer
from specdistill.methods.chains.unroll import TrainingTimeTest
from specdistill.methods.eagle3 import method as eagle3
from specdistill.methods.eagle3.checkpoint import save_eagle3
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.planning.accounting import training_step
from specdistill.project import ROOT
from specdistill.recipe.fields import Section, option
from specdistill.recipe.sections import TreeConfig
from specdistill.report.text import table
from specdistill.rows.packing import collate
from specdistill.targets.batch_generate import generate, generation_mode
from specdistill.targets.frozen import FrozenTarget, compile_layers
from specdistill.targets.loading import quantization
from specdistill.training.arguments import training_arguments
from specdistill.training.optimizer import MuonAdamW
from specdistill.training.trainer import DraftTrainer

RESULTS = Path(__file__).parent / "results" / "gpu"
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")
PAGE = ROOT / "docs" / "performance.md"
LAUNCHES = ("ddp", "fsdp2", "zero2", "zero3")
TREE = {"budget": 60, "depth": 6, "top_k": 10}
K = 4


@dataclass(frozen=True)
class Shape:
    """Of a step, rows of one document each, and of what is decoded. small: on a CPU, with a tiny target."""

    small: bool = False
    rows: int = 4
    length: int = 2048
    draft_vocab_size: int = 32_000
    steps: int = 12
    prompts: tuple[int, ...] = (256, 2048, 8192)  # tokens before what is decoded
    batch: int = 16
    matrix: int = 8192  # its rows and columns
    keys: dict[str, Any] = field(default_factory=dict)  # of `train:`

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.small else "cuda")

    @property
    def target(self) -> FrozenTarget:
        return random_target(self.small)


TINY = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
    max_position_embeddings=1024, tie_word_embeddings=False,
)  # fmt: skip
SMALL = Shape(
    small=True, rows=2, length=64, draft_vocab_size=128, steps=2, prompts=(16,), batch=2, matrix=64
)


class Options(Section):
    parts: list[str] = option([], "names of PARTS, in their order; none: all of them")
    small: bool = option(
        False, "tiny shapes, for a machine without a GPU; the numbers mean nothing"
    )
    output_dir: str = option(str(RESULTS), "where the JSON is written")


def main(options: Options) -> ExitCode:
    shape = SMALL if options.small else Shape()
    os.environ["CUDA_VISIBLE_DEVICES"] = (
        VISIBLE.split(",")[0] if VISIBLE else "0"
    )  # one, but for `launches`
    device = shape.device
    path = Path(options.output_dir) / f"{hardware(device)['name'].lower().replace(' ', '-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    failed = False
    for name in options.parts or PARTS:
        start, created = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
        try:
            results[name] = PARTS[name](shape)
        except Exception as error:  # what a part says is worth more than what its failure would keep from the others
            traceback.print_exc()
            results[name], failed = (
                {"failed": one_line(f"{type(error).__name__}: {error}")[:400]},
                True,
            )
        results[name] |= {"created": created, "seconds": round(time.monotonic() - start, 1)}
        print(json.dumps({name: results[name]}), flush=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if not options.small:
        write_between(PAGE, "gpu", page(sorted(RESULTS.glob("*.json"))))
    return ExitCode.CHECK_FAILED if failed else ExitCode.DONE


@cache
def random_target(small: bool) -> FrozenTarget:
    """Of Llama-3.1-8B's shape with random weights, which generates without an end; or a tiny one, on the CPU."""
    with torch.device("cpu" if small else "cuda"):
        model = AutoModelForCausalLM.from_config(TINY if small else CONFIG, dtype=torch.bfloat16)
    target = FrozenTarget(model, None, name="random weights")
    ignore_stop_tokens(target)
    return target


# Machine


def ceilings(shape: Shape) -> dict[str, Any]:
    """What the device reaches: a product of bfloat16 matrices, and a copy, which reads and writes."""
    device, size = shape.device, shape.matrix
    one, two = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = seconds_of(device, lambda: one @ two)
    large = torch.empty(size, size, 4, dtype=torch.float32, device=device)
    copy = seconds_of(device, lambda: large.clone())
    reached = {
        "tflops": round(2 * size**3 / product / 1e12, 1),
        "copy_gb_per_second": round(2 * large.nbytes / copy / 1e9),
    }
    return {"hardware": hardware(device), "software": software(), **reached}


def seconds_of(device: torch.device, work: Callable[[], object]) -> float:
    return median_seconds(SimpleNamespace(device=device), work)  # type: ignore[arg-type]


def tests(shape: Shape) -> dict[str, Any]:
    """The tests that need a GPU."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        str(ROOT / "tests"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {
        "exit_code": done.returncode,
        "summary": lines[-1] if lines else done.stderr[-400:],
        "failures": failures,
    }


# Training


def train(shape: Shape) -> dict[str, Any]:
    """Steps of the real trainer; then the parts of one, its kernels, and what the host waits for in it."""
    with trainer_of(shape) as trainer:
        found = trained(trainer)
        found |= {"computed": computed(shape), "parts_ms": parts_of_a_step(trainer, shape)}
        batch, *_ = trainer.get_batch_samples(
            iter(trainer.get_train_dataloader()), 1, trainer.args.device
        )
        trainer.num_tokens = torch.tensor(0)
        count = torch.tensor(shape.rows * shape.length, device=trainer.args.device)
        found["waits"] = waits(lambda: trainer.training_step(trainer.model, dict(batch[0]), count))
        found["kernels"] = kernels(
            lambda: trainer.training_step(trainer.model, dict(batch[0]), count)
        )
    return found


@contextmanager
def trainer_of(shape: Shape, **draft: Any) -> Iterator[DraftTrainer]:
    """The trainer of an EAGLE-3 head, as a recipe makes it; the peak of memory counts from here."""
    device = shape.device
    target = shape.target
    vocabulary = torch.arange(shape.draft_vocab_size, device=device)
    head = build_eagle3(
        target, draft_vocabulary=vocabulary if shape.draft_vocab_size < target.vocab_size else None
    )
    row = {
        "loss_mask": [1] * shape.length,
        "document_ids": [0] * shape.length,
        "position_ids": list(range(shape.length)),
    }
    ids = torch.randint(
        target.vocab_size, (shape.rows, shape.length), generator=torch.Generator().manual_seed(0)
    ).tolist()
    data = Dataset.from_list([{"input_ids": row_ids, **row} for row_ids in ids])
    keys = {
        "learning_rate": 1e-4,
        "bf16": True,
        "max_steps": shape.steps,
        "logging_steps": max(1, shape.steps // 3),
    }
    keys |= {
        "per_device_train_batch_size": shape.rows,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    objective = TrainingTimeTest(head, forward_kl, NUM_STEPS)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        arguments = training_arguments({**keys, **shape.keys, "output_dir": folder})
        compile_layers(shape.keys, target, objective)
        options = {
            "save": save_eagle3,
            **draft,
            **({"optimizer": draft["optimizer"](head)} if "optimizer" in draft else {}),
        }
        try:
            yield DraftTrainer(objective, target, arguments, data, data, **options)
        finally:
            for layer in target.layers:
                vars(layer).pop("forward", None)  # compiled, it would be so for the next part


def trained(trainer: DraftTrainer) -> dict[str, Any]:
    """The last third of its steps: what is compiled and allocated at first is over then."""
    trainer.train()
    last = [entry for entry in trainer.state.log_history if "tokens_per_second" in entry][-1]
    return {name: round(last[name], 4) for name in ("tokens_per_second", "peak_memory_gib", "loss")}


def computed(shape: Shape) -> dict[str, Any]:
    """Of the same step without its target's layers, as bench/memory.py counts it."""
    if shape.small:
        return {}
    draft = eagle3.planned(TARGET, None, {"vocab_size": shape.draft_vocab_size})
    ledger = training_step(
        "eagle3",
        draft.build,
        {"ttt_steps": NUM_STEPS},
        TARGET,
        rows=shape.rows,
        length=shape.length,
    )
    gigabytes = round(ledger.traffic / 1e9, 1)
    return {
        "peak_gib": round(ledger.peak / 2**30, 2),
        "tflop": round(ledger.flops / 1e12, 1),
        "traffic_gb": gigabytes,
    }


def parts_of_a_step(trainer: DraftTrainer, shape: Shape) -> dict[str, float]:
    """Milliseconds: the median of five steps."""
    target, objective, device = trainer.target, trainer.objective, trainer.args.device
    batch = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in batch_of(trainer).items()
    }
    names = ("target", "unroll and loss", "backward", "optimizer")
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(5):
        marks = [now(device)]
        with torch.autocast(device.type, torch.bfloat16):
            with torch.no_grad():
                outputs = objective.read_target(target, batch)
            marks.append(now(device))
            loss, _ = objective(**batch, **outputs)
        marks.append(now(device))
        (loss / (shape.rows * shape.length)).backward()
        marks.append(now(device))
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        marks.append(now(device))
        for name, start, end in zip(names, marks, marks[1:], strict=False):
            times[name].append(end - start)
    return {name: round(1000 * statistics.median(values), 1) for name, values in times.items()}


def batch_of(trainer: DraftTrainer) -> dict[str, Any]:
    rows: Any = trainer.train_dataset
    return collate([dict(row) for row in rows])


def waits(step: Callable[[], object]) -> dict[str, Any]:
    """Operations of one step for which torch says that the host waits for the device, by place."""
    if not torch.cuda.is_available():
        return {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = [
        f"{Path(entry.filename).name}:{entry.lineno}"
        for entry in caught
        if "synchroniz" in str(entry.message)
    ]
    return {place: places.count(place) for place in dict.fromkeys(places)}


def kernels(step: Callable[[], object]) -> list[dict[str, Any]]:
    """The forty that take longest in one step."""
    on_gpu = torch.cuda.is_available()
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    ) as profiled:
        step()
    name = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = sorted(profiled.key_averages(), key=lambda event: getattr(event, name), reverse=True)
    return [
        {"name": event.key[:100], "ms": round(getattr(event, name) / 1000, 2), "calls": event.count}
        for event in events[:40]
    ]


def shapes(shape: Shape) -> dict[str, Any]:
    """One long row; the whole vocabulary; less memory for more computing."""
    whole = shape.target.vocab_size
    others = {
        "one row": replace(shape, rows=1, length=shape.rows * shape.length),
        "whole vocabulary": replace(shape, draft_vocab_size=whole),
        "recomputed": replace(shape, keys={"activation_checkpointing": True}),
    }
    return {name: steps_of(other) for name, other in others.items()}


def steps_of(shape: Shape, **draft: Any) -> dict[str, Any]:
    with trainer_of(shape, **draft) as trainer:
        return trained(trainer)


def variants(shape: Shape) -> dict[str, Any]:
    """The same step: plain, with a CPU's chunks, with Muon, compiled, and with a target in FP8, compiled."""
    found = {"plain": steps_of(shape)}
    sizes = dict(chunked.CHUNK_BYTES)
    chunked.CHUNK_BYTES["cuda"] = chunked.CHUNK_BYTES["cpu"]
    try:
        found["chunks of 16 MiB"] = steps_of(shape)
    finally:
        chunked.CHUNK_BYTES.update(sizes)
    found["Muon"] = steps_of(shape, optimizer=lambda head: MuonAdamW(head, 1e-4))
    backend = {"torch_compile_backend": "aot_eager"} if shape.small else {}
    compiled = replace(shape, keys={"torch_compile": True, **backend})
    found["compiled"] = steps_of(compiled)
    if shape.device.type == "cuda" and find_spec("torchao"):
        from torchao.quantization import quantize_

        quantize_(shape.target.layers, quantization("fp8").quant_type)
        try:
            found["compiled, target in FP8"] = steps_of(compiled)
        finally:
            random_target.cache_clear()
    return found


# Decoding


def decoding(shape: Shape) -> dict[str, Any]:
    """Milliseconds of a step without a draft, and of a round's parts with a chain and a tree, after prompts of some lengths; eager and, of
    chains, compiled; and batches.
    """
    target = shape.target
    head, compiled = (HeadProposer(build_eagle3(target).to(torch.bfloat16)) for _ in range(2))
    compiled.compiled = True
    found: dict[str, Any] = {}
    for length in shape.prompts:
        prompt = torch.randint(
            target.vocab_size, (length,), generator=torch.Generator().manual_seed(1)
        ).tolist()
        given = {"prompt_ids": prompt, "max_new_tokens": 48}
        found[f"{length} tokens"] = {
            "plain": rounds_of(Decoder(target), **given),
            "chain": rounds_of(Decoder(target, head), **given, num_speculative_tokens=K),
            "tree": rounds_of(Decoder(target, head), **given, tree=tree_shape(TreeConfig(**TREE))),
        }
        if shape.device.type == "cuda":
            found[f"{length} tokens"] |= {
                "plain, compiled": rounds_of(Decoder(target, compiled=True), **given),
                "chain, compiled": rounds_of(
                    Decoder(target, compiled, compiled=True), **given, num_speculative_tokens=K
                ),
            }
    prompts = [prompt[: shape.prompts[0]]] * shape.batch
    for name, proposer, k in (("plain", None, 0), ("chain", head, K)):
        decoder = Decoder(target, proposer)
        generations = [
            decoder.generate_all(prompts, max_new_tokens=48, num_speculative_tokens=k)
            for _ in range(2)
        ][-1]
        seconds = sum(each.seconds - each.prefill_seconds for each in generations)
        found[f"batch of {shape.batch}, {name}"] = {
            "tokens_per_second": round(48 * shape.batch / seconds, 1)
        }
    return found


def rounds_of(decoder: Decoder, prompt_ids: list[int], **options: Any) -> dict[str, float]:
    """Medians over the rounds of the second of two generations."""
    rounds = [decoder.generate(prompt_ids, **options).rounds for _ in range(2)][-1]
    draft, verify = (
        [getattr(each, part) for each in rounds] for part in ("draft_seconds", "verify_seconds")
    )
    return {
        "draft_ms": round(1000 * statistics.median(draft), 3),
        "verify_ms": round(1000 * statistics.median(verify), 3),
    }


def generation(shape: Shape) -> dict[str, Any]:
    """Tokens a second that the target answers with, in batches."""
    target, found = shape.target, {}
    with generation_mode(target.model, torch.bfloat16) as model:
        for batch in (shape.batch, 8 * shape.batch):
            prompts = [list(range(10, 42))] * batch
            asked = {"max_new_tokens": 64, "end_ids": (), "seed": 0}
            seconds = median_seconds(
                target, lambda: generate(model, prompts, [0.8] * batch, **asked), repeats=1
            )  # noqa: B023
            found[f"{batch} rows"] = {"tokens_per_second": round(64 * batch / seconds, 1)}
    return found


# From recipe to gate


def pico(shape: Shape) -> dict[str, Any]:
    """A head for the project's own small target, trained, decoded losslessly in float32 and judged by its gate."""
    few = [
        "train.max_steps=4",
        "data.regenerate.num_tokens=600",
        "eval.num_prompts=3",
        "eval.max_new_tokens=8",
        "eval.repeats=1",
    ]
    small = few if shape.small else []
    with tempfile.TemporaryDirectory() as folder:
        seconds = command("train", "recipe=pico/eagle3", f"train.output_dir={folder}/run", *small)
        measuring = command("eval", f"recipe={folder}/run/run/recipe.yaml", *small, failing=True)
        report = json.loads((Path(folder) / "run/report/report.json").read_text(encoding="utf-8"))
    first = report["results"][0]
    numbers = {
        name: round(first[name], 3)
        for name in ("mean_acceptance_length", "speedup")
        if first.get(name)
    }
    return {
        "train_seconds": seconds,
        "eval_seconds": measuring,
        "verdict": report["gate"]["verdict"],
        **numbers,
    }


def command(verb: str, *arguments: str, failing: bool = False, **environment: str) -> float:
    """Seconds of a command of the package. Raises CalledProcessError; not for a gate that fails, where one may."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "specdistill", verb, *arguments],
        env={**os.environ, **environment},
        check=False,
    )
    if done.returncode and not (
        failing and done.returncode in (ExitCode.CHECK_FAILED, ExitCode.INCONCLUSIVE)
    ):
        raise subprocess.CalledProcessError(done.returncode, done.args)
    return round(time.monotonic() - start, 1)


def store(shape: Shape) -> dict[str, Any]:
    """Features of pico written once and read in each step."""
    with tempfile.TemporaryDirectory() as folder:
        stored = [f"hidden_states.path={folder}/features", "hidden_states.mode=hybrid"]
        few = (
            ["data.regenerate.num_tokens=600", "train.max_steps=4"]
            if shape.small
            else ["train.max_steps=60"]
        )
        command("train", "recipe=pico/eagle3", f"train.output_dir={folder}/run", *few, *stored)
        return last_log(Path(folder) / "run")


def last_log(run_folder: Path) -> dict[str, Any]:
    log = json.loads((run_folder / "run" / "history.json").read_text(encoding="utf-8"))["log"]
    last = [entry for entry in log if "tokens_per_second" in entry][-1]
    return {name: round(last[name], 2) for name in ("tokens_per_second", "peak_memory_gib")}


def smollm2(shape: Shape) -> dict[str, Any]:
    """A real instruct model from its package to its gate, on little of everything, where its package is at hand."""
    if not (Path("runs/smollm2/target") / "config.json").is_file():
        return {"skipped": "runs/smollm2/target is not there: make smollm2 needs PyPI once"}
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", "bench.smollm2", "small=true"], check=True)
    return {"wall_seconds": round(time.monotonic() - start, 1)}


def launches(shape: Shape) -> dict[str, Any]:
    """Steps of several GPUs; one that fails is named, and the next ones run."""
    seen = {} if VISIBLE is None else {"CUDA_VISIBLE_DEVICES": VISIBLE}
    environment = {
        **{name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"},
        **seen,
    }
    asked = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    count = int(
        subprocess.run(asked, env=environment, capture_output=True, text=True, check=True).stdout
    )
    if count < 2:
        return {"skipped": f"{count} GPU"}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in LAUNCHES:
            run_folder = Path(folder) / name
            keys = [
                "optimizer=adamw",
                "train.max_steps=60",
                f"train.output_dir={run_folder}",
                f"launch={name}",
            ]
            try:
                command(
                    "train",
                    "recipe=pico/eagle3",
                    *keys,
                    f"num_processes={count}",
                    environment=environment,
                )
                found[name] = last_log(run_folder)
            except subprocess.CalledProcessError as error:
                found[name] = {"failed": f"exit code {error.returncode}"}
    return found


PARTS: dict[str, Callable[[Shape], dict[str, Any]]] = {
    part.__name__: part
    for part in (
        ceilings,
        tests,
        train,
        shapes,
        variants,
        decoding,
        pico,
        store,
        generation,
        smollm2,
        launches,
    )
}


# Page


def page(paths: list[Path]) -> str:
    """The tables of docs/performance.md: a row for each number of each device."""
    rows = list(
        chain.from_iterable(
            rows_of(path.stem, json.loads(path.read_text(encoding="utf-8"))) for path in paths
        )
    )
    return (
        table(("device", "part", "measure", "value"), rows) if rows else "Nothing was measured yet."
    )


def rows_of(device: str, results: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for part, found in results.items():
        for name, value in found.items():
            if name not in ("created", "seconds", "hardware", "software", "kernels", "failures"):
                yield device, part, name, one_line(json.dumps(value).strip('{}"').replace('"', ""))


if __name__ == "__main__":
    sys.exit(run(main, Options))
