"""Recipes from files and command lines: OmegaConf merges a YAML file and `key=value` overrides, pydantic validates the result.

Its first error becomes one line that names the key and the nearest valid one.
"""

import io
import json
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, reduce
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from specdistill.credentials import check_no_secret, without_places
from specdistill.errors import UserError, nearest, one_line, refusing
from specdistill.files.documents import LARGEST, check_yaml, parse_yaml, read_text
from specdistill.project import RECIPES, find_yaml
from specdistill.recipe.fields import (
    Section,
    default_of,
    describe,
    kind_of,
    leaves,
    read_when_of,
    section_of,
    shown,
)

S = TypeVar("S", bound=Section)

REQUIRED = "???"  # OmegaConf's mark of a value that the command line must give
# Variables that ${oc.env:…} may read. A recipe may come from anybody, and what it reads is written into the run's record.
HARMLESS = ("HOME", "HOSTNAME", "SLURM_JOB_ID", "TMPDIR", "USER")
# Of ${…}: each value that names another one twice doubles it, so that these make a text about 1,000 times as long, and 60 fill a memory.
MOST_INTERPOLATIONS = 20
# What runs somebody's code. A reader gives it: a file alone cannot.
CONSENT = ("target.trust_remote_code", "eval.run_code", "eval.engine_command")
# Arguments of a command that reads files alone, whatever a run's recipe ran.
RUNS_NOTHING = ("target.trust_remote_code=false", "eval.run_code=false", "eval.engine_command=null")
# Names that other tools have for our keys, and for our values.
ALIASES = {
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "train.num_train_epochs"),
    **dict.fromkeys(
        ("batch_size", "train_batch_size"),
        "train.per_device_train_batch_size (to measure: eval.batch_size)",
    ),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "model_max_length"), "data.max_length"),
    **dict.fromkeys(("dataset", "dataset_name", "train_file"), "data.source"),
    **dict.fromkeys(("lr", "learning_rate"), "train.learning_rate"),
    **dict.fromkeys(("llama.cpp", "llama_cpp"), "gguf"),
    **{name: f"train.{name}" for name in ("max_steps", "output_dir", "report_to")},
    "dataset_text_field": "data.columns={text: NAME}",
    "warmup_ratio": "train.warmup_steps, where a number below 1 is a share of the steps",
    "model_name_or_path": "target.model",
}


def _environment(name: str, *default: Any) -> Any:
    """${oc.env:NAME} and ${oc.env:NAME,default}."""
    if name not in HARMLESS:
        readable = f"recipes read {', '.join(HARMLESS)}"
        raise ValueError(
            f"{name} of the environment, of which {readable}; a shell writes out any other on the command line"
        )
    if name not in os.environ and not default:
        raise ValueError(f"{name}, which the environment does not have")
    return os.environ.get(name, *default)


OmegaConf.register_resolver("oc.env", _environment, replace=True)


def load_recipe(schema: type[S], arguments: Sequence[str]) -> S:
    """Build a recipe from `recipe=… key=value …` command-line arguments. Raises UserError for anything the user got wrong.

    A list may be given without brackets, which shells expand.
    """
    bare = _bare_list(schema)
    arguments = [
        bare.sub(r"\1=[\2]", argument) if bare and bare.fullmatch(argument) else argument
        for argument in arguments
    ]
    recipe, typed = (
        validate(schema, merged(arguments)),
        dict(argument.split("=", 1) for argument in arguments),
    )
    for argument in consent(recipe.model_dump()):
        key, _, value = argument.partition("=")
        if key not in typed:
            expected = (
                f"it on the command line, after you have read the code: {shlex.quote(argument)}"
            )
            raise UserError(
                key, got=f"{value} in {typed.get('recipe', 'a section')}", expected=expected
            )
    return recipe


@cache
def _bare_list(schema: type[Section]) -> re.Pattern[str] | None:
    """Matches a list without brackets: its key and what it is given. None where no key has a list."""
    lists = [key for key, kind, *_ in describe(schema) if kind.startswith("list of ")]
    return (
        re.compile(rf"({'|'.join(map(re.escape, lists))})=(?!\[|\$|null$|$)(.*)", re.DOTALL)
        if lists
        else None
    )


def consent(values: Mapping[str, Any]) -> list[str]:
    """`key=value` of each key of CONSENT that is set, as whoever gives it types it."""
    pairs = (
        (key, (values.get(section) or {}).get(name))
        for key in CONSENT
        for section, name in [key.split(".")]
    )
    return [f"{key}={json.dumps(value)}" for key, value in pairs if value]


