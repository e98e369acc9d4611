"""What every command shares: `key=value` arguments, `--help` from the recipe's dataclasses, one line and an exit code for a failure."""

import sys
from collections.abc import Callable
from typing import TypeVar

from specdistill.errors import ExitCode, ResourceError, UserError
from specdistill.recipe import describe, load_recipe

R = TypeVar("R")


def run(main: Callable[[R], ExitCode | None], schema: type[R], arguments: list[str] | None = None) -> ExitCode:
    """Load a recipe from the command line and run `main` on it; `debug=true` shows the traceback of a user's mistake.

    Returns the exit code; scripts end with `sys.exit(run(main, Recipe))`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print_help(main.__globals__.get("__doc__") or "", schema)
        return ExitCode.DONE
    debug = "debug=true" in arguments
    try:
        recipe = load_recipe(schema, [argument for argument in arguments if not argument.startswith("debug=")])
        return main(recipe) or ExitCode.DONE
    except (UserError, ResourceError) as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR if isinstance(error, UserError) else ExitCode.RESOURCE_ERROR


def print_help(introduction: str, schema: type) -> None:
    """The command's docstring, then its keys with type, default and meaning."""
    print(introduction.strip(), "\n\nKeys (key=value):")
    for key, kind, default, text in describe(schema):
        print(f"  {key:34} {text} [{kind}; default {default}]")
    print(f"  {'debug':34} show the traceback of a user's mistake [bool; default false]")
