"""The parts that sections of a recipe are made of.

Sections are frozen pydantic models that accept no unknown key and no value of another type.
"""

import copy
import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, PydanticUndefined

# pydantic's limits, and how help and errors name them.
LIMIT_WORDS = {
    "ge": "at least",
    "gt": "above",
    "le": "at most",
    "lt": "below",
    "multiple_of": "a multiple of",
}
AtLeastOne = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """A section of a recipe, or the options of a command.

    A section whose keys depend on the value of one of them is a discriminated union of variants.

    Attributes:
        CHOSEN: for a variant, the setting that chooses it, in words that complete "only used …".
    """

    CHOSEN: ClassVar[str] = ""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False
    )

    @classmethod
    def select_schema(cls, values: Mapping[str, object]) -> "type[Section]":
        """Return the schema that values are checked against.

        A subclass with several schemas, such as one for each method, overrides this function.
        """
        return cls

    @classmethod
    def list_schemas(cls) -> "dict[str, type[Section]]":
        """Return all schemas that `select_schema` chooses between, by the name that chooses.

        Without a choice there is one schema with an empty name.
        """
        return {"": cls}

    @model_validator(mode="before")
    @classmethod
    def _select_keys_of_variants(cls, values: object) -> object:
        """Prepare the values of each union of variants for pydantic to choose between them."""
        if not isinstance(values, Mapping):
            # pydantic would report an unknown key for each variant. With the choice written into
            # the values, it compares them with one variant only.
            return values
        selected = dict(values)
        for name, field in cls.model_fields.items():
            keys = values.get(name)
            if field.discriminator and isinstance(keys, Mapping):
                selected[name] = _add_variant_choice(field, keys)
        return selected


@dataclass(frozen=True)
class Choices:
    """A validator that accepts only some names as the value of a key.

    The names are asked for when a value is checked, so that they may be in a table elsewhere.

    Attributes:
        names: returns the names.
        also: returns whether another name is allowed, too.
    """

    names: Callable[[], Sequence[str]]
    also: Callable[[str], bool]

    def __call__(self, value: str) -> str:
        """Return the value, if it is one of the choices; raise otherwise."""
        if value not in self.names() and not self.also(value):
            raise PydanticCustomError("literal_error", "not one of the choices")
        return value


def allow_names(
    names: Callable[[], Sequence[str]], *, also: Callable[[str], bool] = lambda _: False
) -> AfterValidator:
    """Return a validator that accepts only some names, for use in `Annotated[str, …]`.

    Args:
        names: returns the names.
        also: returns whether another name is allowed, too.
    """
    return AfterValidator(Choices(names, also))


@dataclass(frozen=True)
class Condition:
    """The condition under which a key is used, such as "with eval.server".

    Conditions are for keys that depend on several other keys. If one key alone decides which other
    keys there are, the section is a union of variants instead.

    Attributes:
        text: completes "only used …".
        holds: whether the condition holds in the section that the key stands in.
    """

    text: str
    holds: Callable[[Any], bool]


def option(default: object, help: str, *, condition: Condition | None = None, **limits: Any) -> Any:
    """Describe a key: its default (`...` for none), its help text and pydantic's limits.

    If the key is set although its `condition` does not hold, loading the recipe is an error.
    """
    extra: Any = {"condition": condition} if condition else None
    return Field(default, description=help, json_schema_extra=extra, **limits)


def section(of: type[Section]) -> Any:
    """Return a field for a section with the defaults of its keys.

    The section must be given if one of its keys has no default.
    """
    # A section without required keys may be left out of a recipe.
    required = any(field.is_required() for field in of.model_fields.values())
    return Field() if required else Field(default_factory=of)


def like(schema: type[Section], name: str, *, condition: Condition | None = None) -> Any:
    """Return a copy of a key of another schema, with the same default, help and limits.

    Args:
        schema: the other schema.
        name: the name of the key in it.
        condition: replaces the condition of the key, if given.
    """
    field = copy.copy(schema.model_fields[name])

    # pydantic keeps the condition in the field's extra data, where `option` puts it.
    if condition:
        field.json_schema_extra = {"condition": condition}  # type: ignore[dict-item]
    return field


def find_condition(field: FieldInfo) -> Condition | None:
    """Return the condition of a key, None for a key that is always used."""
    extra = field.json_schema_extra
    condition = extra.get("condition") if isinstance(extra, dict) else None
    return condition if isinstance(condition, Condition) else None


