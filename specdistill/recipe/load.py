"""Load recipes from files and command lines.

OmegaConf merges a YAML file and `key=value` overrides. pydantic validates the result.
"""

import io
import json
import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, reduce
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from specdistill.common.credentials import check_no_secret, remove_places
from specdistill.common.documents import MAX_INTEGER, check_yaml, parse_yaml, read_text
from specdistill.common.errors import UserError, convert_errors, join_lines, make_unused_key_error
from specdistill.common.project import RECIPES, find_yaml
from specdistill.recipe.fields import (
    Section,
    describe,
    find_changed_key,
    find_condition,
    find_default,
    format_value,
    list_every_key,
)
from specdistill.recipe.key_errors import explain_errors, format_place, list_required_keys

S = TypeVar("S", bound=Section)

REQUIRED_MARK = "???"  # OmegaConf's mark for a value that the command line must give
# Variables that ${oc.env:…} may read. A recipe may come from anybody, and the values that it reads
# are written into the run's record.
RECORDED_VARIABLES = ("HOME", "HOSTNAME", "SLURM_JOB_ID", "TMPDIR", "USER")
# Limit of ${…}. Each value that names another one twice doubles it, so that 20 interpolations make
# a text about 1,000 times as long, and 60 would fill the memory.
MAX_INTERPOLATIONS = 20
# Keys that run somebody else's code. The user must type them: a file alone cannot set them.
CONSENT = ("target.trust_remote_code", "eval.engine_command")
# Arguments for a command that only reads files, whatever code a run's recipe was allowed to run.
ARGUMENTS_WITHOUT_CODE = ("target.trust_remote_code=false", "eval.engine_command=null")


def _resolve_environment(name: str, *default: object) -> object:
    """Return the value of an environment variable that a recipe reads by ${oc.env:NAME}.

    Args:
        name: the name of the variable.
        *default: the default, if the recipe has one: ${oc.env:NAME,default}.

    Raises:
        ValueError: if the variable is not among RECORDED_VARIABLES, which hold no secrets, or if it
            is not set and has no default.
    """
    # Other variables may hold a secret, such as a token. The values are recorded with the run.
    if name not in RECORDED_VARIABLES:
        raise ValueError(
            f"the environment variable {name}, but a recipe may only read"
            f" {', '.join(RECORDED_VARIABLES)}; let the shell insert any other variable on the"
            " command line"
        )
    if name not in os.environ and not default:
        raise ValueError(f"the environment variable {name}, which is not set")
    return os.environ.get(name, *default)


OmegaConf.register_resolver("oc.env", _resolve_environment, replace=True)


def load_recipe(schema: type[S], arguments: Sequence[str]) -> S:
    """Build a recipe from `recipe=… key=value …` command-line arguments.

    A list may be given without brackets, because shells expand brackets.

    Args:
        schema: the class of the recipe.
        arguments: the arguments.

    Raises:
        UserError: for anything the user got wrong.
    """
    # Merge the values of the recipe's file and of the command line, and validate them.
    arguments = [
        _add_brackets(argument, _build_bare_list_pattern(schema)) for argument in arguments
    ]
    recipe = validate_recipe(schema, merge_values(arguments))

    # Keys that let somebody else's code run must be typed by the user. A recipe file, which may
    # come from anybody, must not set them. Without a file, such a key has been set inside a typed
    # section, as in `target={trust_remote_code: true}`, which is refused, too.
    typed_values = dict(argument.split("=", 1) for argument in arguments)
    for argument in list_consent_keys(recipe.model_dump()):
        key, _, value = argument.partition("=")
        if key not in typed_values:
            raise UserError(
                key,
                got=f"{value} in {typed_values.get('recipe', 'a section')}",
                expected=(
                    "the key on the command line, because it runs code of others. Read the code,"
                    f" then add {shlex.quote(argument)}"
                ),
            )

    # A broken GGUF file is reported now, before minutes of work.
    check_gguf_files(flatten_keys(recipe.model_dump()))
    return recipe


