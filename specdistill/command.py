"""What every command shares: `key=value` arguments, `--help` from the recipe's schema, one line and an exit code for a failure."""

import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import cleandoc
from itertools import chain
from typing import TypeVar

from rich.table import Table

from specdistill.credentials import check_arguments
from specdistill.errors import ExitCode, ResourceError, reported
from specdistill.progress import hide_bars_of_transformers
from specdistill.recipe.fields import Section, describe, leaves
from specdistill.recipe.load import load_recipe, merged
from specdistill.terminal import JSON, QUIET, Console, result

R = TypeVar("R", bound=Section)

HELP = {"-h", "--help"}
NO_SHORTHANDS: Mapping[str, str] = {}
TARGET = {"target": "target.model"}
SHORTHANDS = {
    **TARGET,
    "draft": "eval.draft",
    "suite": "eval.suite",
    "output_dir": "eval.output_dir",
}  # of eval
COMPARE = {**TARGET, "eval.*": "*"}
# Of every command.
EVERYWHERE = {
    "recipe=NAME": "a YAML file of keys, or a name under recipes/; key=value overrides it",
    JSON: "print the result as one line of JSON",
    QUIET: "print results and errors only",
    "debug=true": "show the traceback of a user's error",
}


def run(
    main: Callable[[R], ExitCode | None],
    schema: type[R],
    arguments: list[str] | None = None,
    *,
    shorthands: Mapping[str, str] = NO_SHORTHANDS,
    without_recipe: Sequence[str] = (),
) -> int:
    """Load a recipe from the command line and run `main` on it; `debug=true` shows the traceback of a user's error.

    shorthands: short key -> recipe key, e.g. {"target": "target.model"} lets `target=pico` stand for `target.model=pico`; `eval.*` -> `*`
    drops a section's name.
    without_recipe: arguments that come first when there is no `recipe=`, for keys that only recipes need to set.

    Returns the exit code; scripts end with `sys.exit(run(main, Recipe))`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments

    def command() -> ExitCode:
        if HELP & set(arguments):
            print_help(main.__globals__.get("__doc__") or "", [schema], arguments, shorthands)
            return ExitCode.DONE
        hide_bars_of_transformers()
        check_arguments(arguments)
        given = keys_of(arguments, shorthands)
        first = [] if any(argument.startswith("recipe=") for argument in given) else without_recipe
        try:
            return main(load_recipe(schema, [*first, *given])) or ExitCode.DONE
        except getattr(sys.modules.get("torch"), "OutOfMemoryError", ()) as error:
            what = f"the accelerator's memory is full ({error})"
            raise ResourceError(what, next_step="lower the batch size or the lengths") from error

    return reported(command, arguments)


def print_help(
    introduction: str,
    schemas: Sequence[type[Section]],
    arguments: Sequence[str],
    shorthands: Mapping[str, str] = NO_SHORTHANDS,
    common: Sequence[str] = (),
) -> None:
    """The command's docstring, and its keys by section with meaning, type and default: those in `common`, or all with `all`.

    arguments: of the command; with a method among them, or in their recipe, the keys of others are left out.
    """
    console, is_short = Console(), bool(common) and "all" not in arguments
    values = merged([argument for argument in keys_of(arguments, shorthands) if "=" in argument])
    of_one = is_short or "method" in values
    tables = (
        leaves(schema.schema_for(values)) if of_one else describe(schema) for schema in schemas
    )
    rows = [row for row in chain.from_iterable(tables) if not is_short or row[0] in common]
    result([dict(zip(("key", "type", "default", "help"), row, strict=True)) for row in rows])
    console.print(cleandoc(introduction), soft_wrap=True)
    groups: dict[str, list[tuple[str, str, str, str]]] = {}
    for row in rows:
        groups.setdefault(
            row[0].partition(".")[0] if "." in row[0] else "keys (key=value)", []
        ).append(row)
    for title, group in groups.items():
        grid = Table.grid(padding=(0, 1), pad_edge=True)
        grid.add_column(no_wrap=True, style="bold")
        grid.add_column()
        for key, kind, default, meaning in group:
            value = kind.replace(" or null", "") + {"null": "", "required": ", required"}.get(
                default, f"; default {default}"
            )
            grid.add_row(f" {key}", f"{meaning} [{value}]")
        console.print(f"\n{title}", style="bold")
        console.print(grid)
    print()
    more = (
        {"--help all": "list all keys, of all methods; with method=NAME: those of that method"}
        if is_short
        else {}
    )
    for name, meaning in {
        **{short: f"short for {key}" for short, key in shorthands.items()},
        **EVERYWHERE,
        **more,
    }.items():
        print(f"  {name:11} {meaning}")


def keys_of(arguments: Sequence[str], shorthands: Mapping[str, str] = NO_SHORTHANDS) -> list[str]:
    """The key=value arguments that belong to the recipe, short keys written out."""
    keys = []
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if argument in {*HELP, JSON, QUIET} or key == "debug":
            continue
        for short, whole in shorthands.items():
            if key == short or (short.endswith("*") and key.startswith(short[:-1])):
                key = whole.removesuffix("*") + key.removeprefix(short.removesuffix("*"))
                break
        keys.append(f"{key}{separator}{value}")
    return keys
