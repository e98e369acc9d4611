"""Training here, in its plain form, and in speculators: tokens a second, the parts of a step, peak memory.

    make engines                                   # speculators, in an environment of its own
    python bench/train.py                          # a step of a head and of a block drafter; head and loss alone

writes bench/results/train.json, and from it the tables between two marks of docs/performance.md. The trainers (bench/trainers.py) are
processes whose steps are interleaved, in an order that alternates; a ratio's interval is over the rounds. Target features are given and
random: the draft's step alone is compared, with the same parameters, AdamW and precision on all sides.
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

from bench.engines import environment
from bench.pages import write_between
from specdistill.command import run
from specdistill.errors import ExitCode, ResourceError, UserError
from specdistill.export import export
from specdistill.measurement.hardware import hardware, software
from specdistill.methods.blocks.checkpoint import save as save_block
from specdistill.methods.blocks.method import build as build_block
from specdistill.methods.dflash.method import KIND
from specdistill.methods.eagle3.checkpoint import save_eagle3
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.project import ROOT
from specdistill.recipe.fields import Section, option
from specdistill.report.phrases import size
from specdistill.report.text import table
from specdistill.statistics.intervals import interval
from specdistill.statistics.metrics import Metric, value
from specdistill.targets.batch_generate import fast_dtype
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FILES = {"cpu": "train.json", "cuda": "train_cuda.json"}
RESULTS, PAGE = Path(__file__).with_name("results"), ROOT / "docs" / "performance.md"
# What ours is compared with: its name in tables, its name in bench/trainers.py, and its own settings. speculators' default attention,
# flex_attention, has no backward on a CPU; its eager one would fill a GPU's memory.
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "plain": ("plain form", "ours", {"plainly": True}),
    "sdpa": ("speculators, sdpa", "speculators", {"attention": "sdpa"}),
    "eager": ("speculators, eager", "speculators", {"attention": "eager"}),
    "flex": ("speculators, flex", "speculators", {"attention": None}),
}
HEAD = (
    "trainer",
    "a second",
    "forward, backward, optimizer, ms",
    "peak",
    "ours is faster",
    "ours takes of its memory",
)
SPEED = Metric(("ours", "other"), lambda ours, other: other / ours)  # seconds of all rounds

Compared = dict[str, tuple[str, dict[str, Any]]]  # name -> a trainer and its settings
Steps = dict[str, list[dict[str, float]]]  # name -> what bench/trainers.py says of each step


class Options(Section):
    parts: list[Literal["step", "block", "loss"]] = option(
        ["step", "block", "loss"], "what to measure"
    )
    others: list[Literal["plain", "sdpa", "eager", "flex"]] = option(
        ["plain", "sdpa", "flex" if DEVICE.type == "cuda" else "eager"],
        "what a step is compared with: our plain form, speculators",
    )
    hidden_size: int = option(512, "of target and draft, a multiple of 64", ge=64, multiple_of=64)
    vocab_size: int = option(32_000, "of target and draft", ge=2)
    num_tokens: int = option(2048, "of a step", ge=8)
    row_lengths: list[int] = option(
        [2048, 1024, 512, 256], "the layouts of a step: rows of that many tokens, one document each"
    )
    num_steps: int = option(5, "of the unroll", ge=1)
    trains_head: bool = option(False, "whether the draft's head trains, which speculators freezes")
    block_size: int = option(16, "slots of a block drafter's block", ge=2)
    num_anchors: int = option(128, "blocks of its step, over all rows", ge=1)
    loss_rows: int = option(
        8192, "hidden states of head and loss alone, over all steps of the unroll", ge=8
    )
    loss_steps: int = option(7, "of that unroll", ge=1)
    rounds: int = option(8, "steps of each trainer that are timed", ge=2)
    threads: int = option(2, "of each trainer", ge=1)


def main(options: Options) -> ExitCode:
    path = RESULTS / FILES[DEVICE.type]
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for part in options.parts:
        found = {"step": step, "block": block, "loss": loss}[part](options)
        machine = {
            "cpu": hardware(DEVICE)["name"],
            "threads": options.threads,
            "torch": software()["torch"],
        }
        results[part] = {**machine, "bf16": bf16(), **found}
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    paths = [path for name in FILES.values() if (path := RESULTS / name).exists()]
    shown = "\n\n".join(page(json.loads(path.read_text(encoding="utf-8"))) for path in paths)
    write_between(PAGE, "train", shown)
    print(shown)
    return ExitCode.DONE


def bf16() -> bool:
    return fast_dtype(DEVICE) == torch.bfloat16


def step(options: Options) -> dict[str, Any]:
    """An EAGLE-3 head's step, in each layout of its tokens."""

    def save(target: FrozenTarget, folder: Path) -> None:
        save_eagle3(build_eagle3(target, aux_layers=[0, 1, 2]), folder)

    own = {name: getattr(options, name) for name in ("num_steps", "trains_head")}
    return own | in_layouts(options, "", own, save)


