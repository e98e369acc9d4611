"""`specdistill plan`: its keys, and what it prints."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator
from rich import box
from rich.table import Table
from rich.text import Text

from specdistill.command import TARGET, keys_of
from specdistill.errors import ExitCode, UserError
from specdistill.methods import METHODS
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
LARGEST_BATCH = 2**22  # tokens, of which the longest context known has a quarter
COLUMNS = ("method", "size", "to train it", "accepted, AL", "speedup")


class PlannedTarget(Section):
    model: str = like(TargetConfig, "model")
    revision: str | None = like(TargetConfig, "revision")
    trust_remote_code: bool = like(TargetConfig, "trust_remote_code")


class ServingOptions(Section):
    context: int | None = option(
        None, "tokens of a sequence, prompt and completion; null: 4,096, or the target's most if less", ge=1
    )
    batch_size: int = option(1, "sequences decoded together", ge=1)
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None, "weights of target and draft; null: as their configs say"
    )
    kv_cache_dtype: Literal["float32", "bfloat16", "float16", "fp8"] | None = option(None, "of keys and values; null: dtype")
    tensor_parallel: int = option(1, "devices that share target and draft", ge=1)
    memory_gb: float = option(80.0, "memory of one device in GiB, e.g. 80 of an H100", gt=0)
    gpu_memory_utilization: float = option(0.92, "share of it that the engine takes", gt=0, le=1)


class PlannedTraining(Section):
    batch_size: int = option(4, "rows of a micro-batch on one device", ge=1)
    max_length: int = option(2048, "tokens of a row; at most what the target has", ge=8)

    @model_validator(mode="after")
    def _fits_a_device(self) -> "PlannedTraining":
        if self.batch_size * self.max_length > LARGEST_BATCH:
            got = f"{self.batch_size} rows of {self.max_length} tokens"
            raise UserError("training.batch_size", got=got, expected=f"a micro-batch of at most {LARGEST_BATCH:,} tokens")
        return self


class PlanOptions(Section):
    target: PlannedTarget = section(PlannedTarget)
    draft: str | None = option(None, "a draft that exists, folder or Hub id; of both only the configs are read")
    serving: ServingOptions = section(ServingOptions)
    training: PlannedTraining = section(PlannedTraining)
    hub: bool = option(True, "search the Hub for drafts of the target")
    output: str | None = option(None, "JSON file for all numbers, their sources and assumptions; --json prints it")


def plan(arguments: list[str]) -> int:
    """say which method a target should get before anything is trained: what each costs, the speedup to expect, and on what grounds"""
    options = load_recipe(PlanOptions, keys_of(arguments, TARGET))
    from specdistill.planning.budget import ServingSettings  # here, and not above, because these import torch
    from specdistill.planning.estimates import MicroBatch
    from specdistill.planning.plan import make_plan
    from specdistill.planning.reading import known_drafts, read

    named = options.target
    target = read(named.model, key="target.model", revision=named.revision, trust_remote_code=named.trust_remote_code)
    draft = read(options.draft, key="draft") if options.draft else None
    serving = ServingSettings.of(target, **options.serving.model_dump())
    made = make_plan(target, draft, serving=serving, training=MicroBatch(**vars(options.training)), computed=True)
    drafts, not_asked = known_drafts(target.name, target.hub_id) if options.hub else ([], "not asked: hub=false")
    found = {"not_asked": not_asked, "drafts": [asdict(entry) for entry in drafts]}
    numbers = {**asdict(made), "hub": found}
    if options.output is not None:
        try:
            Path(options.output).write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            got = f"{options.output} ({error.strerror})"
            raise UserError("output", got=got, expected="a file that can be written") from error
    print_plan(made, drafts, not_asked)
    result(numbers)
    return ExitCode.DONE


def print_plan(plan: "Plan", drafts: Sequence["KnownDraft"], not_asked: str | None, console: Console | None = None) -> None:
    """In a terminal, on one screen: where to start, a line for each method, and what the first of them needs; all else is in the JSON.

    not_asked: why the Hub was not asked for drafts.
    """
    console = console or Console()
    advice = plan.recommendation
    console.print(Text.assemble((f"Recommended: {advice['method'] or 'none'}", "bold"), f", {advice['reason']}."))
    if advice["method"]:
        console.print(Text(f"  {advice['start'] or 'nothing here starts it'}", style="bold"), soft_wrap=True)
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        grid.add_column(name, no_wrap=True)
    for row in plan.methods:
        grid.add_row(*_columns(row), style="bold green" if row.method == advice["method"] else "" if row.available else "dim")
    console.print("", grid, "")
    for line in _lines(plan, drafts, not_asked):
        console.print(line)
    for warning in plan.warnings:
        console.print(Text(f"note: {warning}", style="yellow"))
    console.print(
        Text("Nothing here is measured. --json, or output=FILE, has the rest: parts, sources, assumptions.", style="dim")
    )


def short(number: float, unit: str = "") -> str:
    """Three digits and a decimal prefix: 8.03B parameters, 16.1 GB (a byte's giga is G, a number's B)."""
    prefixes = ("", "k", "M", "G", "T", "P") if unit else ("", "k", "M", "B", "T", "P")
    power = 0
    while number >= 999.5 and power < len(prefixes) - 1:
        number, power = number / 1000, power + 1
    digits = f"{number:.0f}" if number >= 99.95 or not power else f"{number:.3g}"
    return f"{digits} {prefixes[power]}{unit}" if unit else f"{digits}{prefixes[power]}"


def _columns(row: "PlanRow") -> list[str]:
    """A method's line."""
    if not row.available:
        return [row.method, "–", "none: see below", "", "–"]
    train = "nothing"
    if METHODS[row.method].is_trained:
        train = f"{short(row.training_tokens)} tokens, {row.training_hours:.0f} h" if row.training_tokens else "? tokens"
        train += f", {short(row.training_memory_bytes or 0, 'B')}"
    accepted, speedup = "not known", "–"
    if row.low and row.high:
        ends = dict.fromkeys(f"{end.acceptance_length:.2f}" for end in (row.low, row.high))
        accepted = " to ".join(ends)
        speedup = f"{row.low.speedup:.2f} to {times(row.high.speedup)}"
    return [row.method, short(row.parameters or 0), train, accepted, speedup]


