"""What every command shares: `key=value` arguments, `--help` from the recipe's schema, one line and an exit code for a failure."""

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import TypeVar

from specdistill.credentials import check_arguments
from specdistill.errors import ExitCode, ResourceError, reported
from specdistill.progress import hide_bars_of_transformers
from specdistill.recipe.fields import Section, describe
from specdistill.recipe.load import load_recipe

R = TypeVar("R", bound=Section)

HELP = {"-h", "--help"}
NO_SHORTHANDS: Mapping[str, str] = MappingProxyType({})
TARGET: Mapping[str, str] = MappingProxyType({"target": "target.model"})


def run(
    main: Callable[[R], ExitCode | None],
    schema: type[R],
    arguments: list[str] | None = None,
    *,
    shorthands: Mapping[str, str] = NO_SHORTHANDS,
    without_recipe: Sequence[str] = (),
) -> int:
    """Load a recipe from the command line and run `main` on it; `debug=true` shows the traceback of a user's error.

    shorthands: short key -> recipe key, e.g. {"target": "target.model"} lets `target=pico` stand for `target.model=pico`.
    without_recipe: arguments that come first when there is no `recipe=`, for keys that only recipes need to set.

    Returns the exit code; scripts end with `sys.exit(run(main, Recipe))`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments

    def command() -> ExitCode:
        if HELP & set(arguments):
            print_help(main.__globals__.get("__doc__") or "", schema, shorthands=shorthands)
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

    return reported(command, debug="debug=true" in arguments)


def print_help(introduction: str, *schemas: type[Section], shorthands: Mapping[str, str] = NO_SHORTHANDS) -> None:
    """The command's docstring, then its keys with type, default and meaning."""
    print(introduction.strip(), "\n\nKeys (key=value):")
    for key, kind, default, meaning in chain.from_iterable(map(describe, schemas)):
        print(f"  {key:34} {meaning} [{kind}; default {default}]")
    for short, key in shorthands.items():
        print(f"  {short:34} short for {key}")
    print(f"  {'debug':34} show the traceback of a user's error [bool; default false]")


def keys_of(arguments: Sequence[str], shorthands: Mapping[str, str] = NO_SHORTHANDS) -> list[str]:
    """The key=value arguments that belong to the recipe, short keys written out."""
    keys = []
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if argument not in HELP and key != "debug":
            keys.append(f"{shorthands.get(key, key)}{separator}{value}")
    return keys