def block(options: Options) -> dict[str, Any]:
    """A DFlash drafter's step, in each layout of its tokens."""
    least = options.block_size + 3
    for length in options.row_lengths:
        if length < least or options.num_anchors * length % options.num_tokens:
            expected = f"{least} tokens or more, in rows that share {options.num_anchors} blocks, num_anchors, evenly"
            raise UserError("row_lengths", got=length, expected=expected)
    own = {name: getattr(options, name) for name in ("block_size", "num_anchors")}

    def save(target: FrozenTarget, folder: Path) -> None:
        shape = {
            "num_layers": 5,
            "aux_layers": [1, 2, 3, 4, 5],
            "block_size": options.block_size,
            "mask_token_id": 0,
        }
        save_block(build_block(KIND, target, **shape), KIND, folder)

    return own | in_layouts(options, "_block", own, save)


def in_layouts(
    options: Options,
    suffix: str,
    own: Mapping[str, Any],
    save: Callable[[FrozenTarget, Path], None],
) -> dict[str, Any]:
    """What a draft's trainers are found to take. suffix: of their names; own: their settings; save: writes a draft for a target."""
    shape = {name: getattr(options, name) for name in ("hidden_size", "vocab_size", "num_tokens")}
    layouts = []
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), options, save)
        for length in options.row_lengths:
            if options.num_tokens % length:
                raise UserError(
                    "row_lengths",
                    got=length,
                    expected=f"a divisor of {options.num_tokens}, num_tokens",
                )
            layout = {"rows": options.num_tokens // length, "length": length}
            shared = {"folder": folder, **layout, **own, "bf16": bf16()}
            compared: Compared = {"ours": (f"ours{suffix}", shared)}
            for name in options.others:
                _, trainer, settings = OTHERS[name]
                compared[name] = f"{trainer}{suffix}", {**shared, **settings}
            steps = interleaved(compared, options.rounds, options.threads)
            layouts.append({**layout, **summary(steps, options.num_tokens)})
    return {**shape, "layouts": layouts}


def loss(options: Options) -> dict[str, Any]:
    """Head and loss alone, in chunks and in their plain form."""
    shape = {"rows": options.loss_rows // options.loss_steps, "num_steps": options.loss_steps}
    shape |= {"hidden_size": options.hidden_size, "vocab_size": options.vocab_size}
    both = {"ours": {**shape, "bf16": bf16()}, "plain": {**shape, "bf16": bf16(), "plainly": True}}
    steps = interleaved(
        {name: ("head_and_loss", own) for name, own in both.items()},
        options.rounds,
        options.threads,
    )
    return {**shape, **summary(steps, shape["rows"] * options.loss_steps)}


def write_models(
    folder: Path, options: Options, save: Callable[[FrozenTarget, Path], None]
) -> None:
    """A target of five layers, and a draft for it in our layout (`draft`) and in speculators' (`head`)."""
    config = LlamaConfig(
        hidden_size=options.hidden_size, intermediate_size=3 * options.hidden_size, num_hidden_layers=5,
        num_attention_heads=options.hidden_size // 64, num_key_value_heads=max(1, options.hidden_size // 256),
        vocab_size=options.vocab_size, max_position_embeddings=2 * max(options.row_lengths), initializer_range=options.hidden_size**-0.5,
        tie_word_embeddings=False,
    )  # fmt: skip
    target = FrozenTarget(LlamaForCausalLM(config), None, name=str(folder))
    target.model.save_pretrained(folder / "target")
    save(target, folder / "draft")
    export(folder / "draft", "speculators", folder / "head", TargetFiles(str(folder / "target")))


def interleaved(compared: Compared, rounds: int, threads: int) -> Steps:
    """A first step of each, and then one per round, interleaved."""
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(process(*kind, threads)) for name, kind in compared.items()
        }
        steps: Steps = {name: [] for name in processes}
        for number in range(1 + rounds):
            for name in list(processes)[:: (-1) ** number]:
                steps[name].append(ask(processes[name], name))
    return steps


@contextmanager
def process(
    name: str, settings: Mapping[str, Any], threads: int
) -> Iterator[subprocess.Popen[str]]:
    """One of bench/trainers.py, in the Python that has its library."""
    python, path = Path(sys.executable), str(ROOT)
    if "speculators" in name:
        python, path = environment("speculators") / "bin" / "python", ""
        if not python.exists():
            got = f"speculators, which is not in {environment('speculators')}"
            raise UserError("others", got=got, expected="[plain], or first make engines")
    # A thread that spins while it waits takes time from the process whose turn it is.
    changed = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": path}
    command = [
        str(python),
        "-P",
        str(Path(__file__).with_name("trainers.py")),
        name,
        json.dumps(settings),
    ]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **changed}, **pipes) as started:
        yield started  # it ends when its stdin is closed