def check_gguf_files(values: Iterable[tuple[str, object]]) -> None:
    """Raise UserError for the first (key, value) that names a broken GGUF file.

    Only the metadata of the files is read, which takes a second.
    """
    for key, value in values:
        if isinstance(value, str) and value.endswith(".gguf") and Path(value).is_file():
            # Imported only here, because numpy is slow to import and rarely needed.
            from specdistill.common.gguf_files import check_gguf

            check_gguf(Path(value), key)


def _add_brackets(argument: str, bare: re.Pattern[str] | None) -> str:
    """Add the missing brackets around a list: `key=a,b` becomes `key=[a,b]`.

    Args:
        argument: the `key=value` argument.
        bare: a pattern for arguments whose list has no brackets (see `_build_bare_list_pattern`);
            None if no key takes a list.
    """
    # `data.source` takes a list, or a single name, which may be the path of a file with a comma. So
    # for this key a value with a comma is a list, unless such a file exists. A value that begins
    # with a bracket, a brace or an interpolation (`$`) is not changed.
    key, _, value = argument.partition("=")
    if key == "data.source":
        is_bare = "," in value and value[0] not in "[{$" and not Path(value).exists()
    else:
        is_bare = bare is not None and bare.fullmatch(argument) is not None
    return f"{key}=[{value}]" if is_bare else argument


@cache
def _build_bare_list_pattern(schema: type[Section]) -> re.Pattern[str] | None:
    """Return a pattern for arguments whose list has no brackets, such as `key=a,b`.

    The groups of the pattern are the key and the value. The value must not be empty or null, and
    must not begin with a bracket or an interpolation (`$`).

    Returns:
        The pattern; None if no key of the schema takes a list.
    """
    list_keys = [key for key, kind, *_ in describe(schema) if kind.startswith("list of ")]
    if not list_keys:
        return None
    return re.compile(rf"({'|'.join(map(re.escape, list_keys))})=(?!\[|\$|null$|$)(.*)", re.DOTALL)


def list_consent_keys(values: Mapping[str, object]) -> list[str]:
    """Return `key=value` for each set key that runs somebody else's code.

    The user must type these keys, which `CONSENT` lists. A key that is false or null is left out.
    """
    flat_values = dict(flatten_keys(values))
    return [f"{key}={json.dumps(flat_values[key])}" for key in CONSENT if flat_values.get(key)]


def merge_values(arguments: Sequence[str]) -> dict[str, object]:
    """Merge the values of a recipe's file with those of the command line, which override them.

    Interpolations `${…}` are resolved. The values are not validated yet. If the command line sets
    the length of the training in epochs or in steps, it replaces the file's length in the other
    unit.

    Raises:
        UserError: if an argument is not of the form `key=value`, if the file cannot be read, if a
            value is a secret, or if an interpolation cannot be resolved.
    """
    # The layers are the values of the file, if there is one, and those of the command line.
    file, overrides = _parse_arguments(arguments)
    try:
        layers = (
            overrides
            if file is None
            else [_read_yaml(find_yaml(file, RECIPES, "recipe")), *overrides]
        )

        # A value that names another one twice doubles it. If such values refer to each other, the
        # text grows exponentially, so the number of interpolations is limited.
        num_interpolations = sum(str(layer).count("${") for layer in layers)
        if num_interpolations > MAX_INTERPOLATIONS:
            raise UserError(
                "recipe",
                got=f"{num_interpolations} interpolations",
                expected=f"at most {MAX_INTERPOLATIONS} of ${{…}}",
            )

        # Merge the layers, and resolve the interpolations.
        merged = OmegaConf.create(
            reduce(_merge_two_values, map(OmegaConf.to_container, layers), {})
        )
        values = cast(dict[str, Any], OmegaConf.to_container(merged, resolve=True))
    except OmegaConfBaseException as error:
        reason = join_lines(str(error).split("\n")[0]).removeprefix(
            "ValueError raised while resolving interpolation: "
        )
        # OmegaConf says `Interpolation key 'a.b' not found`. Say "${a.b}, which names no key".
        missing_key = r"^Interpolation key '(.*)' not found$"
        reason = re.sub(missing_key, r"${\1}, which names no key", reason)
        raise UserError(
            error.full_key or "recipe", got=reason, expected="a value, or ${another.key}"
        ) from error

    # A training has a number of epochs or of steps. If the user typed only one of the two, drop the
    # other one, which the file may set. `max_steps=-1` sets no number, and drops nothing.
    typed_keys: set[str] = set()
    for layer in overrides:
        typed_values = cast(dict[str, object], OmegaConf.to_container(layer))
        typed_keys.update(key for key, _ in flatten_keys(typed_values))
    has_epochs = "train.num_train_epochs" in typed_keys
    has_steps = "train.max_steps" in typed_keys
    train = values.get("train")
    if isinstance(train, dict) and has_epochs and not has_steps:
        train.pop("max_steps", None)
    if isinstance(train, dict) and has_steps and not has_epochs and train["max_steps"] != -1:
        train.pop("num_train_epochs", None)
    _check_values(values)
    return values


