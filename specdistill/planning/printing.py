"""A plan as a person reads it in a terminal."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdistill.methods import METHODS
from specdistill.planning.budget import Budget
from specdistill.planning.plan import Plan
from specdistill.planning.reading import KnownDraft
from specdistill.planning.rows import Row
from specdistill.report.phrases import times

SHOWN_DRAFTS = 8


def print_plan(plan: Plan, drafts: Sequence[KnownDraft], not_asked: str | None, console: Console | None = None) -> None:
    """`not_asked` says why the Hub was not asked for drafts."""
    console = console or Console(highlight=False)
    target, advice = plan.target, plan.recommendation
    read = f", {short(target['parameters_read'])} read a step" if target["parameters_read"] < 0.5 * target["parameters"] else ""
    stored = target["quantization"] or target["dtype"]
    sizes = (
        f": {target['model_type']}, {short(target['parameters'])} parameters{read}, {short(target['bytes'], 'B')} in "
        f"{stored}, {target['num_layers']} layers of {target['hidden_size']:,}, {target['vocab_size']:,} tokens\n"
    )
    console.print(Text.assemble((f"\n{target['model']}", "bold"), sizes))
    grid = Table(box=box.SIMPLE_HEAD, leading=1, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("method", "the draft", "to train it", "step, c", "accepted, AL", "speedup"):
        grid.add_column(name, no_wrap=True)
    for row in plan.methods:
        grid.add_row(*_columns(row), style="bold green" if row.method == advice["method"] else "" if row.available else "dim")
    console.print(grid)
    shown = [f"{draft.repository} ({draft.method}, {draft.downloads:,} downloads, by its {draft.found_by})" for draft in drafts]
    if len(shown) > SHOWN_DRAFTS:
        shown[SHOWN_DRAFTS:] = [f"{len(shown) - SHOWN_DRAFTS} more"]
    known = ", methods inferred from names and tags; measure one before you train" if drafts else ""
    sections = {
        "What each is": [f"{row.method}: {row.draft + ', ' if row.draft else ''}{row.note}" for row in plan.methods],
        _asked(plan.serving): [
            _budget("alone", plan.alone),
            *(_budget(row.method, row.serving) for row in plan.methods if row.serving),
        ],
        "What training holds": [line for row in plan.methods for line in _held(row, target["kv_bytes"])],
        "Training on one device, computed": [line for row in plan.methods for line in _fits(row)],
        "Acceptance as published": [f"{row.method}: {row.acceptance_source}" for row in plan.methods if row.acceptance_source],
        "Training data": [f"{row.method}: {row.training_source}" for row in plan.methods if row.training_tokens],
        "Assumed": plan.assumptions,
        f"Drafts on the Hub{known}": shown or [not_asked or "none found"],
    }
    for title, lines in sections.items():
        if not lines:
            continue
        console.print(Text(f"\n{title}", style="bold"))
        grid = Table.grid(padding=(0, 1))
        for line in lines:  # a paragraph each, wrapped under itself
            grid.add_row(Text(" ·", style="dim"), Text(line, style="dim"))
        console.print(grid)
    for warning in plan.warnings:
        console.print(Text(f"note: {warning}", style="yellow"))
    console.print(Text.assemble((f"\nRecommended: {advice['method'] or 'none'}", "bold"), f", {advice['reason']}."))
    if advice["method"]:
        console.print(Text(f"  {advice['start'] or 'nothing here starts it'}", style="bold"), soft_wrap=True)


def short(number: float, unit: str = "") -> str:
    """Three digits and a decimal prefix: 8.03B parameters, 16.1 GB (a byte's giga is G, a number's B)."""
    prefixes = ("", "k", "M", "G", "T", "P") if unit else ("", "k", "M", "B", "T", "P")
    power = 0
    while number >= 999.5 and power < len(prefixes) - 1:
        number, power = number / 1000, power + 1
    digits = f"{number:.0f}" if number >= 99.95 or not power else f"{number:.3g}"
    return f"{digits} {prefixes[power]}{unit}" if unit else f"{digits}{prefixes[power]}"


def _columns(row: Row) -> list[Text | str]:
    """A method's columns, up to three lines each."""
    if not row.available:
        return [row.method, "none, see below", "", "", "", "–"]
    size = "no weights"
    if row.parameters:
        size = f"{short(row.parameters)}, {short(row.bytes or 0, 'B')}\n{row.num_layers} × {row.hidden_size:,} wide"
    train = ["nothing"]
    if row.method not in METHODS:
        train = ["not trained here"]
    elif row.artifact is not None:
        tokens = f"{short(row.training_tokens)} tokens, {row.training_hours:.0f} h" if row.training_tokens else "? tokens"
        train = [tokens, f"{short(row.training_memory_bytes or 0, 'B')} device"]
        train += [f"{short(row.disk_bytes, 'B')} disk"] if row.disk_bytes else []
    shares = row.step_shares or {}
    binding = max(shares, key=lambda name: shares[name]) if row.step_ratio else "no model"
    step = f"{row.step_ratio:.3f}\n{binding}"
    accepted, speedup = "not known", "–"
    if row.low and row.high:
        accepted = _between(f"{row.low.acceptance_length:.2f}", f"{row.high.acceptance_length:.2f}")
        accepted += f"\nK = {_between(row.low.num_speculative_tokens, row.high.num_speculative_tokens)}"
        speedup = f"{row.low.speedup:.2f} to\n{times(row.high.speedup)}"
    return [row.method, size, "\n".join(train), step, accepted, speedup]


