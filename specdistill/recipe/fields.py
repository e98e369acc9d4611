"""The parts that sections of a recipe are made of.

Sections are frozen pydantic models that accept no unknown key and no value of another type.
"""

import copy
import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin

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

    If the value of one key decides which other keys there are, the section is a discriminated union
    of variants, which are classes with different keys.

    Attributes:
        CHOSEN: for such a variant, the setting that chooses it, in words that complete "only used
            …", for example "with data.regenerate.server".
    """

    CHOSEN: ClassVar[str] = ""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False
    )

    @classmethod
    def select_schema(cls, values: Mapping[str, object]) -> "type[Section]":
        """Return the schema that a section's values are checked against: this class.

        A subclass may have several schemas, for example one for each method. It then overrides this
        function, and chooses a schema by the values.
        """
        return cls

    @classmethod
    def list_schemas(cls) -> "dict[str, type[Section]]":
        """Return all schemas that `select_schema` chooses between, by name.

        The schemas of recipes have the names of the methods. A class with only one schema returns
        itself under an empty name.
        """
        return {"": cls}

    @model_validator(mode="before")
    @classmethod
    def _add_variant_choices(cls, values: object) -> object:
        """Prepare the values of inner sections with variants, before pydantic checks them.

        Some sections have variants, which are classes with different keys. If one key of such a
        section chooses the variant, that key is called the discriminator. pydantic needs its value,
        to know which class to check the section against. A recipe may leave the key out, so its
        default is added here (see `_add_variant_choice`).
        """
        # Anything but a mapping is left to pydantic, which reports it.
        if not isinstance(values, Mapping):
            return values
        completed = dict(values)
        for name, field in cls.model_fields.items():
            inner_values = values.get(name)
            if field.discriminator and isinstance(inner_values, Mapping):
                completed[name] = _add_variant_choice(field, inner_values)
        return completed


@dataclass(frozen=True)
class Choices:
    """A validator that accepts only some names as the value of a key.

    The names may come from a table of another module, because they are only looked up when a value
    is checked.

    Attributes:
        names: a function that returns the names.
        also: a function that returns whether a name that is not among them is allowed, too.
    """

    names: Callable[[], Sequence[str]]
    also: Callable[[str], bool]

    def __call__(self, value: str) -> str:
        """Return the value, if it is one of the choices; raise otherwise."""
        if value not in self.names() and not self.also(value):
            # pydantic has this error for a wrong value of a `Literal`, so both get one message.
            raise PydanticCustomError("literal_error", "not one of the choices")
        return value


def allow_names(
    names: Callable[[], Sequence[str]], *, also: Callable[[str], bool] = lambda _: False
) -> AfterValidator:
    """Return a pydantic validator that accepts only some names, for use in `Annotated[str, …]`.

    Args:
        names: a function that returns the allowed names. It is called when a value is checked.
        also: a function that returns whether a name that is not among them is allowed, too.
    """
    return AfterValidator(Choices(names, also))


@dataclass(frozen=True)
class Condition:
    """The condition under which a key is used, such as "with eval.server".

    Conditions are for keys that depend on several other keys. If one key alone decides which other
    keys there are, the section is a union of variants instead.

    Attributes:
        text: completes "only used …".
        holds: a function that gets the section of the key, and returns whether the condition holds.
    """

    text: str
    holds: Callable[[Any], bool]


def option(default: object, help: str, *, condition: Condition | None = None, **limits: Any) -> Any:
    """Return the pydantic field of a recipe key.

    Args:
        default: the default value; `...` if the key must be given.
        help: the help text.
        condition: when the key is used; None for always. If the key is set although the condition
            does not hold, loading the recipe fails.
        **limits: pydantic's limits, such as `ge=1` for values of at least 1.
    """
    extra: Any = {"condition": condition} if condition else None
    return Field(default, description=help, json_schema_extra=extra, **limits)


def section(of: type[Section]) -> Any:
    """Return the pydantic field of a recipe key whose value is a section with keys of its own.

    A recipe may leave the section out, and then gets the defaults of all keys. If one of the keys
    has no default, the section must be given.

    Args:
        of: the class of the section.
    """
    required = any(field.is_required() for field in of.model_fields.values())
    return Field() if required else Field(default_factory=of)


def like(schema: type[Section], name: str, *, condition: Condition | None = None) -> Any:
    """Return a pydantic field with the default, help and limits of a key of another schema.

    Args:
        schema: the other schema.
        name: the name of the key in that schema.
        condition: replaces the condition of the key, if given.
    """
    field = copy.copy(schema.model_fields[name])

    # pydantic keeps the condition in the field's extra data, where `option` puts it.
    if condition:
        field.json_schema_extra = {"condition": condition}  # type: ignore[dict-item]
    return field


def find_condition(field: FieldInfo) -> Condition | None:
    """Return the condition under which a key is used; None for a key that is always used."""
    # `option` has put the condition into the extra data of the pydantic field.
    extra = field.json_schema_extra
    condition = extra.get("condition") if isinstance(extra, dict) else None
    return condition if isinstance(condition, Condition) else None


def find_default(field: FieldInfo) -> object:
    """Return a field's default; PydanticUndefined for a required field."""
    return field.get_default(call_default_factory=True)