def _parse_arguments(arguments: Sequence[str]) -> tuple[str | None, list[DictConfig]]:
    """Split arguments into the name of the recipe's file and the values that override the file.

    Returns:
        The value of `recipe=`, or None without it, and a config for each other argument.

    Raises:
        UserError: if an argument is not of the form `key=value`, or if a value is no valid YAML.
    """
    # Take each argument together with the one that follows it; "" follows the last argument.
    file = None
    overrides = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        key, separator, value = argument.partition("=")

        # For an option such as `--max-steps 5`, the error shows the form that works here,
        # `max_steps=5`. The value may be the argument that follows.
        if argument.startswith("-"):
            typed = f"{key.lstrip('-').replace('-', '_')}={value or following or 'VALUE'}"
            raise UserError(
                key,
                got="an unknown option",
                text=f"unknown option {key}. Options are key=value: {typed}",
            )
        if not separator or not re.fullmatch(r"[A-Za-z_][\w.]*", key):
            raise UserError(
                argument,
                got="an argument without key=",
                expected="key=value, e.g. recipe=pico/eagle3",
            )
        if key == "recipe":
            file = value
            continue

        # OmegaConf parses the value as YAML, after it was checked for YAML that is not allowed.
        try:
            check_yaml(value)
            overrides.append(OmegaConf.from_dotlist([argument]))
        except (yaml.YAMLError, ValueError, OmegaConfBaseException) as error:
            raise UserError(
                key, got=repr(value), expected=_describe_expected_value(argument)
            ) from error
    return file, overrides


def _describe_expected_value(argument: str) -> str:
    """Return the text after "expected" in the error for a value that is no valid YAML.

    If brackets are not closed, the shell has probably cut the value at a space. The text then shows
    how to quote the argument.
    """
    value = argument.partition("=")[2]
    for opening, closing in ("[]", "{}"):
        missing = value.count(opening) - value.count(closing)
        if value.startswith(opening) and missing > 0:
            return (
                "closing brackets; quote it for the shell:"
                f" {shlex.quote(argument + closing * missing)}"
            )
    return "a YAML value"


def _merge_two_values(below: Any, above: Any) -> Any:
    """Merge two values of a key: two mappings key by key; otherwise `above` replaces `below`.

    OmegaConf's own merge is not used, because it refuses to replace a list by a mapping.
    """
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    merged_keys = {key: _merge_two_values(below.get(key), value) for key, value in above.items()}
    return {**below, **merged_keys}


def load_own_keys(schema: type[S], arguments: Sequence[str]) -> tuple[S, list[str]]:
    """Build a section from those arguments whose keys belong to it.

    Returns:
        The section, and the arguments whose keys do not belong to it.
    """
    own_arguments = [
        argument for argument in arguments if argument.partition("=")[0] in schema.model_fields
    ]
    return load_recipe(schema, own_arguments), [
        argument for argument in arguments if argument not in own_arguments
    ]


def validate_recipe(schema: type[S], values: Mapping[str, object], prefix: str = "") -> S:
    """Check the values of a section, and return the section as an object of its class.

    Args:
        schema: the class of the section, for example a recipe.
        values: the values of its keys.
        prefix: text that errors put before the keys, for a section that is in another file.

    Raises:
        UserError: if a key is unknown or missing, if a value is of a wrong type or size, or if a
            key is set that has no effect with the other settings.
    """
    if not isinstance(values, Mapping):
        raise UserError(
            prefix.rstrip(".: ") or "recipe",
            got=repr(values),
            expected="a section with keys of its own",
        )

    # A recipe's method decides which schema its values are checked against. Required keys that
    # still have the mark `???` count as missing.
    chosen = schema.select_schema(values)
    try:
        recipe = chosen.model_validate(_drop_marked_keys(values, list_required_keys(chosen)))
    except ValidationError as error:
        raise explain_errors(schema, chosen, error.errors(), prefix) from error
    _check_no_unused_keys(recipe, prefix)
    assert isinstance(recipe, schema)
    return recipe


