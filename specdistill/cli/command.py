"""The parts that commands share: `key=value` arguments, `--help`, errors and exit codes.

The schema of a command's keys is the source of `--help`. A command that fails prints one line and
returns an exit code.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import cleandoc
from typing import TypeVar

from rich.table import Table

from specdistill.common.credentials import check_arguments
from specdistill.common.errors import ExitCode, ResourceError, run_and_report
from specdistill.common.progress import hide_bars_of_transformers
from specdistill.common.terminal import JSON, QUIET_FLAG, Console, print_result
from specdistill.recipe.fields import HelpRow, Section, describe, list_leaves
from specdistill.recipe.load import load_recipe, merge_values
from specdistill.recipe.short_keys import (
    HELP,
    NO_SHORTHANDS,
    add_defaults,
    rename_keys_as_typed,
    select_recipe_keys,
)

R = TypeVar("R", bound=Section)

# Arguments that every command takes, and their help.
COMMON_ARGUMENTS = {
    "recipe=NAME": (
        "read keys from a YAML file (a path, or a name under recipes/); key=value overrides it"
    ),
    JSON: "print the result as one line of JSON",
    QUIET_FLAG: "print only results and errors",
    "debug=true": "show the traceback of an error",
}


def run(
    main: Callable[[R], ExitCode | None],
    schema: type[R],
    arguments: list[str] | None = None,
    *,
    shorthands: Mapping[str, str] = NO_SHORTHANDS,
    without_recipe: Sequence[str] = (),
) -> int:
    """Load a recipe from the command line and run `main` on it.

    The scripts of the repository call this function at their end: `sys.exit(run(main, Recipe))`.
    The verbs of the command `specdistill` are run by `specdistill.cli.main` instead.

    Args:
        main: the function of the script, which is called with the recipe. It returns an exit code,
            or None for success. `--help` prints the docstring of the module that defines it.
        schema: the class of the recipe.
        arguments: the arguments of the command; None for those of the command line.
        shorthands: key that the user may type -> recipe key. {"target": "target.model"} lets
            `target=pico` stand for `target.model=pico`. {"eval.*": "*"} lets `eval.suite=pico`
            stand for `suite=pico`, for a schema that has the keys of `eval` without this prefix.
        without_recipe: `key=value` arguments for a command without `recipe=`. They set required
            keys, so that the user need not type them. The user's arguments come after them and
            override them.

    Returns:
        The exit code.
    """
    arguments = sys.argv[1:] if arguments is None else arguments

    def command() -> ExitCode:
        """Print the help, or run the script; `run_and_report` reports the errors of either."""
        if HELP & set(arguments):
            # The globals of a function are those of its module.
            print_help(main.__globals__.get("__doc__") or "", [schema], arguments, shorthands)
            return ExitCode.DONE
        hide_bars_of_transformers()
        check_arguments(arguments)

        # Load the recipe, and run the script with the recipe.
        keys = add_defaults(select_recipe_keys(arguments, shorthands), without_recipe)
        with report_keys_as_typed(arguments, shorthands):
            return main(load_recipe(schema, keys)) or ExitCode.DONE

    return run_and_report(command, arguments)


@contextmanager
def report_keys_as_typed(arguments: Sequence[str], shorthands: Mapping[str, str]) -> Iterator[None]:
    """Rewrite the errors that leave a `with` block for the user of a command.

    The errors then name keys as the user typed them, for example `target` for `target.model`. An
    out-of-memory error of torch becomes an error that says what to do.

    Args:
        arguments: the arguments of the command.
        shorthands: key that the user may type -> recipe key.

    Raises:
        ResourceError: if the memory of the accelerator is full.
    """
    try:
        with rename_keys_as_typed(arguments, shorthands):
            yield
    # Catch torch.OutOfMemoryError without importing torch, which is slow. If nothing has imported
    # torch, the empty tuple catches no error.
    except getattr(sys.modules.get("torch"), "OutOfMemoryError", ()) as error:
        raise ResourceError(
            f"the accelerator's memory is full ({error})",
            next_step="lower the batch size or the sequence lengths",
        ) from error


def print_help(
    introduction: str,
    schemas: Sequence[type[Section]],
    arguments: Sequence[str],
    shorthands: Mapping[str, str] = NO_SHORTHANDS,
    common: Sequence[str] = (),
) -> None:
    """Print the help of a command: an introduction, and its keys with meaning, type and default.

    Args:
        introduction: the docstring of the command.
        schemas: the classes whose fields are the keys of the command.
        arguments: the arguments of the command. With `all`, all keys are printed. With
            `method=NAME`, or with a recipe that sets the method, the keys of all other methods are
            left out.
        shorthands: key that the user may type -> recipe key.
        common: the most used keys. Without `all`, only these are printed. If `common` is empty, all
            keys are printed.
    """
    console = Console()
    # Only the most used keys are listed, unless the user asks for all.
    is_short = bool(common) and "all" not in arguments

    # Collect a row (key, type, default, meaning) for each key. `list_leaves` lists the keys of one
    # method: the one that the arguments name, else the default method. `describe` lists the keys of
    # all methods.
    values = merge_values(
        [argument for argument in select_recipe_keys(arguments, shorthands) if "=" in argument]
    )
    lists_one_method = is_short or "method" in values
    rows: list[HelpRow] = []
    for schema in schemas:
        rows += (
            list_leaves([schema.select_schema(values)]) if lists_one_method else describe(schema)
        )
    if is_short:
        rows = [row for row in rows if row.key in common]

    # With --json the help is a list of keys. Otherwise it begins with the docstring.
    names = ("key", "type", "default", "help")
    print_result([dict(zip(names, row, strict=True)) for row in rows])
    console.print(cleandoc(introduction), soft_wrap=True)

    # Print one table for each section of the recipe, and one for the keys without a section.
    groups: dict[str, list[HelpRow]] = {}
    for row in rows:
        section, dot, _ = row.key.partition(".")
        groups.setdefault(section if dot else "keys (key=value)", []).append(row)
    for title, group in groups.items():
        _print_keys(title, group, console)

    # Print the short keys, and the arguments that every command takes. `*` in a short key stands
    # for any key.
    print()
    lines = {
        short.replace("*", "KEY"): f"short for {key.replace('*', 'KEY')}"
        for short, key in shorthands.items()
    }
    lines |= COMMON_ARGUMENTS
    if is_short:
        lines["--help all"] = (
            "list all keys, of all methods; with method=NAME: those of that method"
        )
    for name, meaning in lines.items():
        print(f"  {name:11} {meaning}")


def _print_keys(title: str, rows: Sequence[HelpRow], console: Console) -> None:
    """Print a table of a section's keys, each with its meaning, type and default.

    Args:
        title: the name of the section.
        rows: the name, type, default and meaning of each key.
        console: the console to print to.
    """
    grid = Table.grid(padding=(0, 1), pad_edge=True)
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column()
    for key, kind, default, meaning in rows:
        # The default "null" only means that the key need not be set, so the help does not show it.
        suffixes = {"null": "", "required": ", required"}
        value = kind.replace(" or null", "") + suffixes.get(default, f"; default {default}")
        grid.add_row(f" {key}", f"{meaning} [{value}]")
    console.print(f"\n{title}", style="bold")
    console.print(grid)