def find_changed_key(key: str, value: object, default: object) -> tuple[str, object]:
    """Return the key that was changed from its default, and the value that it has now.

    If the value is a section, the result is the first key inside the section that differs. So an
    error can name that key, and not the whole section.

    Args:
        key: the key.
        value: the value of the key, which differs from the default.
        default: the default of the key.
    """
    if isinstance(value, Section) and isinstance(default, Section):
        for name in type(value).model_fields:
            if getattr(value, name) != getattr(default, name):
                return find_changed_key(
                    f"{key}.{name}", getattr(value, name), getattr(default, name)
                )
    return key, value


def list_variants(hint: object) -> list[type[Section]]:
    """Return the section classes in the type of a recipe key.

    There are several classes if the section has variants (classes with different keys), and none if
    the key takes no section but a value or a list.

    Args:
        hint: the type hint of the key.
    """
    return [
        kind
        for kind in _list_union_members(hint)
        if isinstance(kind, type) and issubclass(kind, Section)
    ]


def _list_union_members(hint: object) -> list[object]:
    """Return the types that a union of types joins; for any other type, a list with only that type.

    A member `Annotated[kind, Tag(…)]` is returned as `kind`.
    """
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else [hint]
    return [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in members]


def _choose_variant(field: FieldInfo, values: Mapping[str, object]) -> type[Section] | None:
    """Return which of a section's variants (classes with different keys) its values choose.

    Args:
        field: the pydantic field of the section, a discriminated union.
        values: the values of the section.

    Returns:
        The class of the variant; None if the values choose none that exists.
    """
    variants = list_variants(field.annotation)
    discriminator = field.discriminator

    # The choice may be made by a function, which returns the name of a class, as for
    # data.regenerate.
    if isinstance(discriminator, Discriminator):
        choose = discriminator.discriminator
        assert callable(choose)
        name = choose(values)
        return next(variant for variant in variants if variant.__name__ == name)

    # Otherwise the value of one key makes the choice, as `hidden_states.mode` does. Each variant
    # has its own value as the default of this key. Without a value, the first variant is chosen.
    assert discriminator is not None
    choice = values.get(discriminator, find_default(variants[0].model_fields[discriminator]))
    for variant in variants:
        if choice == find_default(variant.model_fields[discriminator]):
            return variant
    return None


def list_fields(variants: Sequence[type[Section]]) -> dict[str, FieldInfo]:
    """Return the pydantic field of each key that a section can have in any of its variants.

    If several variants have a key, its field is taken from the first of these variants.
    """
    fields: dict[str, FieldInfo] = {}
    for variant in variants:
        for name, field in variant.model_fields.items():
            fields.setdefault(name, field)
    return fields