def flatten_keys(node: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield each key of nested mappings in dotted form, such as `eval.suite`, with its value.

    An empty mapping is yielded as a value.
    """
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from flatten_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def format_recipe(recipe: Section | dict[str, object], *, public: bool = False) -> str:
    """Return a recipe as YAML with all of its keys, from which `load_recipe` reads the same recipe.

    Args:
        recipe: the recipe, or its values.
        public: whether to leave out the names of this machine's folders.
    """
    values = recipe if isinstance(recipe, dict) else list_every_key(recipe)
    return OmegaConf.to_yaml(OmegaConf.create(remove_places(values) if public else values))


def _read_yaml(path: Path) -> DictConfig:
    """Read the YAML file of a recipe. An empty file gives a config without keys.

    Raises:
        UserError: if the file cannot be read, contains a secret, or holds anything but keys.
    """
    with convert_errors(
        (yaml.YAMLError, ValueError, OSError), "recipe", path, "a readable YAML file"
    ):
        # Look for secrets before parsing, because the YAML parser's errors quote the line.
        text = read_text(path)
        check_no_secret("recipe", text)
        if not isinstance(parse_yaml(text) or {}, dict):
            raise UserError(
                "recipe", got=f"{path}, which holds no keys", expected="a YAML file with keys"
            )
        return cast(DictConfig, OmegaConf.load(io.StringIO(text)))


def _check_values(node: object, *place: int | str) -> None:
    """Raise UserError if a value is a secret, or an integer that is too large for any count.

    Args:
        node: a value, or a mapping or list whose values are checked one by one.
        *place: the keys and list indices that lead to the value, for the error.
    """
    if isinstance(node, Mapping | list):
        items = node.items() if isinstance(node, Mapping) else enumerate(node)
        for name, value in items:
            _check_values(value, *place, name)
    elif isinstance(node, str):
        check_no_secret(format_place(place), node)
    elif isinstance(node, int) and abs(node) > MAX_INTEGER:
        raise UserError(
            format_place(place),
            got=f"an integer of {len(str(node))} digits",
            expected=f"at most {MAX_INTEGER:,}",
        )


def _drop_marked_keys(node: object, required: Collection[str], prefix: str = "") -> object:
    """Remove required keys whose value is OmegaConf's mark for a missing value, `???`.

    pydantic then reports these keys as missing. A key that has a default keeps the mark as a value.

    Args:
        node: the values; a value that is no mapping is returned unchanged.
        required: the required keys, in dotted form such as `target.model`.
        prefix: goes before the keys of `node`, such as `target.`.
    """
    if not isinstance(node, Mapping):
        return node
    return {
        str(name): _drop_marked_keys(value, required, f"{prefix}{name}.")
        for name, value in node.items()
        if value != REQUIRED_MARK or f"{prefix}{name}" not in required
    }


def _check_no_unused_keys(values: Section, prefix: str) -> None:
    """Raise UserError for a key that was set although it has no effect with the other settings."""
    # A key with a condition has no effect if the condition does not hold. It must then have its
    # default.
    for name, field in type(values).model_fields.items():
        value = getattr(values, name)
        condition = find_condition(field)
        default = find_default(field)
        if condition and value != default and not condition.holds(values):
            key, changed_value = find_changed_key(f"{prefix}{name}", value, default)
            raise make_unused_key_error(
                key, format_value(changed_value), f"only used {condition.text}"
            )

        # Check the keys of inner sections, too, and of sections in lists.
        if isinstance(value, Section):
            _check_no_unused_keys(value, f"{prefix}{name}.")
        for index, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, Section):
                _check_no_unused_keys(item, f"{prefix}{name}[{index}].")
