"""Training here, in its plain form, and in speculators: tokens a second, the parts of a step, peak memory; and what the heads accept.

    make engines                                   # speculators, in an environment of its own
    python bench/train.py                          # a draft's step; head and loss alone
    python bench/train.py parts=[acceptance]       # a head of each, trained equally long on the same rows

writes bench/results/train.json, and from it the tables between two marks of docs/performance.md. The trainers (bench/trainers.py) are
processes that take a step by turns, in an order that alternates; a ratio's interval is over the rounds. Target features are given and
random: the draft's step alone is compared, with the same parameters, AdamW and precision on all sides.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from bench.engines import environment
from specdistill.command import run
from specdistill.data.batch_generate import fast_dtype
from specdistill.data.training_data import training_data
from specdistill.engines.limits import engine_aux_layers
from specdistill.errors import ExitCode, ResourceError, UserError
from specdistill.export import export
from specdistill.measurement.hardware import hardware, software
from specdistill.methods.eagle3.checkpoint import save_eagle3
from specdistill.methods.eagle3.module import build_eagle3
from specdistill.methods.recipe import Recipe
from specdistill.project import ROOT
from specdistill.recipe.fields import Section, option
from specdistill.recipe.load import load_recipe
from specdistill.report.files import read_report
from specdistill.report.phrases import duration, size
from specdistill.report.text import table, write_between
from specdistill.repositories import resolve
from specdistill.statistics.intervals import interval, relative_change
from specdistill.statistics.metrics import METRICS, Metric, prompt_sums, value
from specdistill.targets.files import TargetFiles
from specdistill.targets.frozen import FrozenTarget
from specdistill.training.history import read_history

RESULTS, PAGE = Path(__file__).with_name("results") / "train.json", ROOT / "docs" / "performance.md"
# What ours is compared with: its name in tables, its name in bench/trainers.py, and its own settings. speculators' default attention,
# flex_attention, has no backward on a CPU.
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "plain": ("plain form", "ours", {"plainly": True}),
    "sdpa": ("speculators, sdpa", "speculators", {"attention": "sdpa"}),
    "eager": ("speculators, eager", "speculators", {"attention": "eager"}),
}
HEAD = ("trainer", "a second", "forward, backward, optimizer, ms", "peak", "ours is faster", "ours takes of its memory")
SPEED = Metric(("ours", "other"), lambda ours, other: other / ours)  # seconds of all rounds

Compared = dict[str, tuple[str, dict[str, Any]]]  # name -> a trainer and its settings
Steps = dict[str, list[dict[str, float]]]  # name -> what bench/trainers.py says of each step


class Options(Section):
    parts: list[Literal["step", "loss", "acceptance"]] = option(["step", "loss"], "what to measure")
    others: list[Literal["plain", "sdpa", "eager"]] = option(
        [*OTHERS], "what a step is compared with: our plain form, speculators"
    )
    hidden_size: int = option(512, "of target and draft, a multiple of 64", ge=64, multiple_of=64)
    vocab_size: int = option(32_000, "of target and draft", ge=2)
    num_tokens: int = option(2048, "of a step", ge=8)
    row_lengths: list[int] = option([2048, 1024, 512, 256], "the layouts of a step: rows of so many tokens, one document each")
    num_steps: int = option(5, "of the unroll", ge=1)
    trains_head: bool = option(False, "whether the draft's head trains, which speculators freezes")
    loss_rows: int = option(8192, "hidden states of head and loss alone, over all steps of the unroll", ge=8)
    loss_steps: int = option(7, "of that unroll", ge=1)
    rounds: int = option(8, "steps of each trainer that are timed", ge=2)
    threads: int = option(2, "of each trainer", ge=1)
    recipe: str = option("pico/eagle3", "how our head is trained")
    keys: list[str] = option([], "keys that are changed in the recipe, as train.max_steps=50")
    learning_rates: list[float] = option([1e-3, 5e-3, 2e-2], "of speculators, the first is its default; the best head counts")
    packed_lengths: list[int] = option([512, 2048], "of speculators' packed row, tokens")
    num_speculative_tokens: int = option(3, "K of the decoding", ge=1)
    output_dir: str = option("runs/train", "folder of the trained heads and their comparison; must not exist")


def main(options: Options) -> ExitCode:
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for part in options.parts:
        found = {"step": step, "loss": loss, "acceptance": acceptance}[part](options)
        machine = {"cpu": hardware(torch.device("cpu"))["cpu"], "threads": options.threads, "torch": software()["torch"]}
        results[part] = {**machine, "bf16": bf16(), **found}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    shown = page(results)
    write_between(PAGE, "train", shown)
    print(shown)
    return ExitCode.DONE


def bf16() -> bool:
    return fast_dtype(torch.device("cpu")) == torch.bfloat16


def step(options: Options) -> dict[str, Any]:
    """A draft's step, in each layout of its tokens."""
    shape = {name: getattr(options, name) for name in ("hidden_size", "vocab_size", "num_tokens", "num_steps", "trains_head")}
    layouts = []
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), options)
        for length in options.row_lengths:
            if options.num_tokens % length:
                raise UserError("row_lengths", got=length, expected=f"a divisor of {options.num_tokens}, num_tokens")
            layout = {"rows": options.num_tokens // length, "length": length}
            shared = {
                "folder": folder,
                **layout,
                "num_steps": options.num_steps,
                "trains_head": options.trains_head,
                "bf16": bf16(),
            }
            compared: Compared = {"ours": ("ours", shared)}
            compared |= {name: (OTHERS[name][1], {**shared, **OTHERS[name][2]}) for name in options.others}
            steps = by_turns(compared, options.rounds, options.threads)
            layouts.append({**layout, **summary(steps, options.num_tokens)})
    return {**shape, "layouts": layouts}


def loss(options: Options) -> dict[str, Any]:
    """Head and loss alone, in chunks and in their plain form."""
    shape = {"rows": options.loss_rows // options.loss_steps, "num_steps": options.loss_steps}
    shape |= {"hidden_size": options.hidden_size, "vocab_size": options.vocab_size}
    both = {"ours": {**shape, "bf16": bf16()}, "plain": {**shape, "bf16": bf16(), "plainly": True}}
    steps = by_turns({name: ("head_and_loss", own) for name, own in both.items()}, options.rounds, options.threads)
    return {**shape, **summary(steps, shape["rows"] * options.loss_steps)}


def write_models(folder: Path, options: Options) -> None:
    """A target of two layers, and a head for it in our layout (`draft`) and in speculators' (`head`)."""
    config = LlamaConfig(
        hidden_size=options.hidden_size, intermediate_size=3 * options.hidden_size, num_hidden_layers=2,
        num_attention_heads=options.hidden_size // 64, num_key_value_heads=max(1, options.hidden_size // 256),
        vocab_size=options.vocab_size, max_position_embeddings=2 * max(options.row_lengths), initializer_range=options.hidden_size**-0.5,
        tie_word_embeddings=False,
    )  # fmt: skip
    target = FrozenTarget(LlamaForCausalLM(config), None, name=str(folder))
    target.model.save_pretrained(folder / "target")
    save_eagle3(build_eagle3(target, aux_layers=[0, 1, 2]), folder / "draft")
    export(folder / "draft", "speculators", folder / "head", TargetFiles(str(folder / "target")))


def by_turns(compared: Compared, rounds: int, threads: int) -> Steps:
    """A first step of each, and then one a round."""
    with ExitStack() as stack:
        processes = {name: stack.enter_context(process(*kind, threads)) for name, kind in compared.items()}
        steps: Steps = {name: [] for name in processes}
        for number in range(1 + rounds):
            for name in list(processes)[:: (-1) ** number]:
                steps[name].append(ask(processes[name], name))
    return steps


@contextmanager
def process(name: str, settings: Mapping[str, Any], threads: int) -> Iterator[subprocess.Popen[str]]:
    """One of bench/trainers.py, in the Python that has its library."""
    python, path = Path(sys.executable), str(ROOT)
    if "speculators" in name:
        python, path = environment("speculators") / "bin" / "python", ""
        if not python.exists():
            raise UserError(
                "others",
                got=f"speculators, which is not in {environment('speculators')}",
                expected="[plain], or first make engines",
            )
    # A thread that spins while it waits takes time from the process whose turn it is.
    changed = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": path}
    command = [str(python), "-P", str(Path(__file__).with_name("trainers.py")), name, json.dumps(settings)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **changed}, **pipes) as started:
        yield started  # it ends when its stdin is closed


def ask(asked: subprocess.Popen[str], name: str) -> dict[str, float]:
    assert asked.stdin and asked.stdout
    asked.stdin.write("\n")
    asked.stdin.flush()
    if not (answer := asked.stdout.readline()):
        raise ResourceError(f"{name} ended with {asked.wait()}", next_step="what it printed says why")
    found: dict[str, float] = json.loads(answer)
    return found


def summary(steps: Steps, num_tokens: int) -> dict[str, Any]:
    """Each trainer's medians over the rounds; and against ours, how much faster that is and which part of the memory it takes.

    Memory is the first step's: later ones find memory that earlier ones have not given back.
    """
    trainers: dict[str, dict[str, float]] = {}
    ratios: dict[str, dict[str, Any]] = {}
    for name, (first, *timed) in steps.items():
        own = {part: median(taken[part] for taken in timed) for part in ("seconds", "forward", "backward", "optimizer")}
        trainers[name] = {"tokens_per_second": num_tokens / own["seconds"], **own, "peak": first["peak"], "loss": first["loss"]}
        if name != "ours":
            pair = {"ours": steps["ours"], "other": steps[name]}
            seconds = {side: np.array([taken["seconds"] for taken in own_steps[1:]]) for side, own_steps in pair.items()}
            memory = trainers["ours"]["peak"] / first["peak"]
            ratios[name] = {"speed": value(SPEED, seconds), "speed_ci95": interval(SPEED, seconds), "memory": memory}
    return {"trainers": trainers, "ratios": ratios}


def acceptance(options: Options) -> dict[str, Any]:
    """Our recipe, from stored features; then speculators for as many seconds on the same rows, with each of its settings. All heads are
    decoded in one paired run.
    """
    folder = Path(options.output_dir)
    keys = [f"recipe={options.recipe}", *options.keys, f"train.output_dir={folder / 'ours'}"]
    stored = ["hidden_states.mode=hybrid", f"hidden_states.path={folder / 'store'}", "hidden_states.dtype=float32"]
    specdistill("data", "features", *keys, *stored, threads=options.threads)  # as speculators is given them
    specdistill("train", *keys, *stored, threads=options.threads)
    heads, runs = {"ours": folder / "ours" / "draft"}, {}
    history = read_history(heads["ours"], key="output_dir")
    assert history and history.seconds
    recipe: Any = load_recipe(Recipe, keys)
    features = write_features(recipe, folder / "features.safetensors")
    shared = {"target": resolve(recipe.target.model), "data": str(features), "seconds": history.seconds, "bf16": bf16()}
    for rate, length in product(options.learning_rates, options.packed_lengths):
        name = f"speculators-{rate:g}-{length}"
        heads[name], own = folder / name, {"learning_rate": rate, "length": length}
        with process("train_speculators", {**shared, **own, "output": str(heads[name])}, options.threads) as trainer:
            runs[name] = {**own, **ask(trainer, name)}
    features.unlink()
    decoding = [f"target={recipe.target.model}", f"suite={recipe.eval.suite}", f"output_dir={folder / 'comparison'}"]
    decoding += [f"drafts=[{','.join(map(str, heads.values()))}]", f"num_speculative_tokens={options.num_speculative_tokens}"]
    specdistill("compare", *decoding, threads=options.threads)
    asked = {"recipe": options.recipe, "keys": options.keys, "num_speculative_tokens": options.num_speculative_tokens}
    took = {"seconds": history.seconds, "steps": history.steps, "speculators": runs}
    return {**asked, **took, **accepted(folder / "comparison", list(heads))}


def specdistill(verb: str, *arguments: str, threads: int) -> None:
    command = [sys.executable, "-m", "specdistill", verb, *arguments]
    if code := subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, check=False).returncode:
        raise ResourceError(f"specdistill {verb} ended with {code}", next_step="what it printed says why")