def describe_condition(variants: Sequence[type[Section]], name: str) -> str | None:
    """Return when a key is used, in words that complete "only used …"; None for always.

    Args:
        variants: all variants of the key's section.
        name: the name of the key.
    """
    # The key may have a condition of its own. Otherwise, if only some variants have the key, use
    # `CHOSEN` of the first of them, which says when it is chosen.
    owners = [variant for variant in variants if name in variant.model_fields]
    condition = find_condition(owners[0].model_fields[name])
    if condition:
        return condition.text
    return owners[0].CHOSEN if len(owners) < len(variants) else None


def find_default_in(variants: Sequence[type[Section]], name: str) -> object:
    """Return the default of a key in a section with variants.

    For a key without a default, the result is PydanticUndefined if all variants have the key. It is
    None if only some of them have it, because a recipe with another variant does not need the key.
    """
    default = find_default(list_fields(variants)[name])
    is_in_all = all(name in variant.model_fields for variant in variants)
    return None if default is PydanticUndefined and not is_in_all else default


def _add_variant_choice(field: FieldInfo, values: Mapping[str, object]) -> dict[str, object]:
    """Prepare the values of a section with variants, so that pydantic can check them.

    Variants are classes with different keys. If one key (the discriminator) chooses the variant,
    the result always has this key, with its default if the section leaves it out.

    The record of a run lists the keys of all variants. The record must be accepted as a recipe,
    even after the user has changed it to another variant. So two kinds of keys are left out:

    - a key that the chosen variant lacks, if it has its default. With any other value it stays, and
      pydantic reports it as unknown;
    - a key that the chosen variant requires and another variant lacks, if it is null. For example,
      the record of a run with hidden_states.mode=online has `path: null`. If the user changes the
      mode to offline, which requires `path`, pydantic then reports `path` as missing.

    Args:
        field: the pydantic field of the section, a union of variants.
        values: the values of the section.
    """
    variant = _choose_variant(field, values)
    if variant is None:
        return dict(values)  # pydantic's error names the possible choices

    # Write the choice into the values: the section may have left it to the default.
    completed = {}
    if isinstance(field.discriminator, str):
        completed[field.discriminator] = find_default(variant.model_fields[field.discriminator])

    # Leave out the two kinds of keys that the docstring names, if they have the value that the
    # record of a run gives them. `find_default_in` returns this value: the default of a key, or
    # None for a key that one variant requires and another lacks.
    variants = list_variants(field.annotation)
    keys = list_fields(variants)
    own_keys = variant.model_fields
    for name, value in values.items():
        is_only_in_others = name in keys and name not in own_keys
        is_required = name in own_keys and own_keys[name].is_required()
        may_leave_out = is_only_in_others or is_required
        if not (may_leave_out and value == find_default_in(variants, name)):
            completed[name] = value
    return completed


def list_every_key(section: Section) -> dict[str, object]:
    """Return the values of a section with every key that there is, for the record of a run.

    If an inner section has variants (classes with different keys), the keys that only its other
    variants have are added with their defaults.
    """
    values = section.model_dump()
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            variants = list_variants(field.annotation)
            defaults = {key: find_default_in(variants, key) for key in list_fields(variants)}
            values[name] = {**defaults, **list_every_key(value)}
    return values


class HelpRow(NamedTuple):
    """A row of the output of `--help`, about one key.

    Attributes:
        key: the key, with its sections, such as `eval.suite`.
        kind: its type in words.
        default: its default, as it would be written in a recipe.
        help: its help text.
    """

    key: str
    kind: str
    default: str
    help: str


