"""`specdistill plan`: its keys, and what it prints."""

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

from rich import box
from rich.table import Table
from rich.text import Text

from specdistill.command import TARGET, keys_of
from specdistill.errors import ExitCode
from specdistill.recipe.fields import Section, like, option, section
from specdistill.recipe.load import load_recipe
from specdistill.recipe.sections import TargetConfig
from specdistill.report.phrases import times
from specdistill.terminal import Console, result

if TYPE_CHECKING:
    from specdistill.planning.budget import Budget
    from specdistill.planning.estimates import PlanRow
    from specdistill.planning.plan import Plan
    from specdistill.planning.reading import KnownDraft

SHOWN_DRAFTS = 3
COLUMNS = ("method", "size", "tokens", "GPU h", "GPU memory", "accepted, AL", "speedup")


class PlannedTarget(Section):
    model: str = like(TargetConfig, "model")
    revision: str | None = like(TargetConfig, "revision")
    trust_remote_code: bool = like(TargetConfig, "trust_remote_code")


class ServingOptions(Section):
    context: int | None = option(
        None, "tokens of a sequence; null: 4,096, or the target's most if less", ge=1
    )
    batch_size: int = option(1, "sequences decoded together", ge=1)
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None, "of all weights; null: as the configs say"
    )
    kv_cache_dtype: Literal["float32", "bfloat16", "float16", "fp8"] | None = option(
        None, "of keys and values; null: dtype"
    )
    tensor_parallel: int = option(1, "devices that share target and draft", ge=1)
    memory_gb: float = option(80.0, "memory of one device in GiB, e.g. 80 of an H100", gt=0)
    gpu_memory_utilization: float = option(0.92, "share of it that the engine takes", gt=0, le=1)


class PlannedTraining(Section):
    batch_size: int | None = option(
        None, "rows of a micro-batch on one device; null: the recipe's, else 4", ge=1, le=1024
    )
    max_length: int | None = option(
        None,
        "tokens of a row, at most what the target has; null: the recipe's, else 2,048",
        ge=8,
        le=2**20,
    )


class PlanOptions(Section):
    target: PlannedTarget = section(PlannedTarget)
    draft: str | None = option(
        None, "a draft that exists, folder or Hub id; of both only the configs are read"
    )
    serving: ServingOptions = section(ServingOptions)
    training: PlannedTraining = section(PlannedTraining)
    details: bool = option(
        False,
        "print what takes the memory, where the numbers are from, and why a method is not to be had",
    )
    hub: bool = option(True, "search the Hub for drafts of the target")


def plan(arguments: list[str]) -> int:
    """estimate cost and speedup of each method for a target (no training), and print the commands to start with

    specdistill plan target=path/to/model
    specdistill plan target=path/to/model serving.memory_gb=24 details=true"""
    options = load_recipe(PlanOptions, keys_of(arguments, TARGET))
    from specdistill.planning.plan import (
        make_plan,
    )  # here, and not above, because these import torch
    from specdistill.planning.reading import known_drafts, read

    named = options.target
    target = read(
        named.model,
        key="target.model",
        revision=named.revision,
        trust_remote_code=named.trust_remote_code,
    )
    draft = read(options.draft, key="draft") if options.draft else None
    made = make_plan(
        target, draft, serving=options.serving, computed=True, **vars(options.training)
    )
    drafts, not_asked = (
        known_drafts(target.name, target.hub_id) if options.hub else ([], "not asked: hub=false")
    )
    print_plan(made, drafts, not_asked, details=options.details)
    result(
        {
            **asdict(made),
            "hub": {"not_asked": not_asked, "drafts": [asdict(entry) for entry in drafts]},
        }
    )
    return ExitCode.DONE


def print_plan(
    plan: "Plan", drafts: Sequence["KnownDraft"], not_asked: str | None, *, details: bool
) -> None:
    """Where to start, by which commands, and a line for each method: one screen; with `details` what it is made of.

    not_asked: why the Hub was not asked for drafts.
    """
    console, advice = Console(), plan.recommendation
    console.print(
        Text.assemble(
            (f"Recommended: {advice['method'] or 'none'}", "bold"), f", {advice['reason']}"
        )
    )
    _print_commands(advice["start"] or "", console)
    if advice["start"] == advice["lookup"]:
        console.print("What it gains depends on the text: this measures it.")
    else:
        console.print(
            "N-gram lookup needs no training (in front of a draft: eval.lookup_first={}):"
        )
        _print_commands(advice["lookup"] or "", console)
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        grid.add_column(name, no_wrap=True)
    for row in plan.methods:
        grid.add_row(
            *_columns(row),
            style="bold green"
            if row.method == advice["method"]
            else ""
            if row.available
            else "dim",
        )
    console.print("", grid, "")
    shown = [
        f"{draft.repository} ({draft.method}, {draft.downloads:,} downloads)"
        for draft in drafts[:SHOWN_DRAFTS]
    ]
    more = (
        [f"{len(drafts) - SHOWN_DRAFTS} more; measure one before you train"]
        if len(drafts) > SHOWN_DRAFTS
        else []
    )
    console.print(_line("on the Hub", ", ".join([*shown, *more]) or not_asked or "no draft found"))
    for line in _details(plan) if details else ():
        console.print(line)
    for warning in plan.warnings:
        console.print(Text(f"note: {warning}", style="yellow"))
    rest = "--json has all numbers." if details else "details=true says more, --json all."
    console.print(Text(f"All estimates; GPU memory is of training. {rest}", style="dim"))