def merged(arguments: Sequence[str]) -> dict[str, Any]:
    """The values of a recipe's file under those of the command line, interpolations resolved, nothing validated yet.

    Raises UserError also for a secret among them, and for a variable of the environment that is not HARMLESS.
    """
    file, overrides = None, []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        key, separator, value = argument.partition("=")
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
        try:
            check_yaml(value)
            overrides.append(OmegaConf.from_dotlist([argument]))
        except (yaml.YAMLError, ValueError, OmegaConfBaseException) as error:
            raise UserError(key, got=repr(value), expected="a YAML value") from error
    try:
        layers = (
            overrides
            if file is None
            else [_read_yaml(find_yaml(file, RECIPES, "recipe")), *overrides]
        )
        if (number := sum(str(layer).count("${") for layer in layers)) > MOST_INTERPOLATIONS:
            raise UserError(
                "recipe",
                got=f"{number} interpolations",
                expected=f"at most {MOST_INTERPOLATIONS} of ${{…}}",
            )
        over_each_other = OmegaConf.create(reduce(_over, map(OmegaConf.to_container, layers), {}))
        values = cast(dict[str, Any], OmegaConf.to_container(over_each_other, resolve=True))
    except OmegaConfBaseException as error:
        got = one_line(str(error).split("\n")[0])
        raise UserError(
            error.full_key or "recipe", got=got, expected="a value, or ${another.key}"
        ) from error
    given = {argument.partition("=")[0] for argument in arguments}
    if (
        "train.num_train_epochs" in given and "train.max_steps" not in given
    ):  # of the file, which would decide
        values["train"].pop("max_steps", None)
    _check_values(values)
    return values


def _over(below: Any, above: Any) -> Any:
    """Two values of a key in one: mappings key by key, of anything else the one above. OmegaConf would refuse a mapping over a list."""
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    return {**below, **{key: _over(below.get(key), value) for key, value in above.items()}}


def load_own_keys(schema: type[S], arguments: Sequence[str]) -> tuple[S, list[str]]:
    """A section from those of the arguments that are keys of it, and the other arguments."""
    own = [argument for argument in arguments if argument.partition("=")[0] in schema.model_fields]
    return load_recipe(schema, own), [argument for argument in arguments if argument not in own]


def validate(schema: type[S], values: Mapping[str, Any], prefix: str = "") -> S:
    """Build a section. Raises UserError for an unknown, missing or mistyped key, and for one that nothing reads.

    prefix: of the keys in errors, for a section that stands in another file.
    """
    if not isinstance(values, Mapping):
        raise UserError(
            prefix.rstrip(".: ") or "recipe",
            got=repr(values),
            expected="a section with keys of its own",
        )
    chosen = schema.schema_for(values)
    try:
        made = chosen.model_validate(_without_required(values, _required(chosen)))
    except ValidationError as error:
        # Unknown keys come before wrong values, and those before missing ones: a misspelt key explains a missing one.
        order = {"extra_forbidden": 0, "missing": 2}
        raise _user_error(
            schema, chosen, min(error.errors(), key=lambda it: order.get(it["type"], 1)), prefix
        ) from error
    _check_read(made, prefix)
    assert isinstance(made, schema)
    return made


@cache
def _required(schema: type[Section]) -> frozenset[str]:
    return frozenset(
        key for key, _, default, _ in leaves(schema) if default == shown(PydanticUndefined)
    )


