"""The short keys of the command line, and how arguments become the keys of a recipe."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from specdistill.common.errors import ReportedError
from specdistill.common.terminal import JSON, QUIET_FLAG

# Arguments that ask for help, and are no keys.
HELP = {"-h", "--help"}
# The beginning of an argument that is a key or an option. Any other argument may continue a list
# that the shell has split.
NEXT_KEY = re.compile(r"[\w.]+=|-")
NO_SHORTHANDS: Mapping[str, str] = {}
# Every command that takes a target accepts `target` for `target.model`.
TARGET = {"target": "target.model"}
# Short keys of `specdistill eval`.
SHORTHANDS = {
    **TARGET,
    "draft": "eval.draft",
    "suite": "eval.suite",
    "output_dir": "eval.output_dir",
    "quick": "eval.quick",
}
TRAIN = {**TARGET, "suite": "eval.suite", "output_dir": "train.output_dir"}  # also of data
# `compare` has the keys of `eval:` without their prefix; `eval.*` is accepted, too.
COMPARE = {**TARGET, "eval.*": "*"}


def select_recipe_keys(
    arguments: Sequence[str], shorthands: Mapping[str, str] = NO_SHORTHANDS
) -> list[str]:
    """Return the key=value arguments that belong to the recipe, with short keys written out.

    For example, `suite=chat` becomes `eval.suite=chat`. A list or mapping that the shell has split
    at its spaces is joined again.

    Args:
        arguments: the arguments of the command line.
        shorthands: the full key of each short key.
    """
    keys: list[str] = []
    for argument in arguments:
        # If the brackets of the previous key are still open, and this argument is no new key, it
        # continues the list or mapping of the previous key.
        if keys and _has_open_brackets(keys[-1]) and NEXT_KEY.match(argument) is None:
            keys[-1] += f" {argument}"
            continue

        # Options such as `--help` and `debug` are no keys of a recipe.
        key, separator, value = argument.partition("=")
        if argument in {*HELP, JSON, QUIET_FLAG} or key == "debug":
            continue
        keys.append(f"{_expand_short_key(key, shorthands)}{separator}{value}")
    return keys


def _has_open_brackets(argument: str) -> bool:
    """Return whether an argument's value is a list or mapping that is not closed yet: `key=[a,`."""
    return any(
        f"={opening}" in argument and argument.count(opening) > argument.count(closing)
        for opening, closing in ("[]", "{}")
    )


def add_defaults(keys: Sequence[str], defaults: Sequence[str]) -> list[str]:
    """Put default arguments before the keys, unless the keys name a recipe.

    If the keys name a recipe, the defaults are left out: as arguments they would override the
    values of the recipe.
    """
    has_recipe = any(key.startswith("recipe=") for key in keys)
    return list(keys) if has_recipe else [*defaults, *keys]


def _expand_short_key(key: str, shorthands: Mapping[str, str]) -> str:
    """Return the full key that a short key stands for; any other key is returned unchanged.

    With `shorthands={"suite": "eval.suite"}`, for example, `suite` becomes `eval.suite`. With
    `shorthands={"eval.*": "*"}`, every key that begins with `eval.` loses this prefix, so that
    `eval.suite` becomes `suite`.
    """
    for short_key, full_key in shorthands.items():
        if key == short_key:
            return full_key

        # A short key that ends with `*` stands for all keys with the same prefix.
        prefix = short_key.removesuffix("*")
        if short_key.endswith("*") and key.startswith(prefix):
            return full_key.removesuffix("*") + key.removeprefix(prefix)
    return key


@contextmanager
def rename_keys_as_typed(arguments: Sequence[str], shorthands: Mapping[str, str]) -> Iterator[None]:
    """Rename keys in errors to the names that the user typed, such as `eval.suite` to `suite`.

    This is a context manager around the code that reads the arguments.
    """
    try:
        yield
    except ReportedError as error:
        typed_keys = [argument.partition("=")[0] for argument in arguments]
        # If a key was typed under several names, the last one set its value.
        names = {_expand_short_key(typed, shorthands): typed for typed in typed_keys}
        for key, typed in names.items():
            if key != typed:
                error.rename_key(key, typed)
        raise
