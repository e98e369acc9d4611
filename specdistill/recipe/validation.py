"""From merged values to a section: pydantic validates, and its first error becomes one line that names the key and what is near it."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from specdistill.errors import UserError, nearest
from specdistill.recipe.fields import Section, default_of, kind_of, leaves, read_when_of, section_of, shown

S = TypeVar("S", bound=Section)


def validate(schema: type[S], values: Mapping[str, Any], prefix: str = "") -> S:
    """Build a section. Raises UserError for an unknown, missing or mistyped key, and for one that nothing reads.

    prefix: of the keys in errors, for a section that stands in another file.
    """
    if not isinstance(values, Mapping):
        raise UserError(prefix.rstrip(".: ") or "recipe", got=repr(values), expected="a section with keys of its own")
    chosen = schema.schema_for(values)
    try:
        made = chosen.model_validate(values)
    except ValidationError as error:
        raise _user_error(schema, chosen, min(error.errors(), key=_is_of_a_value), prefix) from error
    _check_read(made, prefix)
    assert isinstance(made, schema)
    return made


def _is_of_a_value(detail: ErrorDetails) -> int:
    """Unknown keys come before missing ones, and those before wrong values: a misspelt key explains a missing one."""
    return {"extra_forbidden": 0, "missing": 2}.get(detail["type"], 1)


def _user_error(schema: type[Section], chosen: type[Section], detail: ErrorDetails, prefix: str) -> UserError:
    place, value = list(detail["loc"]), detail["input"]
    key = prefix + _spelled(place)
    if detail["type"] == "extra_forbidden":
        return _unknown(schema, chosen, place, value, prefix)
    field = _field(chosen, place)
    if detail["type"] == "missing":
        while inner := section_of(field.annotation):  # a section that has a required key
            name, field = next((name, entry) for name, entry in inner.model_fields.items() if entry.is_required())
            key = f"{key}.{name}"
        return UserError(key, got="nothing", expected=f"a value ({field.description})")
    if detail["type"] == "literal_error":
        choices = kind_of(field).split(", ")[0].replace(" or null", "").split("|")
        return UserError(key, got=repr(value), expected=f"one of {', '.join(choices)}", nearest=nearest(str(value), choices))
    if detail["type"] in ("model_type", "model_attributes_type"):
        null = "null or " * (section_of(field.annotation) is not field.annotation and isinstance(place[-1], str))
        return UserError(key, got=repr(value), expected=f"{null}a section with keys of its own")
    if isinstance(value, dict) and value:
        return UserError(key, got=f"keys below it ({', '.join(map(str, value))})", expected=kind_of(field))
    kind = "null" if value is None else type(value).__name__
    got = str(value) if "ge" in detail.get("ctx", {}) or "le" in detail.get("ctx", {}) else f"{value!r} ({kind})"
    return UserError(key, got=got, expected=kind_of(field))


def _unknown(schema: type[Section], chosen: type[Section], place: list[Any], value: Any, prefix: str) -> UserError:
    """A key of another variant is refused by naming who reads it, any other one by the nearest key."""
    key, name = prefix + _spelled(place), str(place[-1])
    plain = ".".join(part for part in place if isinstance(part, str))
    readers = [
        variant
        for variant, other in schema.variants().items()
        if any(row[0] == plain or row[0].startswith(f"{plain}.") for row in leaves(other))
    ]
    if readers:
        mine = next((variant for variant, other in schema.variants().items() if other is chosen), "this one")
        return UserError(
            key, got=f"{value!r} with method {mine}", expected=f"no such key: only {' and '.join(readers)} reads it"
        )
    parent = _schema_at(chosen, place[:-1])
    known = list(parent.model_fields)
    close = nearest(name, known)
    anywhere = nearest(plain, [row[0] for row in leaves(chosen)])
    near = f"{key.removesuffix(name)}{close}" if close else anywhere
    return UserError(key, got="an unknown key", expected=f"one of {', '.join(sorted(known))}", nearest=near)


def _schema_at(schema: type[Section], place: list[Any]) -> type[Section]:
    for part in place:
        if isinstance(part, str):
            hint = schema.model_fields[part].annotation
            inner = section_of(hint) or next(found for item in _arguments(hint) if (found := section_of(item)))
            schema = inner
    return schema


def _arguments(hint: Any) -> list[Any]:
    arguments = list(getattr(hint, "__args__", ()))
    return arguments + [inner for argument in arguments for inner in _arguments(argument)]


def _field(schema: type[Section], place: list[Any]) -> Any:
    names = [index for index, part in enumerate(place) if isinstance(part, str)]
    last = names[-1]
    return _schema_at(schema, place[:last]).model_fields[place[last]]


def _spelled(place: list[Any]) -> str:
    """('eval', 'tree', 0, 'budget') -> eval.tree[0].budget"""
    return re.sub(r"\.\[", "[", ".".join(f"[{part}]" if isinstance(part, int) else part for part in place))


def _check_read(values: Section, prefix: str) -> None:
    """Raises UserError for a key that was changed and that nothing reads."""
    for name, field in type(values).model_fields.items():
        value, condition = getattr(values, name), read_when_of(field)
        if condition and value != (default := default_of(field)) and not condition.holds(values):
            if isinstance(value, Section) and isinstance(default, Section):  # which of its keys was changed?
                inner = next(inner for inner in type(value).model_fields if getattr(value, inner) != getattr(default, inner))
                name, value, default = f"{name}.{inner}", getattr(value, inner), getattr(default, inner)
            raise UserError(f"{prefix}{name}", got=shown(value), expected=f"{shown(default)}: it is read only {condition.text}")
        if isinstance(value, Section):
            _check_read(value, f"{prefix}{name}.")
        for index, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, Section):
                _check_read(item, f"{prefix}{name}[{index}].")
