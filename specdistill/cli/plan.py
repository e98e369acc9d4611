"""`specdistill plan`, and what it prints."""

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from specdistill.advice.plan.options import PlanOptions, ServingOptions
from specdistill.cli.launch import import_libraries
from specdistill.common.errors import ExitCode
from specdistill.common.terminal import Console, print_result
from specdistill.evaluation.report.phrases import format_times
from specdistill.recipe.load import load_recipe
from specdistill.recipe.short_keys import TARGET, select_recipe_keys

if TYPE_CHECKING:
    from specdistill.advice.plan.accounting import Device
    from specdistill.advice.plan.budget import Budget
    from specdistill.advice.plan.estimates import PlanRow
    from specdistill.advice.plan.plan import Plan
    from specdistill.advice.plan.reading import KnownDraft
    from specdistill.methods.sizes import ModelConfigInfo

SHOWN_DRAFTS = 3
COLUMNS = ("method", "size", "tokens", "GPU h", "GPU memory", "accepted, AL", "speedup")
CPU_COLUMN_NAMES = {"GPU h": "hours", "GPU memory": "memory"}
OTHER_DEVICE = {
    True: "serving.device=h100 estimates for a GPU",
    False: "serving.device=cpu estimates for this machine",
}


def plan(arguments: list[str]) -> int:
    """Estimate cost and speedup of each method for a target (no training), and how to start.

    specdistill plan target=path/to/model
    specdistill plan target=path/to/model serving.memory_gb=24 details=true
    """
    options = load_recipe(PlanOptions, select_recipe_keys(arguments, TARGET))
    import_libraries()
    # These modules import torch, so they are imported only here.
    from specdistill.advice.plan.plan import make_plan
    from specdistill.advice.plan.reading import find_published_drafts, read_model_config
    from specdistill.common.repositories import split_revision

    target_name = options.target
    target = read_model_config(
        target_name.model,
        key="target.model",
        revision=target_name.revision,
        trust_remote_code=target_name.trust_remote_code,
    )
    place, revision = split_revision(options.draft or "")
    draft = read_model_config(place, key="draft", revision=revision) if place else None

    # Estimate every method, and ask the Hub for drafts of this target.
    device, serving = choose_device(options.serving, target)
    plan_of_target = make_plan(
        target, draft, serving=serving, device=device, computed=True, **vars(options.training)
    )
    drafts, not_asked = (
        find_published_drafts(target.name, target.hub_id)
        if options.hub
        else ([], "not asked: hub=false")
    )

    # Print the plan as a table, and as JSON with --json.
    print_plan(plan_of_target, drafts, not_asked, details=options.details)
    print_result(
        {
            **asdict(plan_of_target),
            "hub": {"not_asked": not_asked, "drafts": [asdict(entry) for entry in drafts]},
        }
    )
    return ExitCode.DONE


def choose_device(
    serving: ServingOptions, target: "ModelConfigInfo"
) -> tuple["Device", ServingOptions]:
    """Return the device to plan for, and the serving options for it.

    On a CPU, options that are not set follow from the machine.
    """
    from specdistill.advice.plan.accounting import (
        H100,
        can_hold_target,
        find_matrix_sizes,
        measure_machine,
    )

    if serving.device == "h100" or (
        serving.device is None and not can_hold_target(target.parameters)
    ):
        return H100, serving
    machine = measure_machine(*find_matrix_sizes(target), target.parameters)
    changes: dict[str, object] = {"device": "cpu"}
    if "memory_gb" not in serving.model_fields_set:
        changes["memory_gb"] = machine.memory_gb
    if serving.dtype is None and not target.quantization:
        changes["dtype"] = machine.dtype
    return machine, serving.model_copy(update=changes)


def print_plan(
    plan: "Plan", drafts: Sequence["KnownDraft"], not_asked: str | None, *, details: bool
) -> None:
    """Print where to start, with which commands, and a line for each method.

    Args:
        plan: what was estimated.
        drafts: known drafts on the Hub.
        not_asked: why the Hub was not asked for drafts.
        details: whether to print what the estimates are made of, too. Without them the plan fills
            one screen.
    """
    console = Console()

    # The recommendation, and the commands to begin with.
    advice = plan.recommendation
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

    # A line for each method
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    on_cpu = plan.target["on_cpu"]
    for name in COLUMNS:
        grid.add_column(CPU_COLUMN_NAMES.get(name, name) if on_cpu else name, no_wrap=True)
    for row in plan.methods:
        grid.add_row(
            *_format_columns(row),
            style=(
                "bold green" if row.method == advice["method"] else "" if row.available else "dim"
            ),
        )
    console.print("", grid, "")

    # Drafts on the Hub, and notes
    shown = [
        f"{draft.repository} ({draft.method}, {draft.downloads:,} downloads)"
        for draft in drafts[:SHOWN_DRAFTS]
    ]
    more = (
        [f"{len(drafts) - SHOWN_DRAFTS} more; measure one before you train"]
        if len(drafts) > SHOWN_DRAFTS
        else []
    )
    console.print(
        _format_line("on the Hub", ", ".join([*shown, *more]) or not_asked or "no draft found")
    )
    for line in _list_details(plan) if details else ():
        console.print(line)
    for warning in plan.warnings:
        console.print(Text(f"note: {warning}", style="yellow"))
    rest = "--json has all numbers." if details else "details=true says more, --json all."
    console.print(
        Text(
            f"All estimates, for {plan.device}; {OTHER_DEVICE[on_cpu]}. Memory is of training."
            f" {rest}",
            style="dim",
        )
    )