def find_default(field: FieldInfo) -> object:
    """Return a field's default; PydanticUndefined for a required field."""
    return field.get_default(call_default_factory=True)


def find_changed_key(key: str, value: object, default: object) -> tuple[str, object]:
    """Return a key that differs from its default, with its value.

    If the key is a section, the first key inside it that differs is returned.
    """
    # Go down to the key that was changed, so that the error names it and not its section.
    if isinstance(value, Section) and isinstance(default, Section):
        for name in type(value).model_fields:
            if getattr(value, name) != getattr(default, name):
                return find_changed_key(
                    f"{key}.{name}", getattr(value, name), getattr(default, name)
                )
    return key, value


def list_variants(hint: object) -> list[type[Section]]:
    """Return the schemas in the type of a key: several for a union of variants.

    A key whose type is a value or a list has none.
    """
    return [
        kind
        for kind in _list_union_members(hint)
        if isinstance(kind, type) and issubclass(kind, Section)
    ]


def _list_union_members(hint: object) -> list[object]:
    """Return the types of a union without their tags, or the only type."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else [hint]
    return [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in members]


def _choose_variant(field: FieldInfo, values: Mapping[str, object]) -> type[Section] | None:
    """Return the variant that the values of a section choose; None if their choice is invalid."""
    # A function chooses the variant by its class name, as for data.regenerate.
    variants = list_variants(field.annotation)
    discriminator = field.discriminator
    if isinstance(discriminator, Discriminator):
        choose = discriminator.discriminator
        assert callable(choose)
        name = choose(values)
        return next(variant for variant in variants if variant.__name__ == name)

    # Otherwise the value of one key chooses, as `hidden_states.mode` does. Without a value, the
    # default of the first variant counts.
    assert discriminator is not None
    choice = values.get(discriminator, find_default(variants[0].model_fields[discriminator]))
    for variant in variants:
        if choice == find_default(variant.model_fields[discriminator]):
            return variant
    return None


def list_fields(variants: Sequence[type[Section]]) -> dict[str, FieldInfo]:
    """Return the keys of all variants of a section, each as the first variant has it."""
    fields: dict[str, FieldInfo] = {}
    for variant in variants:
        for name, field in variant.model_fields.items():
            fields.setdefault(name, field)
    return fields


def describe_condition(variants: Sequence[type[Section]], name: str) -> str | None:
    """Return when a key is used, in words that complete "only used …"; None for always."""
    # A key has a condition of its own, or belongs to some of the variants only.
    owners = [variant for variant in variants if name in variant.model_fields]
    condition = find_condition(owners[0].model_fields[name])
    if condition:
        return condition.text
    return owners[0].CHOSEN if len(owners) < len(variants) else None


def find_default_in(variants: Sequence[type[Section]], name: str) -> object:
    """Return a key's default; null for a required key that only some of the variants have."""
    default = find_default(list_fields(variants)[name])
    is_in_all = all(name in variant.model_fields for variant in variants)
    return None if default is PydanticUndefined and not is_in_all else default


def _add_variant_choice(field: FieldInfo, values: Mapping[str, object]) -> dict[str, object]:
    """Return the values of a section with the choice of its variant, for pydantic to check.

    Keys of other variants are left out if they have their defaults. If they do not, they stay, and
    pydantic reports them.
    """
    variant = _choose_variant(field, values)
    if variant is None:
        return dict(values)  # pydantic names the choices

    selected = {}
    if isinstance(field.discriminator, str):
        selected[field.discriminator] = find_default(variant.model_fields[field.discriminator])

    # A recorded recipe lists the keys of all variants. Those of other variants have their defaults.
    variants = list_variants(field.annotation)
    keys = list_fields(variants)
    own_keys = variant.model_fields
    for name, value in values.items():
        is_optional = name in own_keys and not own_keys[name].is_required()
        if is_optional or name not in keys or value != find_default_in(variants, name):
            selected[name] = value
    return selected


def list_every_key(section: Section) -> dict[str, object]:
    """Return the values of a section, with the defaults of keys that only other variants have."""
    # Add the keys of the other variants, so that a recorded recipe shows every key that there is.
    values = section.model_dump()
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            variants = list_variants(field.annotation)
            defaults = {key: find_default_in(variants, key) for key in list_fields(variants)}
            values[name] = {**defaults, **list_every_key(value)}
    return values