def write_features(recipe: Any, path: Path) -> Path:
    """The recipe's training rows, with the states of its target that speculators' default head reads, the last before the final norm."""
    target = FrozenTarget.load(**vars(recipe.target))
    rows, _ = training_data(recipe.data, target.tokenizer, target.model, fingerprint=target.identity.weights)
    columns: Any = {name: column.long() for name, column in rows.with_format("torch")[:].items()}
    layers, found = [*engine_aux_layers(target.num_layers), target.num_layers], []
    with torch.inference_mode():
        for ids, positions in zip(columns["input_ids"].split(8), columns["position_ids"].split(8), strict=True):
            found.append([state.bfloat16() for state in target.features(ids, layers, position_ids_BT=positions).aux])
    *aux, last = (torch.cat(states) for states in zip(*found, strict=True))
    states = {"hidden_states": torch.cat(aux, dim=-1), "verifier_last_hidden_states": last}
    tokens = {
        "input_ids": columns["input_ids"],
        "loss_mask": columns["loss_mask"].bool(),
        "document_ids": columns["document_ids"],
    }
    save_file({**states, **tokens}, path)
    return path


def accepted(folder: Path, heads: list[str]) -> dict[str, Any]:
    """The acceptance length of each head of a comparison, and how much longer the first's is than the best of the others."""
    names = [
        candidate["name"] for candidate in json.loads((folder / "comparison.json").read_text(encoding="utf-8"))["candidates"]
    ]
    metric = METRICS["mean_acceptance_length"]
    sums = {head: prompt_sums(read_report(folder / name)[1]) for head, name in zip(heads, names, strict=True)}
    lengths = {head: {"length": value(metric, own), "ci95": interval(metric, own)} for head, own in sums.items()}
    best = max(heads[1:], key=lambda head: lengths[head]["length"] or 0.0)
    longer, longer_ci95 = relative_change(metric, sums[heads[0]], sums[best])
    return {"lengths": lengths, "best": best, "longer": longer, "longer_ci95": longer_ci95}


