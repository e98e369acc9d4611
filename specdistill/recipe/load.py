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
    """Resolve ${oc.env:NAME} and ${oc.env:NAME,default}.

    Raises:
        ValueError: for a variable that is not RECORDED_VARIABLES, or that is not set and has no
            default.
    """
    # Refuse a variable that may hold a secret, such as a token.
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

    Raises:
        UserError: for anything the user got wrong.
    """
    # Merge and validate the values.
    arguments = [
        _add_brackets(argument, _build_bare_list_pattern(schema)) for argument in arguments
    ]
    recipe = validate_recipe(schema, merge_values(arguments))

    # Keys that let foreign code run count only if the user typed them.
    typed = dict(argument.split("=", 1) for argument in arguments)
    for argument in list_consent_keys(recipe.model_dump()):
        key, _, value = argument.partition("=")
        if key not in typed:
            raise UserError(
                key,
                got=f"{value} in {typed.get('recipe', 'a section')}",
                expected=(
                    f"it on the command line, after you have read the code: {shlex.quote(argument)}"
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
            # The import is here, and not above, because it imports numpy.
            from specdistill.common.gguf_files import check_gguf

            check_gguf(Path(value), key)


def _add_brackets(argument: str, bare: re.Pattern[str] | None) -> str:
    """Return an argument with brackets around its list: `key=a,b` becomes `key=[a,b]`.

    Args:
        argument: the `key=value` argument.
        bare: matches an argument whose list has no brackets (see `_build_bare_list_pattern`).
    """
    # A value is bare if it has no brackets. Values that may be null, or that are interpolated, are
    # not.
    key, _, value = argument.partition("=")
    if key == "data.source":  # This key also takes a single name.
        is_bare = "," in value and value[0] not in "[{$" and not Path(value).exists()
    else:
        is_bare = bare is not None and bare.fullmatch(argument) is not None
    return f"{key}=[{value}]" if is_bare else argument


@cache
def _build_bare_list_pattern(schema: type[Section]) -> re.Pattern[str] | None:
    """Return a pattern that matches an argument whose list has no brackets, such as `key=a,b`.

    The groups of the pattern are the key and the value. None if no key of the schema takes a list.
    """
    list_keys = [key for key, kind, *_ in describe(schema) if kind.startswith("list of ")]
    if not list_keys:
        return None
    return re.compile(rf"({'|'.join(map(re.escape, list_keys))})=(?!\[|\$|null$|$)(.*)", re.DOTALL)


def list_consent_keys(values: Mapping[str, object]) -> list[str]:
    """Return `key=value` for each key of CONSENT that is set to something, as a user types it."""
    # A key that is false or null needs no consent.
    flat_values = dict(flatten_keys(values))
    return [f"{key}={json.dumps(flat_values[key])}" for key in CONSENT if flat_values.get(key)]


def merge_values(arguments: Sequence[str]) -> dict[str, object]:
    """Merge the values of a recipe's file with those of the command line, which override them.

    Interpolations are resolved. Nothing is validated yet.

    Raises:
        UserError: for arguments that are no `key=value`, and for a file that cannot be read. Also
            for a secret among the values, and for a variable of the environment that is not
            RECORDED_VARIABLES.
    """
    file, overrides = _parse_arguments(arguments)
    try:
        layers = (
            overrides
            if file is None
            else [_read_yaml(find_yaml(file, RECIPES, "recipe")), *overrides]
        )

        # Interpolations may refer to each other, so their number is limited.
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
        raise UserError(
            error.full_key or "recipe",
            got=re.sub(
                r"^Interpolation key '(.*)' not found$", r"${\1}, which names no key", reason
            ),
            expected="a value, or ${another.key}",
        ) from error

    # Training stops after max_steps, whatever the number of epochs. If the user typed only a number
    # of epochs, the max_steps of the file is dropped.
    typed_keys = {argument.partition("=")[0] for argument in arguments}
    if "train.num_train_epochs" in typed_keys and "train.max_steps" not in typed_keys:
        values["train"].pop("max_steps", None)
    _check_values(values)
    return values


def _parse_arguments(arguments: Sequence[str]) -> tuple[str | None, list[DictConfig]]:
    """Split arguments into the name of the recipe's file and the values that override the file.

    Returns:
        The value of `recipe=`, or None without it, and a config for each other argument.

    Raises:
        UserError: for arguments that are no `key=value`, and for values that are no YAML.
    """
    file = None
    overrides = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        key, separator, value = argument.partition("=")

        # Options in the form of other tools are answered with the form that works here.
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
    """Return what errors expect instead of a value that is no YAML.

    If brackets are not closed, the shell has probably cut the value at a space.
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
    """Merge two values of a key: mappings key by key; otherwise `above` replaces `below`.

    OmegaConf would refuse a mapping over a list.
    """
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    merged_keys = {key: _merge_two_values(below.get(key), value) for key, value in above.items()}
    return {**below, **merged_keys}