def describe(schema: type[Section]) -> list[HelpRow]:
    """Return a row (key, type, default, help) for every key, for the output of `--help`.

    A key that differs between methods has several rows. If only some methods have a row, its help
    begins with the names of these methods.
    """
    # Collect for each row the names of the methods whose schema has it.
    variants = schema.list_schemas()
    methods_of_row: dict[HelpRow, list[str]] = {}
    for name, variant in variants.items():
        for row in list_leaves([variant]):
            methods_of_row.setdefault(row, []).append(name)

    # Put the methods' names before the help of rows that only some of them have. Then sort, so that
    # the rows of one key follow each other.
    keys = list(dict.fromkeys(row.key for row in methods_of_row))
    rows = []
    for row, names in methods_of_row.items():
        methods = "" if len(names) == len(variants) else f"{', '.join(names)}: "
        rows.append(row._replace(help=f"{methods}{row.help}"))
    return sorted(rows, key=lambda row: keys.index(row.key))


def list_leaves(variants: Sequence[type[Section]], prefix: str = "") -> Iterator[HelpRow]:
    """Yield a row (key, type, default, help) for every key of a section and its inner sections.

    Args:
        variants: the variants of the section, whose keys are listed together.
        prefix: goes before the keys, such as `eval.`.
    """
    for name, field in list_fields(variants).items():
        key = f"{prefix}{name}"

        # A key that is always a section has no row of its own, only rows for the keys in it. A key
        # that is a section or null has a row of its own and rows for the keys in it.
        inner_variants = list_variants(field.annotation)
        is_always_a_section = len(inner_variants) == len(_list_union_members(field.annotation))
        if not is_always_a_section:
            condition = describe_condition(variants, name)
            help = (
                f"{field.description} (read only {condition})" if condition else field.description
            )
            yield HelpRow(
                key,
                _describe_kind_of_key(variants, name),
                format_value(find_default_in(variants, name)),
                help or "",
            )
        if inner_variants:
            yield from list_leaves(inner_variants, f"{key}.")


def _describe_kind_of_key(variants: Sequence[type[Section]], name: str) -> str:
    """Return a key's type in words; if it differs between variants, all types joined with `|`.

    Variants are forms of a section with different keys. A key may be required in one variant and
    unknown in another, where a recipe may only set it to null. The type of such a key ends in
    "or null".
    """
    fields = [variant.model_fields[name] for variant in variants if name in variant.model_fields]
    kinds = dict.fromkeys(describe_kind(field) for field in fields)
    is_in_all = len(fields) == len(variants)
    or_null = " or null" if fields[0].is_required() and not is_in_all else ""
    return "|".join(kinds) + or_null


def describe_kind(field: FieldInfo) -> str:
    """Return the type of a key for help and errors, with its choices or limits in words.

    Examples are `float32|bfloat16` and `int, at least 1`.
    """
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
    """Return the limits and validators in a type hint, including those of the types inside it.

    `list[Annotated[int, Field(ge=1)]]`, for example, has a limit of its items.
    """
    # `Annotated` has the rules in its metadata: directly, or in the metadata of a pydantic `Field`.
    rules: list[object] = []
    for rule in getattr(hint, "__metadata__", ()):
        rules.extend(getattr(rule, "metadata", [rule]))
    for inner_hint in get_args(hint):
        rules += _list_rules(inner_hint)
    return rules


def _name_kind(hint: object) -> str:
    """Return the name of a type for help and errors, such as `list of int` or `str or null`."""
    # Unwrap nested types from the outside to the inside.
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
    # A key such as `data.source` accepts a value in one of several forms, so its type is `object`
    # or `Any`. Such values are names, mappings or lists of them.
    if hint in (Any, object):
        return "name, list or mapping"
    if origin is dict or hint is dict:
        return "mapping"
    assert isinstance(hint, type)
    return "section" if issubclass(hint, Section) else hint.__name__


def format_value(value: object) -> str:
    """Return a value as it would be written in a recipe; `required` for a missing default."""
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
