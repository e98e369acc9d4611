"""A plan as a person reads it: what to do first, then a row for each method, where its numbers come from, and what was assumed."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdistill.methods import METHODS
from specdistill.planning.plan import Plan, Row
from specdistill.planning.reading import KnownDraft
from specdistill.report.phrases import times

SHOWN_DRAFTS = 8


def print_plan(plan: Plan, drafts: Sequence[KnownDraft], not_asked: str | None, console: Console | None = None) -> None:
    """`not_asked` says why the Hub was not asked for drafts."""
    console = console or Console(highlight=False)
    target, advice = plan.target, plan.recommendation
    read = f", {short(target['parameters_read'])} read a step" if target["parameters_read"] < 0.5 * target["parameters"] else ""
    sizes = (
        f": {target['model_type']}, {short(target['parameters'])} parameters{read}, {short(target['bytes'], 'B')} in "
        f"{target['dtype']}, {target['num_layers']} layers of {target['hidden_size']:,}, {target['vocab_size']:,} tokens\n"
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
        console.print(Text(f"  {advice['start'] or 'no recipe of it ships'}", style="bold"), soft_wrap=True)


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
    if METHODS[row.method].artifact is not None:
        tokens = f"{short(row.training_tokens)} tokens" if row.training_tokens else "? tokens"
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


def _between(low: Any, high: Any) -> str:
    return f"{low}" if low == high else f"{low} to {high}"