def flattened(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) of every key of nested sections, e.g. `eval.suite`; an empty section is a value."""
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def recipe_yaml(recipe: Section | dict[str, Any], *, public: bool = False) -> str:
    """A resolved recipe as YAML, every key in its place; `load_recipe` reads it back equal. public: without places of this machine."""
    values = recipe if isinstance(recipe, dict) else recipe.model_dump()
    return OmegaConf.to_yaml(OmegaConf.create(without_places(values) if public else values))


def _read_yaml(path: Path) -> DictConfig:
    with refusing((yaml.YAMLError, ValueError, OSError), "recipe", path, "a readable YAML file"):
        check_no_secret(
            "recipe", text := read_text(path)
        )  # first, because an error of YAML quotes the line
        if not isinstance(parse_yaml(text) or {}, dict):
            raise UserError("recipe", got=f"{path}, which holds no keys", expected="YAML with keys")
        return cast(DictConfig, OmegaConf.load(io.StringIO(text)))


def _check_values(node: Any, *place: Any) -> None:
    """Raises UserError for a secret, and for an integer that no count can be."""
    if isinstance(node, Mapping | list):
        for name, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            _check_values(value, *place, name)
    elif isinstance(node, str):
        check_no_secret(_spelled(list(place)), node)
    elif isinstance(node, int) and abs(node) > LARGEST:
        raise UserError(
            _spelled(list(place)),
            got=f"an integer of {len(str(node))} digits",
            expected=f"at most {LARGEST:,}",
        )


def _without_required(node: Any, required: Collection[str], prefix: str = "") -> Any:
    """A tree without what is still to be given, which pydantic says is missing.

    A key with a default keeps its mark until it is read.
    """
    if not isinstance(node, Mapping):
        return node
    return {
        str(name): _without_required(value, required, f"{prefix}{name}.")
        for name, value in node.items()
        if value != REQUIRED or f"{prefix}{name}" not in required
    }


def _user_error(
    schema: type[Section], chosen: type[Section], detail: ErrorDetails, prefix: str
) -> UserError:
    place, value, kind = list(detail["loc"]), detail["input"], detail["type"]
    key = prefix + _spelled(place)
    if kind == "extra_forbidden":
        return _unknown(schema, chosen, place, value, prefix)
    if kind == "min_above_max":
        least, most = (prefix + _spelled([*place, name]) for name in ("min", "max"))
        return UserError(
            least,
            got=detail["ctx"]["min"],
            expected=f"at most {most}, which is {detail['ctx']['max']}",
        )
    field = _field_at(chosen, place)
    if kind == "missing":
        while inner := section_of(field.annotation):  # a section that has a required key
            name, field = next(
                (name, entry) for name, entry in inner.model_fields.items() if entry.is_required()
            )
            key = f"{key}.{name}"
        start = (
            ", or a recipe that names it (recipe=pico/eagle3)"
            if "train" in schema.model_fields
            else ""
        )
        return UserError(key, got="nothing", expected=f"{field.description}{start}")
    if kind == "literal_error":
        choices = (
            kind_of(field)
            .split(", ")[0]
            .replace(" or null", "")
            .removeprefix("list of ")
            .split("|")
        )
        return UserError(
            key,
            got=repr(value),
            expected=f"one of {', '.join(choices)}",
            nearest=nearest(ALIASES.get(str(value), str(value)), choices),
        )
    if kind in ("model_type", "model_attributes_type"):
        null = "null or " * (
            section_of(field.annotation) is not field.annotation and isinstance(place[-1], str)
        )
        return UserError(key, got=repr(value), expected=f"{null}a section with keys of its own")
    if isinstance(value, dict) and value:
        return UserError(
            key, got=f"keys below it ({', '.join(map(str, value))})", expected=kind_of(field)
        )
    is_number = {"ge", "gt", "le", "lt", "multiple_of"} & detail.get("ctx", {}).keys()
    got = (
        str(value)
        if is_number
        else f"{value!r} ({'null' if value is None else type(value).__name__})"
    )
    is_in_mapping = kind_of(field) == "mapping" and kind != "dict_type"
    return UserError(
        key,
        got=got,
        expected=detail["msg"].removeprefix("Input should be ")
        if is_in_mapping
        else kind_of(field),
    )


def _unknown(
    schema: type[Section], chosen: type[Section], place: list[Any], value: Any, prefix: str
) -> UserError:
    """A key of another variant is refused by naming who reads it, any other one by the nearest key."""
    key, name = prefix + _spelled(place), str(place[-1])
    plain = ".".join(part for part in place if isinstance(part, str))
    variants = schema.variants()
    keys = {variant: [f"{row[0]}." for row in leaves(other)] for variant, other in variants.items()}
    if readers := [
        variant for variant, own in keys.items() if any(key.startswith(f"{plain}.") for key in own)
    ]:
        mine = next((variant for variant, other in variants.items() if other is chosen), "this one")
        expected = f"no such key: only {' and '.join(readers)} reads it"
        return UserError(key, got=f"{value!r} with method {mine}", expected=expected)
    section = _section_in(_field_at(chosen, place[:-1])) if place[:-1] else chosen
    known = sorted(section.model_fields if section else ())
    close = nearest(name, known)
    elsewhere = {row[0].rpartition(".")[2]: row[0] for row in leaves(chosen)}
    near = f"{key.removesuffix(name)}{close}" if close else elsewhere.get(name)
    if "train" in chosen.model_fields:
        near = ALIASES.get(name, near)
    return UserError(
        key,
        got="an unknown key",
        expected=f"one of {', '.join(known)}" if known else "no keys",
        nearest=near,
    )


def _field_at(schema: type[Section], place: list[Any]) -> FieldInfo:
    """The field at a place, in sections and in lists of them; of a key in a mapping, the mapping's."""
    names = iter(part for part in place if isinstance(part, str))
    field = schema.model_fields[next(names)]
    while (inner := _section_in(field)) and (name := next(names, None)):
        field = inner.model_fields[name]
    return field


def _section_in(field: FieldInfo) -> type[Section] | None:
    """The section that a field is, or has a list of."""
    return section_of(field.annotation) or next(map(section_of, get_args(field.annotation)), None)


def _spelled(place: list[Any]) -> str:
    """('eval', 'tree', 0, 'budget') -> eval.tree[0].budget"""
    return re.sub(
        r"\.\[",
        "[",
        ".".join(f"[{part}]" if isinstance(part, int) else str(part) for part in place),
    )


def _check_read(values: Section, prefix: str) -> None:
    """Raises UserError for a key that was changed and that nothing reads."""
    for name, field in type(values).model_fields.items():
        value, condition = getattr(values, name), read_when_of(field)
        if condition and value != (default := default_of(field)) and not condition.holds(values):
            if isinstance(value, Section) and isinstance(
                default, Section
            ):  # which of its keys was changed?
                inner = next(
                    inner
                    for inner in type(value).model_fields
                    if getattr(value, inner) != getattr(default, inner)
                )
                name, value, default = (
                    f"{name}.{inner}",
                    getattr(value, inner),
                    getattr(default, inner),
                )
            raise UserError(
                f"{prefix}{name}",
                got=shown(value),
                expected=f"{shown(default)}: it is read only {condition.text}",
            )
        if isinstance(value, Section):
            _check_read(value, f"{prefix}{name}.")
        for index, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, Section):
                _check_read(item, f"{prefix}{name}[{index}].")
