"""`specdistill plan`: estimate what each method costs and gains for a target."""

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

SHOWN_DRAFTS = 3  # how many drafts on the Hub are named, so that the line stays short
# The columns of the table of methods. "accepted, AL" is the acceptance length.
COLUMNS = ("method", "size", "tokens", "GPU h", "GPU memory", "accepted, AL", "speedup")
# The names of columns in a plan for a CPU.
CPU_COLUMN_NAMES = {"GPU h": "hours", "GPU memory": "memory"}
# Whether the plan is for a CPU -> how to estimate for the other device.
OTHER_DEVICE = {
    True: "serving.device=h100 estimates for a GPU",
    False: "serving.device=cpu estimates for this machine",
}


def plan(arguments: list[str]) -> int:
    """Estimate the cost and the speedup of each method for a target, and show how to start.

    specdistill plan target=path/to/model
    specdistill plan target=path/to/model serving.memory_gb=24 details=true
    """
    options = load_recipe(PlanOptions, select_recipe_keys(arguments, TARGET))
    import_libraries()
    # These modules import torch, so they are imported only here.
    from specdistill.advice.plan.plan import make_plan
    from specdistill.advice.plan.reading import find_published_drafts, read_model_config
    from specdistill.common.repositories import split_revision

    # Read the configs of the target and of the draft, if one is named. No weights are read.
    target = read_model_config(
        options.target.model,
        key="target.model",
        revision=options.target.revision,
        trust_remote_code=options.target.trust_remote_code,
    )
    draft_name, revision = split_revision(options.draft or "")
    draft = read_model_config(draft_name, key="draft", revision=revision) if draft_name else None

    # Estimate every method on the chosen device. `computed` runs the training step of each method
    # over tensors without content, to estimate its cost better. That takes many times longer, so it
    # is done only for details=true. Ask the Hub for published drafts of this target, unless the
    # user typed hub=false.
    device, serving = choose_device(options.serving, target)
    plan_of_target = make_plan(
        target,
        draft,
        serving=serving,
        device=device,
        computed=options.details,
        **vars(options.training),
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

    The plan is for the device that the user typed as `serving.device`: `cpu` or `h100`. If the user
    typed none, the plan is for the CPU of this machine if the machine has no GPU and has enough
    memory for the target, and for an H100 if not.

    Args:
        serving: the options that the user typed.
        target: the target.

    Returns:
        The device, and the serving options. For a CPU, the memory and the dtype are those of this
        machine, unless the user typed them.
    """
    # This module imports torch, so it is imported only here.
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

    # Time the matrix products of this machine's CPU.
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
    """Print a plan: the recommended method, its commands, and a table with a row for each method.

    Args:
        plan: the plan.
        drafts: drafts on the Hub that were published for the target.
        not_asked: why the Hub was not asked for drafts; None if it was.
        details: whether to print also how the estimates were made. Without these lines the plan
            fits on one screen.
    """
    console = Console()

    # Print the recommendation, the commands to start with, and the alternatives. If another method
    # than n-gram lookup is recommended, print the command that measures a lookup, too, because a
    # lookup needs no training.
    recommendation = plan.recommendation
    choice = recommendation["recipe"] or recommendation["method"] or "none"
    console.print(
        Text.assemble((f"Recommended: {choice}", "bold"), f", {recommendation['reason']}")
    )
    _print_commands(recommendation["start"] or "", console)
    # `generated` has the commands for the last alternative, which are printed only with details. It
    # is given only if a recipe made for this target is recommended: the last alternative is then
    # the best method without such a recipe. It is None if this method is n-gram lookup, whose
    # command is printed below anyway, or if its draft cannot be trained here.
    last_commands = recommendation["generated"]
    if recommendation["alternatives"]:
        hint = ""
        if last_commands and not details:
            hint = "; details=true prints the commands for the last one"
        console.print(f"Alternatives: {recommendation['alternatives']}{hint}.")
    if details and last_commands:
        console.print("For the last alternative, which has no recipe made for this target:")
        _print_commands(last_commands, console)
    if recommendation["start"] == recommendation["lookup"]:
        console.print("The gain depends on the text. This command measures it.")
    else:
        console.print(
            "N-gram lookup needs no training (combined with a draft: eval.lookup_first={}):"
        )
        _print_commands(recommendation["lookup"] or "", console)

    # Print a table with a row for each method.
    console.print("", _build_method_table(plan), "")

    # Print the drafts on the Hub, the details if asked for, and warnings about the plan.
    console.print(
        _format_line("on the Hub", _describe_drafts(drafts) or not_asked or "no draft found")
    )
    for line in _list_details(plan) if details else ():
        console.print(line)
    for warning in plan.warnings:
        console.print(Text(f"note: {warning}", style="yellow"))

    # Say which device the numbers are for, and how to print more numbers.
    other_device = OTHER_DEVICE[plan.target["on_cpu"]]
    more = "" if details else "details=true explains the numbers, "
    console.print(
        Text(
            f"Estimates for {plan.device}; {other_device}. Memory is that of training."
            f" {more}--json prints all.",
            style="dim",
        )
    )


def _build_method_table(plan: "Plan") -> Table:
    """Build a table with a row for each method of a plan.

    The recommended method is green. Methods that are not possible are dim.
    """
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    # For a CPU, columns that are about GPUs have another title.
    for name in COLUMNS:
        title = CPU_COLUMN_NAMES.get(name, name) if plan.target["on_cpu"] else name
        grid.add_column(title, no_wrap=True)
    for row in plan.methods:
        style = "" if row.available else "dim"
        if row.method == plan.recommendation["method"]:
            style = "bold green"
        grid.add_row(*_format_columns(row), style=style)
    return grid


def _describe_drafts(drafts: Sequence["KnownDraft"]) -> str:
    """Return the names of the most downloaded drafts, and how many more there are.

    Args:
        drafts: drafts on the Hub for one target, the most downloaded first.
    """
    names = [
        f"{draft.repository} ({draft.method}, {draft.downloads:,} downloads)"
        for draft in drafts[:SHOWN_DRAFTS]
    ]
    if len(drafts) > SHOWN_DRAFTS:
        names.append(f"{len(drafts) - SHOWN_DRAFTS} more; measure one before you train")
    return ", ".join(names)


def _print_commands(commands: str, console: Console) -> None:
    """Print commands, and continue long ones on further lines with a backslash, as in a shell.

    Args:
        commands: the commands, one per line.
        console: the console, whose width limits the lines.
    """
    for command in commands.splitlines():
        # A line must not break inside a quoted argument. So spaces inside arguments are replaced by
        # a character that no command contains (\0), and restored when the lines are wrapped.
        joined_command = " ".join(
            shlex.quote(word).replace(" ", "\0") for word in shlex.split(command)
        )
        # The indent of a continued line and its backslash take 8 columns.
        lines = textwrap.wrap(
            joined_command, console.width - 8, break_long_words=False, break_on_hyphens=False
        )
        console.print(
            Text("  " + " \\\n      ".join(lines).replace("\0", " "), style="bold"), soft_wrap=True
        )


def format_short(number: float, unit: str = "") -> str:
    """Format a number with three digits and a decimal prefix, such as 8.03B or 16.1 GB.

    The prefix for a billion is B for plain counts, such as parameters, and G before a unit, such as
    bytes.

    Args:
        number: the number.
        unit: the unit, which follows the prefix after a space; empty for a plain number.
    """
    prefixes = ("", "k", "M", "G", "T", "P") if unit else ("", "k", "M", "B", "T", "P")
    # Divide by 1,000 until three digits remain. 999.5 and more would be rounded to four.
    power = 0
    while number >= 999.5 and power < len(prefixes) - 1:
        number = number / 1000
        power = power + 1
    # From 99.95 on, all three digits are before the decimal point. Numbers without a prefix (power
    # 0) are counts, so they are printed as whole numbers.
    digits = f"{number:.0f}" if number >= 99.95 or not power else f"{number:.3g}"
    space = " " if unit else ""
    return f"{digits}{space}{prefixes[power]}{unit}"


def _format_gib(size: float) -> str:
    """Format a number of bytes in GiB, with three digits."""
    return f"{size / 2**30:.3g} GiB"


def _format_columns(row: "PlanRow") -> list[str]:
    """Return the cells of a method's row in the table, in the order of COLUMNS."""
    # A method that is not possible for the target has no numbers. If the reason is only the value
    # of `draft.init`, the method is possible with another initialization ("needs init").
    if not row.available:
        possible = "needs init" if row.note.startswith("draft.init: ") else "not possible"
        return [row.method, "–", "–", "–", "–", possible, "–"]
    launch = row.training_launch
    hours = row.training_hours
    tokens = row.trained_tokens

    # Format the memory and time of training. "too much": the memory was estimated (there is a
    # micro-batch), but no machine can hold the training (there is no launch).
    memory = "too much" if row.micro_batch else "–"
    if launch:
        memory = f"{launch.num_processes} × {_format_gib(launch.device_bytes)}"
    time = "–"
    if hours:
        time = "< 0.1" if hours < 0.05 else f"{hours:.2g}"

    # Format the acceptance length and the speedup, each as a range from the lower to the higher
    # estimate. If both acceptance lengths are printed alike, `dict.fromkeys` keeps one of them.
    accepted = "not known"
    speedup = "–" if row.is_served else "no engine"
    if row.low and row.high:
        lengths = [f"{end.acceptance_length:.2f}" for end in (row.low, row.high)]
        accepted = " to ".join(dict.fromkeys(lengths))
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
    """Yield the lines that `details=true` adds to a plan.

    These lines describe the target, the memory and data for training the recommended method, the
    memory for serving it, each method (or why it is not possible), and the assumptions.
    """
    target = plan.target
    serving = plan.serving

    # The target: its type, size and dtype.
    yield _format_line(
        "target",
        f"{target['model']}: {target['model_type']},"
        f" {format_short(target['parameters'])} parameters,"
        f" {format_short(target['bytes'], 'B')} in {target['quantization'] or target['dtype']}",
    )

    # The memory, micro-batch and data with which the recommended method is trained.
    best = next((row for row in plan.methods if row.method == plan.recommendation["method"]), None)
    if best is not None and best.training_memory and best.micro_batch:
        num_rows, length = best.micro_batch
        yield _format_line(
            "to train on one device",
            f"{_format_parts(best.training_memory)}, with {num_rows} rows of {length:,} tokens at a"
            " time",
        )
        yield _format_line(
            "data",
            f"{best.training_source}; {format_short(best.disk_bytes or 0, 'B')} on the disk if"
            " hidden states are stored",
        )

    # The memory of a device that serves the target with the recommended draft, or the target alone
    # if no draft is recommended.
    yield _format_line(
        "to serve",
        f"{serving['batch_size']:,} × {serving['context']:,} tokens in {serving['dtype']}, KV cache"
        f" in {serving['kv_cache_dtype']}, on {serving['tensor_parallel']} ×"
        f" {serving['memory_gb']:g} GiB, {serving['gpu_memory_utilization']:.0%} for the engine:"
        f" {_describe_budget((best and best.serving) or plan.alone)}",
    )

    # A remark on each method, with the source of its acceptance, and the assumptions.
    for row in plan.methods:
        source = f"; acceptance: {row.acceptance_source}" if row.available else ""
        yield _format_line(row.method, f"{row.note}{source}")
    yield from map(Text, plan.assumptions)


def _format_line(title: str, text: str) -> Text:
    """Return a line of details: a title in bold, a colon and a text."""
    return Text.assemble((f"{title}: ", "bold"), text)


def _format_parts(sizes: Mapping[str, int]) -> str:
    """Format the parts of a device's memory as a sum: `target 15 GiB + draft 1 GiB = 16 GiB`.

    Args:
        sizes: the bytes of each part, by name. Parts of 0 bytes are left out.
    """
    parts = " + ".join(f"{name} {_format_gib(size)}" for name, size in sizes.items() if size)
    return f"{parts} = {_format_gib(sum(sizes.values()))}"


def _describe_budget(budget: "Budget") -> str:
    """Describe what the memory of a serving device holds, and how much context still fits.

    Args:
        budget: the bytes of each part that the device holds, such as the weights of the target, and
            the bytes of memory that the device needs (`needs`). These are more than the sum of the
            parts, because the inference engine leaves a share of the memory unused.

    Returns:
        For example `target 15 GiB + draft 1 GiB = 16 GiB: fits in 18 GiB; room for 120k tokens of
        context, 8k fewer than without the draft`.
    """
    parts = _format_parts(budget.parts)
    needs = _format_gib(budget.needs)
    if not budget.fits:
        # `budget.tensor_parallel` is the number of devices that would suffice; None if no allowed
        # number does.
        num_devices = budget.tensor_parallel or "no number of"
        return f"{parts}: needs {needs}; fits on {num_devices} devices (serving.tensor_parallel)"

    # `budget.room` is how many tokens of context fit into the memory, and `budget.cost` is how many
    # more would fit without the draft.
    room = (
        "" if budget.room is None else f"; room for {format_short(budget.room)} tokens of context"
    )
    cost = f", {format_short(budget.cost)} fewer than without the draft" if budget.cost else ""
    return f"{parts}: fits in {needs}{room}{cost}"