def page(results: Mapping[str, Any]) -> str:
    """What is measured, as tables."""
    sections = []
    if found := results.get("step"):
        said = (
            f"Hidden size {found['hidden_size']}, a vocabulary of {found['vocab_size']:,}, {found['num_tokens']:,} tokens, "
            f"{found['num_steps']} steps of the unroll; the draft's head {'trains' if found['trains_head'] else 'is frozen'}"
        )
        rows = [row for each in found["layouts"] for row in step_rows(each, f"{each['rows']} × {each['length']:,}")]
        sections += ["### A draft's step", f"{said}. {measured_on(found)}", table(("rows", *HEAD), rows)]
    if found := results.get("loss"):
        said = f"{found['num_steps']} × {found['rows']:,} hidden states of {found['hidden_size']}, a vocabulary of {found['vocab_size']:,}"
        sections += ["### Head and loss alone", f"{said}, forward KL; the head trains. {measured_on(found)}"]
        sections.append(table(("hidden states", *HEAD), step_rows(found, f"{found['num_steps']} × {found['rows']:,}")))
    if found := results.get("acceptance"):
        said = " ".join(f"`{key}`" for key in (f"recipe={found['recipe']}", *found["keys"]))
        longer = f"{found['longer']:+.1%}{ends(found['longer_ci95'], '+.1%')}"
        said += (
            f", and speculators' default head for as long: {duration(found['seconds'])} each. Both read the target's states from the disk; "
            f"our evaluations are made within that time. Decoded here, greedily, K = {found['num_speculative_tokens']}. "
            f"Ours against speculators' best: {longer}. {measured_on(found)}"
        )
        rows = [("ours", "as above", f"{found['steps']:,}", accepted_by(found, "ours"))]
        for name, own in found["speculators"].items():
            settings = f"learning rate {own['learning_rate']:g}, rows of {own['length']:,} tokens"
            rows.append(("speculators", settings, f"{own['steps']:,}", accepted_by(found, name)))
        sections += ["### Equal minutes, equal rows, one decoder", said]
        sections.append(table(("trainer", "settings", "steps", "acceptance length"), rows))
    return "\n\n".join(sections)


def step_rows(found: Mapping[str, Any], layout: str) -> Iterator[tuple[str, ...]]:
    for name, own in found["trainers"].items():
        times = ", ".join(f"{1000 * own[part]:,.0f}" for part in ("forward", "backward", "optimizer"))
        ratio, shown = found["ratios"].get(name), OTHERS[name][0] if name in OTHERS else name
        against = (f"{ratio['speed']:.2f}×{ends(ratio['speed_ci95'], '.2f')}", f"{ratio['memory']:.0%}") if ratio else ("", "")
        yield layout, shown, f"{own['tokens_per_second']:,.0f}", times, size(int(own["peak"])), *against


def accepted_by(found: Mapping[str, Any], name: str) -> str:
    own = found["lengths"][name]
    return f"{own['length']:.2f}{ends(own['ci95'], '.2f')}"


def ends(bounds: list[float] | None, spec: str) -> str:
    return f" ({bounds[0]:{spec}} to {bounds[1]:{spec}})" if bounds else ""


def measured_on(found: Mapping[str, Any]) -> str:
    return f"{found['cpu']}, {found['threads']} threads, {'bfloat16' if found['bf16'] else 'float32'}, torch {found['torch']}."


if __name__ == "__main__":
    sys.exit(run(main, Options))