def _held(row: Row, target_kv: int | None) -> list[str]:
    """What a draft takes of a device's memory, in words: while it is trained, and while it serves."""
    if not row.training_memory:
        return []
    parts = " + ".join(f"{name} {short(size, 'B')}" for name, size in row.training_memory.items() if size)
    beside = f", beside {short(target_kv, 'B')} of the target" if target_kv is not None else ""
    kind = "roughly" if row.training_rates is None else "computed"
    return [f"{row.method}: to train, {kind}, {parts}; KV cache {short(row.kv_bytes or 0, 'B')} a token{beside}"]


def _asked(serving: dict[str, Any]) -> str:
    """What the budgets are for."""
    sequences = "one sequence" if serving["batch_size"] == 1 else f"{serving['batch_size']:,} sequences"
    dtype, cache, devices = serving["dtype"], serving["kv_cache_dtype"], serving["tensor_parallel"]
    held = dtype if cache == dtype else f"{dtype} with a KV cache in {cache}"
    where = "one device" if devices == 1 else f"each of {devices} devices"
    memory = f"{serving['memory'] / 2**30:g} GiB, of which the engine takes {serving['gpu_memory_utilization']:.0%}"
    return f"Serving {sequences} of {serving['context']:,} tokens in {held}, on {where} of {memory}"


def _budget(name: str, budget: Budget) -> str:
    """What a device holds, whether it fits, and how much context is left."""
    parts = " + ".join(f"{part} {short(size, 'B')}" for part, size in budget.parts.items())
    said = f"{name}: {parts} = {short(budget.total, 'B')}"
    if not budget.fits:
        way_out = (
            f"on each of {budget.tensor_parallel} devices (serving.tensor_parallel)"
            if budget.tensor_parallel
            else "on no number of them"
        )
        return f"{said}: does not fit, needs {short(budget.needs, 'B')}; fits {way_out}"
    room = "" if budget.room is None else f"; room for {short(budget.room)} tokens of context"
    cost = "" if not budget.cost or not budget.room else f", {short(budget.cost)} fewer than alone"
    return f"{said}: fits in {short(budget.needs, 'B')}{room}{cost}"


def _fits(row: Row) -> list[str]:
    """The devices that hold a draft's training beside the target, each with its tokens a second."""
    if row.training_rates is None:
        return []
    devices = ", ".join(f"{name} ({short(rate)} tokens/s)" for name, rate in row.training_rates.items())
    many = f": on {row.training_devices} that share it by target.shard=layers" if row.training_devices else ""
    where = f"fits on {devices}" if devices else f"fits on no one device{many}"
    return [f"{row.method}: {short(row.training_memory_bytes or 0, 'B')}, {where}"]


def _between(low: Any, high: Any) -> str:
    return f"{low}" if low == high else f"{low} to {high}"
