"""Compare a training step here with its plain form and with speculators.

It measures tokens per second, the parts of a step, and peak memory.

    make engines  # speculators, in an environment of its own
    python bench/train.py  # a step of a head and of a block drafter; head and loss alone

writes bench/results/train.json, and from it the tables between two marks of docs/performance.md.
Each trainer (bench/trainers.py) is a process. The steps of all trainers are interleaved, in an
order that alternates, and the interval of a ratio is over the rounds. Target features are given and
random. So only the draft's step is compared, with the same parameters, AdamW and precision on all
sides.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.engines import find_environment
from bench.pages import write_between
from specdistill.cli.command import run
from specdistill.common.errors import ExitCode, ResourceError, UserError
from specdistill.common.project import ROOT
from specdistill.evaluation.measurement.hardware import describe_hardware, list_software
from specdistill.evaluation.report.phrases import format_size
from specdistill.evaluation.report.text import format_table
from specdistill.evaluation.statistics.intervals import compute_interval
from specdistill.evaluation.statistics.metrics import Metric, compute_value
from specdistill.methods.blocks.checkpoint import save_block
from specdistill.methods.blocks.module import build_block_draft
from specdistill.methods.dflash.method import KIND
from specdistill.methods.eagle3.checkpoint import save_eagle3
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.recipe.fields import Section, option
from specdistill.serving.export import export
from specdistill.targets.batch_generate import choose_fast_dtype
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget

# Everything is compared on the CPU.
DEVICE = torch.device("cpu")
RESULTS = Path(__file__).with_name("results") / "train.json"
PAGE = ROOT / "docs" / "performance.md"
# The trainers that ours is compared with. For each trainer: its name in tables, its name in
# bench/trainers.py, and settings of its own. The default attention of speculators, flex_attention,
# has no backward on a CPU.
OTHER_TRAINERS: dict[str, tuple[str, str, dict[str, object]]] = {
    "plain": ("plain form", "ours", {"plainly": True}),
    "sdpa": ("speculators, sdpa", "speculators", {"attention": "sdpa"}),
    "eager": ("speculators, eager", "speculators", {"attention": "eager"}),
}
HEAD = (
    "trainer",
    "a second",
    "forward, backward, optimizer, ms",
    "peak",
    "ours is faster",
    "ours takes of its memory",
)
# How many times faster ours is: the seconds of the other trainer, divided by ours.
SPEED = Metric(("ours", "other"), lambda own_seconds, other_seconds: other_seconds / own_seconds)

Settings = Mapping[str, object]  # the settings of a trainer, as JSON
Compared = dict[str, tuple[str, Settings]]  # by name: a trainer of bench/trainers.py, its settings
Steps = dict[str, list[dict[str, float]]]  # by name: the numbers of each step of a trainer
# The numbers and sizes of one part of the JSON, or of one layout of it.
Measurement = Mapping[str, Any]


class Options(Section):
    """The options of this script."""

    others: list[Literal["plain", "sdpa", "eager"]] = option(
        ["plain", "sdpa", "eager"],
        "trainers to compare ours with. plain: ours without optimized attention and loss; sdpa,"
        " eager: speculators with this attention",
    )
    hidden_size: int = option(
        512, "hidden size of target and draft, a multiple of 64", ge=64, multiple_of=64
    )
    vocab_size: int = option(32_000, "tokens of the vocabulary of target and draft", ge=2)
    num_tokens: int = option(2048, "tokens of a training step", ge=8)
    row_lengths: list[int] = option(
        [2048, 1024, 512, 256],
        "tokens of each row; every length in the list is measured, with num_tokens tokens per step",
    )
    num_steps: int = option(5, "steps of the unroll of the EAGLE-3 head", ge=1)
    block_size: int = option(16, "positions of each block of the block drafter", ge=2)
    num_anchors: int = option(
        128, "blocks in a training step of the block drafter, over all rows", ge=1
    )
    loss_rows: int = option(
        8192,
        "hidden states in the measurement of LM head and loss alone, over all steps of the unroll",
        ge=8,
    )
    loss_steps: int = option(
        7, "steps of the unroll in the measurement of LM head and loss alone", ge=1
    )
    rounds: int = option(8, "training steps of each trainer to time", ge=2)
    threads: int = option(2, "CPU threads of each trainer", ge=1)


def main(options: Options) -> ExitCode:
    """Compare training steps of our trainer with those of other trainers.

    The steps are those of an EAGLE-3 head, of a block drafter, and of LM head and loss alone. Then
    write the results as JSON, and their tables in docs/performance.md.
    """
    results: dict[str, Measurement] = {}

    # Write the results after each part, so that a killed run keeps them.
    for part, measure in (("step", measure_step), ("block", measure_block), ("loss", measure_loss)):
        measurement = measure(options)
        machine = {
            "cpu": describe_hardware(DEVICE)["name"],
            "threads": options.threads,
            "torch": list_software()["torch"],
        }
        results[part] = {**machine, "bf16": uses_bf16(), **measurement}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text = format_page(results)
    write_between(PAGE, "train", text)
    print(text)
    return ExitCode.DONE


def uses_bf16() -> bool:
    """Return whether this CPU trains in bfloat16."""
    return choose_fast_dtype(DEVICE) == torch.bfloat16


def measure_step(options: Options) -> Measurement:
    """Measure a training step of an EAGLE-3 head, for each row length in the options."""

    def save(target: FrozenTarget, folder: Path) -> None:
        """Write a fresh head that reads the target's hidden states after layers 0, 1 and 2."""
        save_eagle3(build_eagle3(target, aux_layers=[0, 1, 2]), folder)

    trainer_settings = {"num_steps": options.num_steps}
    measured = measure_layouts(options, suffix="", trainer_settings=trainer_settings, save=save)
    return {**trainer_settings, **measured}