def _lines(plan: "Plan", drafts: Sequence["KnownDraft"], not_asked: str | None) -> Iterator[Text]:
    """The target; what training and serving the recommended method needs; other methods that cannot be had; drafts that there are."""
    target = plan.target
    sizes = f"{short(target['parameters'])} parameters, {short(target['bytes'], 'B')} in {target['quantization'] or target['dtype']}"
    yield _line("target", f"{target['model']}: {target['model_type']}, {sizes}")
    best = next((row for row in plan.methods if row.method == plan.recommendation["method"]), None)
    if best is not None and best.training_memory:
        yield _line("to train", _training(best))
    held = best.serving if best is not None else None
    yield _line("to serve", f"{_asked(plan.serving)}: {_budget(held or plan.alone)}")
    if any(row.available and METHODS[row.method].is_trained for row in plan.methods):
        what = "N-gram lookup in front of any draft (eval.lookup_first={}) often adds speed; how much depends on the text. "
        yield _line("in front", what + "vLLM serves it with our plugin, llama.cpp with min = max.")
    for row in plan.methods:
        if not row.available:
            yield _line(row.method, row.note)
    shown = [f"{draft.repository} ({draft.method}, {draft.downloads:,} downloads)" for draft in drafts[:SHOWN_DRAFTS]]
    more = [f"{len(drafts) - SHOWN_DRAFTS} more; measure one before you train"] if len(drafts) > SHOWN_DRAFTS else []
    yield _line("on the Hub", ", ".join([*shown, *more]) or not_asked or "no draft found")


def _line(title: str, what: str) -> Text:
    return Text.assemble((f"{title}: ", "bold"), what)


def _training(row: "PlanRow") -> str:
    """What training takes of a device."""
    parts = " + ".join(f"{name} {short(size, 'B')}" for name, size in (row.training_memory or {}).items() if size)
    disk = f"; {short(row.disk_bytes, 'B')} of disk if hidden states are stored" if row.disk_bytes else ""
    number = row.training_devices
    where = (
        "fits on no number of devices" if number is None else "one device" if number == 1 else f"{number} devices that share it"
    )
    return f"{parts} = {short(row.training_memory_bytes or 0, 'B')}, {where}{disk}; data: {row.training_source}"


def _asked(serving: dict[str, Any]) -> str:
    """What the budgets are for."""
    sequences = "one sequence" if serving["batch_size"] == 1 else f"{serving['batch_size']:,} sequences"
    dtype, cache, devices = serving["dtype"], serving["kv_cache_dtype"], serving["tensor_parallel"]
    held = dtype if cache == dtype else f"{dtype} with a KV cache in {cache}"
    where = "one device" if devices == 1 else f"each of {devices} devices"
    memory = f"{serving['memory'] / 2**30:g} GiB, of which the engine takes {serving['gpu_memory_utilization']:.0%}"
    return f"{sequences} of {serving['context']:,} tokens in {held}, on {where} of {memory}"


def _budget(budget: "Budget") -> str:
    """What a device holds, whether it fits, and how much context is left."""
    parts = " + ".join(f"{part} {short(size, 'B')}" for part, size in budget.parts.items())
    held = f"{parts} = {short(budget.total, 'B')}"
    if not budget.fits:
        number = budget.tensor_parallel
        way_out = f"on each of {number} devices (serving.tensor_parallel)" if number else "on no number of them"
        return f"{held}: does not fit, needs {short(budget.needs, 'B')}; fits {way_out}"
    room = "" if budget.room is None else f"; room for {short(budget.room)} tokens of context"
    cost = "" if not budget.cost or not budget.room else f", {short(budget.cost)} fewer than alone"
    return f"{held}: fits in {short(budget.needs, 'B')}{room}{cost}"
