"""What sections of a recipe are made of: frozen pydantic models that accept no unknown key and no value of another type."""

import copy
import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, PydanticUndefined

AtLeastOne = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """A section of a recipe, or the options of a command."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False
    )

    @classmethod
    def schema_for(cls, values: Mapping[str, Any]) -> "type[Section]":
        """The schema that values are checked against: this one, unless they choose between several."""
        return cls

    @classmethod
    def variants(cls) -> "dict[str, type[Section]]":
        """All schemas that `schema_for` chooses between, by the name that chooses; one with an empty name when there is no choice."""
        return {"": cls}


@dataclass(frozen=True)
class Choices:
    """The names that a key may have, asked for when a value is checked, so that they may stand in a table elsewhere; `also`: any others."""

    names: Callable[[], Sequence[str]]
    also: Callable[[str], bool]

    def __call__(self, value: str) -> str:
        if value not in self.names() and not self.also(value):
            raise PydanticCustomError("literal_error", "not one of the choices")
        return value


def one_of(
    names: Callable[[], Sequence[str]], *, also: Callable[[str], bool] = lambda _: False
) -> AfterValidator:
    """For `Annotated[str, one_of(…)]`."""
    return AfterValidator(Choices(names, also))


@dataclass(frozen=True)
class ReadWhen:
    """When a key is read: `holds` for the section it stands in; `text` completes "read only …"."""

    text: str
    holds: Callable[[Any], bool]


def option(default: Any, help: str, *, read_when: ReadWhen | None = None, **limits: Any) -> Any:
    """A key with its default (`...` for none), its help text with units, and pydantic's limits (`ge`, `le`, `gt`).

    A key with `read_when` is refused where nothing reads it.
    """
    extra: Any = {"read_when": read_when} if read_when else None
    return Field(default, description=help, json_schema_extra=extra, **limits)


def section(of: type[Section]) -> Any:
    """A section with its own defaults, or one that must be given because a key of it has none."""
    required = any(field.is_required() for field in of.model_fields.values())
    return Field() if required else Field(default_factory=of)


def like(schema: type[Section], name: str, *, read_when: ReadWhen | None = None) -> Any:
    """The key of another schema: same default, help and limits, stated once."""
    field = copy.copy(schema.model_fields[name])
    if read_when:
        field.json_schema_extra = {"read_when": read_when}  # type: ignore[dict-item]
    return field


def read_when_of(field: FieldInfo) -> ReadWhen | None:
    extra: Any = field.json_schema_extra or {}
    return extra.get("read_when")


def default_of(field: FieldInfo) -> Any:
    """A field's default; PydanticUndefined for a required one."""
    return field.get_default(call_default_factory=True)


def section_of(hint: Any) -> type[Section] | None:
    """The schema of a section, also of one that may be null; None for values and lists."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next(
        (kind for kind in options if isinstance(kind, type) and issubclass(kind, Section)), None
    )


def describe(schema: type[Section]) -> list[tuple[str, str, str, str]]:
    """Rows of (key, type, default, help) for every key, for `--help`.

    What only some variants have is marked with their names; a key that means something else elsewhere has a row for each meaning.
    """
    variants = schema.variants()
    readers: dict[tuple[str, str, str, str], list[str]] = {}
    for name, variant in variants.items():
        for row in leaves(variant):
            readers.setdefault(row, []).append(name)
    keys = list(dict.fromkeys(key for key, *_ in readers))
    return [
        (
            *row[:3],
            row[3]
            if len(readers[row]) == len(variants)
            else f"{', '.join(readers[row])}: {row[3]}",
        )
        for row in sorted(readers, key=lambda row: keys.index(row[0]))
    ]


def leaves(schema: type[Section], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """The rows of `describe` for one schema."""
    for name, field in schema.model_fields.items():
        key, inner = f"{prefix}{name}", section_of(field.annotation)
        if inner is not field.annotation:
            condition = read_when_of(field)
            help = (field.description or "") + (
                f" (read only {condition.text})" if condition else ""
            )
            yield key, kind_of(field), shown(default_of(field)), help
        if inner:
            yield from leaves(inner, f"{key}.")


def kind_of(field: FieldInfo) -> str:
    """A field's type with its choices or limits, as help and errors state it."""
    kind, rules = _kind(field.annotation), [*field.metadata, *_rules(field.annotation)]
    for rule in rules:
        if isinstance(rule, AfterValidator) and isinstance(rule.func, Choices):
            kind = kind.replace("str", "|".join(rule.func.names()))
    words = {
        "ge": "at least",
        "gt": "above",
        "le": "at most",
        "lt": "below",
        "multiple_of": "a multiple of",
    }
    limits = (
        f"{words[name]} {getattr(rule, name):g}"
        for name in words
        for rule in rules
        if hasattr(rule, name)
    )
    return ", ".join([kind, *limits])


def _rules(hint: Any) -> list[Any]:
    """Limits of the items of a list, or of what may also be null."""
    own = [
        part
        for rule in getattr(hint, "__metadata__", ())
        for part in getattr(rule, "metadata", [rule])
    ]
    return own + [rule for inner in get_args(hint) for rule in _rules(inner)]


def _kind(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(
            "null" if argument is types.NoneType else _kind(argument) for argument in arguments
        )
    if origin is list:
        return f"list of {_kind(arguments[0])}"
    if hint is Any:
        return "name, list or mapping"
    if origin is dict or hint is dict:
        return "mapping"
    return "section" if section_of(hint) else str(hint.__name__)


def shown(default: Any) -> str:
    """A default as a recipe would write it."""
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, dict):
        return f"{{{', '.join(f'{name}: {shown(value)}' for name, value in default.items())}}}"
    return (
        default
        if isinstance(default, str)
        else json.dumps(default, default=lambda value: value.model_dump())
    )