def _print_commands(commands: str, console: Console) -> None:
    """Each over as many lines as it takes, which a shell reads as one."""
    for command in commands.splitlines():
        whole = " ".join(shlex.quote(word).replace(" ", "\0") for word in shlex.split(command))
        lines = textwrap.wrap(
            whole, console.width - 8, break_long_words=False, break_on_hyphens=False
        )
        console.print(
            Text("  " + " \\\n      ".join(lines).replace("\0", " "), style="bold"), soft_wrap=True
        )


def short(number: float, unit: str = "") -> str:
    """Three digits and a decimal prefix: 8.03B parameters, 16.1 GB of files (a byte's giga is G, a number's B)."""
    prefixes = ("", "k", "M", "G", "T", "P") if unit else ("", "k", "M", "B", "T", "P")
    power = 0
    while number >= 999.5 and power < len(prefixes) - 1:
        number, power = number / 1000, power + 1
    digits = f"{number:.0f}" if number >= 99.95 or not power else f"{number:.3g}"
    return f"{digits} {prefixes[power]}{unit}" if unit else f"{digits}{prefixes[power]}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"


def _columns(row: "PlanRow") -> list[str]:
    """A method's line."""
    if not row.available:
        return [row.method, "–", "–", "–", "–", "not possible", "–"]
    launch, hours, tokens = row.training_launch, row.training_hours, row.trained_tokens
    held = (
        f"{launch.num_processes} × {_gib(launch.device_bytes)}"
        if launch
        else "too much"
        if row.micro_batch
        else "–"
    )
    time = "–" if not hours else "< 0.1" if hours < 0.05 else f"{hours:.2g}"
    accepted, speedup = "not known", "–"
    if row.low and row.high:
        ends = dict.fromkeys(f"{end.acceptance_length:.2f}" for end in (row.low, row.high))
        accepted = " to ".join(ends)
        speedup = f"{row.low.speedup:.2f} to {times(row.high.speedup)}"
    return [
        row.method,
        short(row.parameters or 0),
        short(tokens) if tokens else "–",
        time,
        held,
        accepted,
        speedup,
    ]


def _details(plan: "Plan") -> Iterator[Text]:
    """The target; what training and serving the recommended method needs; what each method is, or why it cannot be had; assumptions."""
    target, serving = plan.target, plan.serving
    sizes = f"{short(target['parameters'])} parameters, {short(target['bytes'], 'B')} in {target['quantization'] or target['dtype']}"
    yield _line("target", f"{target['model']}: {target['model_type']}, {sizes}")
    best = next((row for row in plan.methods if row.method == plan.recommendation["method"]), None)
    if best is not None and best.training_memory and best.micro_batch:
        rows, length = best.micro_batch
        yield _line(
            "to train on one device",
            f"{_parts(best.training_memory)}, {rows} rows of {length:,} tokens at a time",
        )
        yield _line(
            "data",
            f"{best.training_source}; {short(best.disk_bytes or 0, 'B')} of disk if hidden states are stored",
        )
    asked = f"{serving['batch_size']:,} × {serving['context']:,} tokens in {serving['dtype']}, KV cache in {serving['kv_cache_dtype']}"
    where = f"on {serving['tensor_parallel']} × {serving['memory_gb']:g} GiB, {serving['gpu_memory_utilization']:.0%} for the engine"
    yield _line("to serve", f"{asked}, {where}: {_budget((best and best.serving) or plan.alone)}")
    for row in plan.methods:
        yield _line(
            row.method,
            row.note if not row.available else f"{row.note}; acceptance: {row.acceptance_source}",
        )
    yield from map(Text, plan.assumptions)


def _line(title: str, what: str) -> Text:
    return Text.assemble((f"{title}: ", "bold"), what)


def _parts(sizes: Mapping[str, int]) -> str:
    parts = " + ".join(f"{name} {_gib(size)}" for name, size in sizes.items() if size)
    return f"{parts} = {_gib(sum(sizes.values()))}"


def _budget(budget: "Budget") -> str:
    """What a device holds, whether it fits, and how much context is left."""
    held, needs = _parts(budget.parts), _gib(budget.needs)
    if not budget.fits:
        return f"{held}: needs {needs}; fits on {budget.tensor_parallel or 'no number of'} devices (serving.tensor_parallel)"
    room = "" if budget.room is None else f"; room for {short(budget.room)} tokens of context"
    return f"{held}: fits in {needs}{room}{f', {short(budget.cost)} fewer than alone' if budget.cost else ''}"