def load_own_keys(schema: type[S], arguments: Sequence[str]) -> tuple[S, list[str]]:
    """Build a section from the arguments that are keys of it, and return the other arguments."""
    # Divide the arguments by whether the section has their key.
    own_arguments = [
        argument for argument in arguments if argument.partition("=")[0] in schema.model_fields
    ]
    return load_recipe(schema, own_arguments), [
        argument for argument in arguments if argument not in own_arguments
    ]


def validate_recipe(schema: type[S], values: Mapping[str, object], prefix: str = "") -> S:
    """Build a section from its values, after checking all of them.

    Args:
        schema: the schema of the section.
        values: the values of its keys.
        prefix: goes before the keys in errors, for a section that is in another file.

    Raises:
        UserError: for an unknown, missing or mistyped key, and for a key that nothing reads.
    """
    if not isinstance(values, Mapping):
        raise UserError(
            prefix.rstrip(".: ") or "recipe",
            got=repr(values),
            expected="a section with keys of its own",
        )

    # Check the values against the schema of the recipe's method.
    chosen = schema.select_schema(values)
    try:
        recipe = chosen.model_validate(_drop_marked_keys(values, list_required_keys(chosen)))
    except ValidationError as error:
        raise explain_errors(schema, chosen, error.errors(), prefix) from error
    _check_no_unused_keys(recipe, prefix)
    assert isinstance(recipe, schema)
    return recipe


def flatten_keys(node: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (key, value) for every key of nested sections, such as `eval.suite`.

    An empty section counts as a value.
    """
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from flatten_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def format_recipe(recipe: Section | dict[str, object], *, public: bool = False) -> str:
    """Return a resolved recipe as YAML with every key; `load_recipe` reads it back equal.

    Args:
        recipe: the recipe, or its values.
        public: leave out the names of folders of this machine.
    """
    values = recipe if isinstance(recipe, dict) else list_every_key(recipe)
    return OmegaConf.to_yaml(OmegaConf.create(remove_places(values) if public else values))


def _read_yaml(path: Path) -> DictConfig:
    """Read the YAML file of a recipe; raise UserError if it cannot be read or has a secret."""
    with convert_errors(
        (yaml.YAMLError, ValueError, OSError), "recipe", path, "a readable YAML file"
    ):
        # Secrets are checked first, because an error of YAML quotes the line.
        text = read_text(path)
        check_no_secret("recipe", text)
        if not isinstance(parse_yaml(text) or {}, dict):
            raise UserError("recipe", got=f"{path}, which holds no keys", expected="YAML with keys")
        return cast(DictConfig, OmegaConf.load(io.StringIO(text)))


def _check_values(node: object, *place: int | str) -> None:
    """Raise UserError for a secret, and for an integer that is too large for any count."""
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
    """Return values without the required keys whose value is the mark `???`.

    pydantic then reports these keys as missing. A key with a default keeps its mark.
    """
    if not isinstance(node, Mapping):
        # A mark on a required key counts as missing.
        return node
    return {
        str(name): _drop_marked_keys(value, required, f"{prefix}{name}.")
        for name, value in node.items()
        if value != REQUIRED_MARK or f"{prefix}{name}" not in required
    }


def _check_no_unused_keys(values: Section, prefix: str) -> None:
    """Raise UserError for a key that was set although nothing reads it in this recipe."""
    # Compare each key that has a condition with its default.
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