def describe(schema: type[Section]) -> list[tuple[str, str, str, str]]:
    """Return a row (key, type, default, help) for every key, for `--help`.

    A row that only some methods have begins with their names. A key with different rows in
    different methods has all of them.
    """
    # Collect for each row the variants that have it.
    variants = schema.list_schemas()
    readers: dict[tuple[str, str, str, str], list[str]] = {}
    for name, variant in variants.items():
        for row in list_leaves([variant]):
            readers.setdefault(row, []).append(name)

    # Sort by key in the order of the schemas, and mark the rows that only some variants have.
    keys = list(dict.fromkeys(key for key, *_ in readers))
    marks = {
        row: "" if len(names) == len(variants) else f"{', '.join(names)}: "
        for row, names in readers.items()
    }
    sorted_rows = sorted(readers, key=lambda row: keys.index(row[0]))
    return [(*row[:3], f"{marks[row]}{row[3]}") for row in sorted_rows]


def list_leaves(
    variants: Sequence[type[Section]], prefix: str = ""
) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row (key, type, default, help) for every key of a section and its inner sections.

    Args:
        variants: the variants of the section, whose keys are listed together.
        prefix: goes before the keys, such as `eval.`.
    """
    for name, field in list_fields(variants).items():
        key = f"{prefix}{name}"
        inner_variants = list_variants(field.annotation)
        is_always_a_section = len(inner_variants) == len(_list_union_members(field.annotation))
        if not is_always_a_section:
            condition = describe_condition(variants, name)
            help = (
                f"{field.description} (read only {condition})" if condition else field.description
            )
            yield (
                key,
                _describe_kind_of_key(variants, name),
                format_value(find_default_in(variants, name)),
                help or "",
            )
        if inner_variants:
            yield from list_leaves(inner_variants, f"{key}.")


def _describe_kind_of_key(variants: Sequence[type[Section]], name: str) -> str:
    """Return a key's type in words, joined over all variants of its section.

    "or null" is added for a key that only some variants have and that is required there.
    """
    fields = [variant.model_fields[name] for variant in variants if name in variant.model_fields]
    kinds = dict.fromkeys(describe_kind(field) for field in fields)
    or_null = " or null" if fields[0].is_required() and len(fields) < len(variants) else ""
    return "|".join(kinds) + or_null


def describe_kind(field: FieldInfo) -> str:
    """Return a field's type with its choices or limits, in the words of help and errors."""
    # If a validator allows only some names, list them in place of the word `str`.
    kind = _name_kind(field.annotation)
    rules = [*field.metadata, *_list_rules(field.annotation)]
    for rule in rules:
        if isinstance(rule, AfterValidator) and isinstance(rule.func, Choices):
            kind = kind.replace("str", "|".join(rule.func.names()))

    # Append the limits of numbers in words, such as "at least 1".
    limits = []
    for name, words in LIMIT_WORDS.items():
        for rule in rules:
            if hasattr(rule, name):
                limits.append(f"{words} {format_value(getattr(rule, name))}")
    return ", ".join([kind, *limits])


def _list_rules(hint: object) -> list[object]:
    """Return the limits of a type, including those of a list's items and of a nullable value."""
    # pydantic keeps limits either in `Annotated` itself or in a `Field` inside it.
    rules: list[object] = []
    for rule in getattr(hint, "__metadata__", ()):
        rules.extend(getattr(rule, "metadata", [rule]))
    for inner_hint in get_args(hint):
        rules += _list_rules(inner_hint)
    return rules


def _name_kind(hint: object) -> str:
    """Return the name of a type in the words of help and errors."""
    # Unwrap the type, from the outside to the inside.
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is Annotated:
        return _name_kind(arguments[0])
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(
            "null" if argument is types.NoneType else _name_kind(argument) for argument in arguments
        )
    if origin is list:
        return f"list of {_name_kind(arguments[0])}"
    if hint in (Any, object):
        return "name, list or mapping"
    if origin is dict or hint is dict:
        return "mapping"
    assert isinstance(hint, type)
    return "section" if issubclass(hint, Section) else hint.__name__


def format_value(value: object) -> str:
    """Return a value as a recipe would write it."""
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{name}: {format_value(item)}" for name, item in value.items()) + "}"
        )
    return (
        value
        if isinstance(value, str)
        else json.dumps(value, default=lambda section: section.model_dump())
    )