def measure_block(options: Options) -> Measurement:
    """Measure a training step of a DFlash drafter, for each row length in the options."""
    trainer_settings = {name: getattr(options, name) for name in ("block_size", "num_anchors")}

    def save(target: FrozenTarget, folder: Path) -> None:
        """Write a fresh drafter of five layers that reads the outputs of all five target layers.

        Any token can serve as the mask token, because the data are random.
        """
        shape = {
            "num_layers": 5,
            "aux_layers": [1, 2, 3, 4, 5],
            "block_size": options.block_size,
            "mask_token_id": 0,
        }
        save_block(build_block_draft(KIND, target, **shape), KIND, folder)

    return {**trainer_settings, **measure_layouts(options, "_block", trainer_settings, save)}


def measure_layouts(
    options: Options,
    suffix: str,
    trainer_settings: Settings,
    save: Callable[[FrozenTarget, Path], None],
) -> dict[str, object]:
    """Compare our trainer of a draft with other trainers, for each row length in the options.

    A layout is a number of rows and their length. All layouts have the same number of tokens.

    Args:
        options: the options.
        suffix: what the names of these trainers end with in bench/trainers.py: `_block` for block
            drafters, nothing for heads.
        trainer_settings: settings that all trainers share.
        save: writes a fresh draft for a target into a folder.

    Returns:
        The sizes, and in `layouts` the measured numbers for each layout.
    """
    shape = {name: getattr(options, name) for name in ("hidden_size", "vocab_size", "num_tokens")}
    layouts = []
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), options, save)

        # Run our trainer and the other trainers on each layout, in turns.
        for length in options.row_lengths:
            layout = {"rows": options.num_tokens // length, "length": length}
            shared = {"folder": folder, **layout, **trainer_settings, "bf16": uses_bf16()}
            compared: Compared = {"ours": (f"ours{suffix}", shared)}
            for name in options.others:
                _, trainer, settings = OTHER_TRAINERS[name]
                compared[name] = f"{trainer}{suffix}", {**shared, **settings}
            steps = run_interleaved(compared, options.rounds, options.threads)
            layouts.append({**layout, **summarize_steps(steps, options.num_tokens)})
    return {**shape, "layouts": layouts}


def measure_loss(options: Options) -> Measurement:
    """Measure the LM head and the loss alone, without the layers of a draft.

    Two forms of the same loss are compared: `ours` computes the logits in chunks, to save memory,
    and `plain` computes all logits at once.
    """
    shape = {
        "rows": options.loss_rows // options.loss_steps,
        "num_steps": options.loss_steps,
        "hidden_size": options.hidden_size,
        "vocab_size": options.vocab_size,
    }
    settings = {**shape, "bf16": uses_bf16()}
    compared: Compared = {
        "ours": ("head_and_loss", settings),
        "plain": ("head_and_loss", {**settings, "plainly": True}),
    }
    steps = run_interleaved(compared, options.rounds, options.threads)
    return {**shape, **summarize_steps(steps, shape["rows"] * options.loss_steps)}


def write_models(
    folder: Path, options: Options, save: Callable[[FrozenTarget, Path], None]
) -> None:
    """Write the models that all trainers load: a small target with random weights, and a draft.

    The target goes to the subfolder `target`. The draft is written twice: to `draft` in our format,
    and to `head` in the format of speculators.

    Args:
        folder: the folder to write to.
        options: the options, with the sizes.
        save: writes a fresh draft for a target into a folder.
    """
    # Attention heads have size 64, and four query heads share a key and value head. With this
    # initializer_range, outputs are about equally large for every hidden size, so that losses stay
    # comparable.
    config = LlamaConfig(
        hidden_size=options.hidden_size, intermediate_size=3 * options.hidden_size,
        num_hidden_layers=5,
        num_attention_heads=options.hidden_size // 64,
        num_key_value_heads=max(1, options.hidden_size // 256),
        vocab_size=options.vocab_size, max_position_embeddings=2 * max(options.row_lengths),
        initializer_range=options.hidden_size**-0.5,
        tie_word_embeddings=False,
    )  # fmt: skip
    target = FrozenTarget(LlamaForCausalLM(config), None, name=str(folder))
    target.model.save_pretrained(folder / "target")
    save(target, folder / "draft")
    export(folder / "draft", "speculators", folder / "head", TargetFiles(str(folder / "target")))


def run_interleaved(compared: Compared, rounds: int, threads: int) -> Steps:
    """Run the trainers in turns: in every round each trainer takes one training step.

    So a slow minute of the machine affects all trainers alike.

    Args:
        compared: the trainers, by the name under which they are compared.
        rounds: the number of rounds after a first one, which warms up.
        threads: threads of each trainer.

    Returns:
        For each trainer, the numbers of each of its steps, including the first.
    """
    with ExitStack() as stack:
        # Start one process for each trainer. Each waits for its turn.
        processes = {
            name: stack.enter_context(start_trainer(trainer, settings, threads))
            for name, (trainer, settings) in compared.items()
        }
        steps: Steps = {name: [] for name in processes}

        # Reverse the order in every second round, so that no trainer always runs after the same
        # other trainer.
        for number in range(1 + rounds):
            names = list(processes)
            if number % 2:
                names.reverse()
            for name in names:
                steps[name].append(request_step(processes[name], name))
    return steps


@contextmanager
def start_trainer(name: str, settings: Settings, threads: int) -> Iterator[subprocess.Popen[str]]:
    """Start a trainer of bench/trainers.py in a process of its own.

    The trainers of speculators run in the Python environment of speculators, all others with the
    Python that runs this script.

    Args:
        name: the name of the trainer.
        settings: its settings.
        threads: its threads.

    Yields:
        The process, which ends when its stdin is closed.

    Raises:
        UserError: if the trainer needs speculators, which is not set up.
    """
    # Choose the Python. For that of speculators PYTHONPATH is empty, so it does not see this
    # checkout.
    python = Path(sys.executable)
    python_path = str(ROOT)
    if "speculators" in name:
        python = find_environment("speculators") / "bin" / "python"
        python_path = ""
        if not python.exists():
            raise UserError(
                "others",
                got=f"speculators, which is not installed in {find_environment('speculators')}",
                text=f"others: speculators is not installed in {find_environment('speculators')}."
                " Run `make engines` first, or pass others=[plain].",
            )
    # Let idle OpenMP threads sleep. By default they spin, and would slow down the trainer whose
    # turn it is.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": python_path,
    }

    # The trainer takes a step for each line on its stdin.
    script = Path(__file__).with_name("trainers.py")
    command = [str(python), "-P", str(script), name, json.dumps(settings)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


def request_step(process: subprocess.Popen[str], name: str) -> dict[str, float]:
    """Let a trainer take one training step, and return its numbers, such as `seconds` and `loss`.

    Args:
        process: the trainer, which waits for lines on its stdin.
        name: the name of the trainer, for errors.

    Raises:
        ResourceError: if the process has ended.
    """
    assert process.stdin and process.stdout

    # An empty line asks for a step. The answer is one line of JSON.
    process.stdin.write("\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise ResourceError(
            f"the process of trainer {name} ended with exit code {process.wait()}",
            next_step="read the output of the process above",
        )
    numbers: dict[str, float] = json.loads(answer)
    return numbers


def summarize_steps(steps: Steps, num_tokens: int) -> dict[str, object]:
    """Summarize the steps of all trainers, and compare our trainer with each of the others.

    The peak memory is taken from the first step. Later steps reuse memory that the process has not
    given back, so their peaks would be too small.

    Args:
        steps: the numbers of each step of each trainer, the first step included.
        num_tokens: tokens of a step.

    Returns:
        `trainers`, with the medians of each trainer; `ratios`, with how many times faster ours is
        (`speed` and its confidence interval) and the share of the other trainer's memory that ours
        takes (`memory`).
    """
    trainers: dict[str, dict[str, float]] = {}
    ratios: dict[str, dict[str, object]] = {}
    for name, (first, *timed) in steps.items():
        # Compute the medians over all steps but the first, which only warms up.
        medians = {}
        for part in ("seconds", "forward", "backward", "optimizer"):
            medians[part] = median(numbers[part] for numbers in timed)
        trainers[name] = {
            "tokens_per_second": num_tokens / medians["seconds"],
            **medians,
            "peak": first["peak"],
            "loss": first["loss"],
        }

        # Compare ours with this trainer: the seconds of each round but the first give the speed and
        # its interval.
        if name != "ours":
            seconds = {}
            for side, side_steps in {"ours": steps["ours"], "other": steps[name]}.items():
                seconds[side] = np.array([numbers["seconds"] for numbers in side_steps[1:]])
            memory = trainers["ours"]["peak"] / first["peak"]
            ratios[name] = {
                "speed": compute_value(SPEED, seconds),
                "speed_ci95": compute_interval(SPEED, seconds),
                "memory": memory,
            }
    return {"trainers": trainers, "ratios": ratios}


def format_page(results: Mapping[str, Measurement]) -> str:
    """Return the results as Markdown: a section with a table for each kind of measurement."""
    sections = []
    # One section for each kind of draft, with a row for each layout and trainer.
    for part, title in (("step", "An EAGLE-3 head's step"), ("block", "A DFlash drafter's step")):
        measurement = results.get(part)
        if measurement:
            rows: list[tuple[str, ...]] = []
            for layout in measurement["layouts"]:
                rows.extend(list_step_rows(layout, f"{layout['rows']} × {layout['length']:,}"))
            setup = (
                f"Hidden size {measurement['hidden_size']:,}, a vocabulary of"
                f" {measurement['vocab_size']:,}, {measurement['num_tokens']:,} tokens"
            )
            sections += [
                f"### {title}",
                f"{setup}, {describe_setup(measurement)}. {describe_machine(measurement)}",
                format_table(("rows", *HEAD), rows),
            ]

    # The section of head and loss alone.
    measurement = results.get("loss")
    if measurement:
        states = f"{measurement['num_steps']} × {measurement['rows']:,}"
        setup = (
            f"LM head and forward KL for {measurement['num_steps']} draft steps ×"
            f" {measurement['rows']:,} hidden states of size {measurement['hidden_size']},"
            f" a vocabulary of {measurement['vocab_size']:,}"
        )
        sections += [
            "### Head and loss alone",
            f"{setup}; the LM head trains. {describe_machine(measurement)}",
            format_table(("hidden states", *HEAD), list_step_rows(measurement, states)),
        ]
    return "\n\n".join(sections)


def describe_setup(measurement: Measurement) -> str:
    """Return a phrase that says what a training step consists of.

    The phrase describes the blocks of a block drafter, or the unroll of a head.
    """
    if "num_anchors" in measurement:
        return (
            f"{measurement['num_anchors']} blocks of {measurement['block_size']} positions; the"
            " DFlash drafter has five layers and the target's LM head"
        )
    return (
        f"an EAGLE-3 head trained on {measurement['num_steps']} draft steps in a row, its LM head"
        " frozen"
    )


def list_step_rows(measurement: Measurement, layout: str) -> Iterator[tuple[str, ...]]:
    """Yield the table row of each trainer: speed, times and memory, and how ours compares.

    Args:
        measurement: the summary of the trainers' steps.
        layout: the text of the first column, such as `4 × 512`.
    """
    for name, numbers in measurement["trainers"].items():
        times = ", ".join(
            f"{1000 * numbers[part]:,.0f}" for part in ("forward", "backward", "optimizer")
        )

        # Our own trainer has no ratio, so its two last cells stay empty.
        speed = ""
        memory = ""
        ratio = measurement["ratios"].get(name)
        if ratio:
            speed = f"{ratio['speed']:.2f}×{format_bounds(ratio['speed_ci95'], '.2f')}"
            memory = f"{ratio['memory']:.0%}"
        yield (
            layout,
            OTHER_TRAINERS[name][0] if name in OTHER_TRAINERS else name,
            f"{numbers['tokens_per_second']:,.0f}",
            times,
            format_size(int(numbers["peak"])),
            speed,
            memory,
        )


def format_bounds(bounds: list[float] | None, spec: str) -> str:
    """Format an interval as ` (1.20 to 1.35)`; return an empty text if there is none.

    Args:
        bounds: the lower and the upper end; None for no interval.
        spec: the format of a number, such as `.2f`.
    """
    return f" ({bounds[0]:{spec}} to {bounds[1]:{spec}})" if bounds else ""


def describe_machine(measurement: Measurement) -> str:
    """Return a sentence that names the CPU, its threads, the dtype and the version of torch."""
    dtype = "bfloat16" if measurement["bf16"] else "float32"
    return (
        f"{measurement['cpu']}, {measurement['threads']} threads, {dtype},"
        f" torch {measurement['torch']}."
    )


if __name__ == "__main__":
    sys.exit(run(main, Options))