def ask(asked: subprocess.Popen[str], name: str) -> dict[str, float]:
    assert asked.stdin and asked.stdout
    asked.stdin.write("\n")
    asked.stdin.flush()
    if not (answer := asked.stdout.readline()):
        raise ResourceError(f"{name} ended with {asked.wait()}", next_step="its output says why")
    found: dict[str, float] = json.loads(answer)
    return found


def summary(steps: Steps, num_tokens: int) -> dict[str, Any]:
    """Each trainer's medians over the rounds; and against ours, how much faster that is and which part of the memory it takes.

    Memory is the first step's: later ones find memory that earlier ones have not given back.
    """
    trainers: dict[str, dict[str, float]] = {}
    ratios: dict[str, dict[str, Any]] = {}
    for name, (first, *timed) in steps.items():
        own = {
            part: median(taken[part] for taken in timed)
            for part in ("seconds", "forward", "backward", "optimizer")
        }
        trainers[name] = {
            "tokens_per_second": num_tokens / own["seconds"],
            **own,
            "peak": first["peak"],
            "loss": first["loss"],
        }
        if name != "ours":
            pair = {"ours": steps["ours"], "other": steps[name]}
            seconds = {
                side: np.array([taken["seconds"] for taken in own_steps[1:]])
                for side, own_steps in pair.items()
            }
            memory = trainers["ours"]["peak"] / first["peak"]
            ratios[name] = {
                "speed": value(SPEED, seconds),
                "speed_ci95": interval(SPEED, seconds),
                "memory": memory,
            }
    return {"trainers": trainers, "ratios": ratios}


def page(results: Mapping[str, Any]) -> str:
    """What is measured, as tables."""
    sections = []
    for part, title in (("step", "An EAGLE-3 head's step"), ("block", "A DFlash drafter's step")):
        if found := results.get(part):
            sizes = (f"{found[name]:,}" for name in ("hidden_size", "vocab_size", "num_tokens"))
            setup = "Hidden size {}, a vocabulary of {}, {} tokens".format(*sizes)
            rows = [
                row
                for each in found["layouts"]
                for row in step_rows(each, f"{each['rows']} × {each['length']:,}")
            ]
            sections += [
                f"### {title}",
                f"{setup}, {own_setup(found)}. {measured_on(found)}",
                table(("rows", *HEAD), rows),
            ]
    if found := results.get("loss"):
        setup = f"{found['num_steps']} × {found['rows']:,} hidden states of {found['hidden_size']}, a vocabulary of {found['vocab_size']:,}"
        sections += [
            "### Head and loss alone",
            f"{setup}, forward KL; the head trains. {measured_on(found)}",
        ]
        sections.append(
            table(
                ("hidden states", *HEAD),
                step_rows(found, f"{found['num_steps']} × {found['rows']:,}"),
            )
        )
    return "\n\n".join(sections)


def own_setup(found: Mapping[str, Any]) -> str:
    if "num_anchors" in found:
        return f"{found['num_anchors']} blocks of {found['block_size']}; the draft has five layers and the target's head"
    return f"{found['num_steps']} steps of the unroll; the draft's head {'trains' if found['trains_head'] else 'is frozen'}"


def step_rows(found: Mapping[str, Any], layout: str) -> Iterator[tuple[str, ...]]:
    for name, own in found["trainers"].items():
        times = ", ".join(
            f"{1000 * own[part]:,.0f}" for part in ("forward", "backward", "optimizer")
        )
        ratio, shown = found["ratios"].get(name), OTHERS[name][0] if name in OTHERS else name
        against = (
            (f"{ratio['speed']:.2f}×{ends(ratio['speed_ci95'], '.2f')}", f"{ratio['memory']:.0%}")
            if ratio
            else ("", "")
        )
        yield (
            layout,
            shown,
            f"{own['tokens_per_second']:,.0f}",
            times,
            size(int(own["peak"])),
            *against,
        )


def ends(bounds: list[float] | None, spec: str) -> str:
    return f" ({bounds[0]:{spec}} to {bounds[1]:{spec}})" if bounds else ""


def measured_on(found: Mapping[str, Any]) -> str:
    return f"{found['cpu']}, {found['threads']} threads, {'bfloat16' if found['bf16'] else 'float32'}, torch {found['torch']}."


if __name__ == "__main__":
    sys.exit(run(main, Options))