def _print_commands(commands: str, console: Console) -> None:
    """Print each command over as many lines as it takes, in a form that a shell reads as one."""
    for command in commands.splitlines():
        # Spaces inside a word must not be wrapped, so they are replaced meanwhile.
        joined_command = " ".join(
            shlex.quote(word).replace(" ", "\0") for word in shlex.split(command)
        )
        lines = textwrap.wrap(
            joined_command, console.width - 8, break_long_words=False, break_on_hyphens=False
        )
        console.print(
            Text("  " + " \\\n      ".join(lines).replace("\0", " "), style="bold"), soft_wrap=True
        )


def format_short(number: float, unit: str = "") -> str:
    """Format a number with three digits and a decimal prefix.

    Examples are 8.03B parameters and 16.1 GB of files: a byte's giga is G, a number's B.
    """
    prefixes = ("", "k", "M", "G", "T", "P") if unit else ("", "k", "M", "B", "T", "P")
    power = 0
    while number >= 999.5 and power < len(prefixes) - 1:
        number = number / 1000
        power = power + 1
    digits = f"{number:.0f}" if number >= 99.95 or not power else f"{number:.3g}"
    return f"{digits} {prefixes[power]}{unit}" if unit else f"{digits}{prefixes[power]}"


def _format_gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"


def _format_columns(row: "PlanRow") -> list[str]:
    """Return the cells of a method's line."""
    # A method that does not apply has only a reason.
    if not row.available:
        # A method that only its initialization rules out can start from another one.
        possible = "needs init" if row.note.startswith("draft.init: ") else "not possible"
        return [row.method, "–", "–", "–", "–", possible, "–"]
    launch = row.training_launch
    hours = row.training_hours
    tokens = row.trained_tokens

    # Memory and time of training, where they are known.
    memory = (
        f"{launch.num_processes} × {_format_gib(launch.device_bytes)}"
        if launch
        else "too much"
        if row.micro_batch
        else "–"
    )
    time = "–" if not hours else "< 0.1" if hours < 0.05 else f"{hours:.2g}"
    accepted = "not known"
    speedup = "–" if row.is_served else "no engine"
    if row.low and row.high:
        # The lower and the higher estimate of acceptance and speedup.
        ends = dict.fromkeys(f"{end.acceptance_length:.2f}" for end in (row.low, row.high))
        accepted = " to ".join(ends)
        speedup = f"{row.low.speedup:.2f} to {format_times(row.high.speedup)}"
    return [
        row.method,
        format_short(row.parameters or 0),
        format_short(tokens) if tokens else "–",
        time,
        memory,
        accepted,
        speedup,
    ]


def _list_details(plan: "Plan") -> Iterator[Text]:
    """Yield the lines of `details=true`.

    They are the target, what training and serving the recommended method needs, what each method
    is or why it is not possible, and the assumptions.
    """
    target = plan.target
    serving = plan.serving

    # What the plan knows of the target.
    yield _format_line(
        "target",
        f"{target['model']}: {target['model_type']},"
        f" {format_short(target['parameters'])} parameters,"
        f" {format_short(target['bytes'], 'B')} in {target['quantization'] or target['dtype']}",
    )

    # What the recommended method takes to train.
    best = next((row for row in plan.methods if row.method == plan.recommendation["method"]), None)
    if best is not None and best.training_memory and best.micro_batch:
        rows, length = best.micro_batch
        yield _format_line(
            "to train on one device",
            f"{_format_parts(best.training_memory)}, {rows} rows of {length:,} tokens at a time",
        )
        yield _format_line(
            "data",
            f"{best.training_source}; {format_short(best.disk_bytes or 0, 'B')} of disk if hidden"
            " states are stored",
        )

    # How the target is served, and what that takes.
    yield _format_line(
        "to serve",
        f"{serving['batch_size']:,} × {serving['context']:,} tokens in {serving['dtype']}, KV cache"
        f" in {serving['kv_cache_dtype']}, on {serving['tensor_parallel']} ×"
        f" {serving['memory_gb']:g} GiB, {serving['gpu_memory_utilization']:.0%} for the engine:"
        f" {_describe_budget((best and best.serving) or plan.alone)}",
    )

    # A note for each method, and the assumptions of all estimates.
    for row in plan.methods:
        yield _format_line(
            row.method,
            row.note if not row.available else f"{row.note}; acceptance: {row.acceptance_source}",
        )
    yield from map(Text, plan.assumptions)


def _format_line(title: str, what: str) -> Text:
    return Text.assemble((f"{title}: ", "bold"), what)


def _format_parts(sizes: Mapping[str, int]) -> str:
    parts = " + ".join(f"{name} {_format_gib(size)}" for name, size in sizes.items() if size)
    return f"{parts} = {_format_gib(sum(sizes.values()))}"


def _describe_budget(budget: "Budget") -> str:
    """Describe what a device holds, whether it fits, and how much context is left."""
    parts = _format_parts(budget.parts)
    needs = _format_gib(budget.needs)
    if not budget.fits:
        return (
            f"{parts}: needs {needs}; fits on {budget.tensor_parallel or 'no number of'} devices"
            " (serving.tensor_parallel)"
        )
    room = (
        "" if budget.room is None else f"; room for {format_short(budget.room)} tokens of context"
    )
    return (
        f"{parts}: fits in"
        f" {needs}{room}{f', {format_short(budget.cost)} fewer than alone' if budget.cost else ''}"
    )
